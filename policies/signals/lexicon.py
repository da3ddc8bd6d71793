"""Which words of a text speak for which subject: look-ups in sets, in many languages."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import chain

PREFIX = 6
"""How many bytes of UTF-8 stems are found by: three Cyrillic letters, two of Hindi or Korean."""

_KEPT = frozenset(b"_+#")
_BLANKS = bytes(byte if byte >= 0x80 or chr(byte).isalnum() or byte in _KEPT else 0x20 for byte in range(256))
_ONLY_ASCII = bytes(byte if byte < 0x80 else 0x20 for byte in _BLANKS)
_MARKS = tuple(mark.encode() for mark in "\u2019\u201c\u201d\u201e\u2014\u2013")
_LATIN_MARKS = tuple(mark.encode() for mark in "\u00ab\u00bb\u00bf\u00a1")
# The Arabic article, alone and after "and", "by" and "for": words are looked up without it.
_ARTICLES = tuple(f" {article}".encode() for article in ("وال", "بال", "لل", "ال"))
_C2, _E280 = b"\xc2", b"\xe2\x80"  # with which each of them begins
_UNSPACED_LEADS = tuple(bytes((lead,)) for lead in (0xE0, *range(0xE3, 0xEA)))
_GREEK_AND_ON = 0x0370
_GREEK_BYTES = 0xCD
_BEFORE_GREEK = bytes(range(_GREEK_BYTES))
_LATIN_AGAIN = 0x1E00
_UTF_16 = f"utf-16-{sys.byteorder[0]}e"
# Thai, kana and Han.
_UNSPACED = re.compile("[\u0e00-\u0e7f\u3040-\u9fff]")


@dataclass(frozen=True, slots=True)
class Lexicon:
    """Terms in UTF-8, each with the columns (of `subjects`) that it counts for.

    `words` are whole tokens; `phrases` go by their longest token; `stems`, the beginnings of words in other
    scripts than Latin, by their first PREFIX bytes; `pieces` of unspaced scripts by their
    first two characters, as `_pairs` has them, and `characters` are those of one.
    """

    subjects: tuple[str, ...]
    words: dict[bytes, tuple[int, ...]]
    phrases: dict[bytes, tuple[tuple[bytes, frozenset[bytes], int], ...]]
    stems: dict[bytes, tuple[tuple[bytes, int], ...]]
    pieces: dict[int, tuple[tuple[str, int], ...]]
    characters: tuple[tuple[str, int], ...]
    word_set: frozenset[bytes]
    phrase_set: frozenset[bytes]
    pair_set: frozenset[int]

    def count(self, text: str) -> tuple[list[int], list[bytes], frozenset[bytes]]:
        """How many terms of each subject a text has, each term once; the text's tokens, and their set."""
        text = text.lower()
        raw = text.encode("utf-8", "surrogatepass")
        counts = [0] * len(self.subjects)
        if text.isascii():
            padded = raw.translate(_BLANKS)
            tokens = padded.split()
            known = frozenset(tokens)
        else:
            padded, tokens = _spaced(raw)
            known = frozenset(tokens)
            self._count_others(text, padded, known, counts)
        for word in known & self.word_set:
            for column in self.words[word]:
                counts[column] += 1
        for longest in known & self.phrase_set:
            for phrase, others, column in self.phrases[longest]:
                if others <= known and phrase in padded:
                    counts[column] += 1
        return counts, tokens, known

    def _count_others(self, text: str, padded: bytes, known: Iterable[bytes], counts: list[int]) -> None:
        if not padded.translate(None, _BEFORE_GREEK):
            return
        stems, none = self.stems, ()
        found = {
            term for word in known for term in stems.get(word[:PREFIX], none) if word.startswith(term[0])
        }
        for _, column in found:
            counts[column] += 1
        if not any(lead in padded for lead in _UNSPACED_LEADS):
            return
        for pair in self.pair_set.intersection(_pairs(text)):
            for piece, column in self.pieces[pair]:
                if piece in text:
                    counts[column] += 1
        for piece, column in self.characters:
            if piece in text:
                counts[column] += 1


def _pairs(text: str) -> Iterator[int]:
    """Each two units of UTF-16 side by side as one number: no character is made for it."""
    raw = text.encode(_UTF_16, "surrogatepass")
    even, odd = len(raw) & ~3, (len(raw) - 2) & ~3
    units = memoryview(raw)
    return chain(units[:even].cast("I"), units[2 : 2 + odd].cast("I") if odd > 0 else ())


def _spaced(raw: bytes) -> tuple[bytes, list[bytes]]:
    """Text with blanks for punctuation, and its tokens: ASCII words stand alone beside unspaced scripts."""
    if _E280 in raw:
        for mark in _MARKS:
            raw = raw.replace(mark, b" ")
    if _C2 in raw:
        for mark in _LATIN_MARKS:
            raw = raw.replace(mark, b" ")
    padded = b" " + raw.translate(_BLANKS) + b" "
    if not padded.translate(None, _BEFORE_GREEK):
        return padded, padded.split()
    if b"\xd8" in padded or b"\xd9" in padded:
        for article in _ARTICLES:
            padded = padded.replace(article, b" ")
    tokens = padded.split()
    if any(lead in padded for lead in _UNSPACED_LEADS):
        tokens += padded.translate(_ONLY_ASCII).split()
    return padded, tokens


@cache
def lexicon() -> Lexicon:
    """The lexicon that comes with the package."""
    return build(shipped_terms())


def shipped_terms() -> Iterator[tuple[str, str]]:
    """What `terms` gives of the lexicon that comes with the package."""
    return terms((resources.files("policies.signals") / "lexicon.txt").read_text(encoding="utf-8"))


def terms(text: str) -> Iterator[tuple[str, str]]:
    """(subject, term) of each entry of a text, `_` as a blank where it is not part of a name like `__init__`.

    The head of `lexicon.txt` says how it is written.
    """
    subject = ""
    for line in text.splitlines():
        if line.startswith("["):
            subject = line.strip("[] ")
        elif subject and line and not line.startswith("#"):
            for term in line.partition(":")[2].split():
                yield subject, term if term.startswith("__") else term.replace("_", " ")


def build(entries: Iterable[tuple[str, str]]) -> Lexicon:
    """A lexicon of (subject, term) pairs; a term that ends with a blank is a whole word."""
    subjects: list[str] = []
    words: dict[bytes, set[int]] = {}
    phrases: set[tuple[bytes, int]] = set()
    stems: dict[bytes, set[tuple[bytes, int]]] = {}
    pieces: dict[int, set[tuple[str, int]]] = {}
    characters: set[tuple[str, int]] = set()
    for subject, term in entries:
        if subject not in subjects:
            subjects.append(subject)
        column = subjects.index(subject)
        raw = term.encode().translate(_BLANKS)
        first = ord(term[0])
        spaced = b" " in raw.strip()
        if _UNSPACED.search(term):
            if len(term) == 1:
                characters.add((term, column))
            else:
                pieces.setdefault(next(_pairs(term)), set()).add((term, column))
        elif first >= _GREEK_AND_ON and first not in range(_LATIN_AGAIN, 0x2000):
            if spaced:
                phrases.add((raw, column))
            elif raw.endswith(b" "):
                words.setdefault(raw.strip(), set()).add(column)
            else:
                stems.setdefault(raw[:PREFIX], set()).add((raw, column))
        elif spaced:
            phrases.add((raw.strip(), column))
        else:
            words.setdefault(raw.strip(), set()).add(column)
    by_longest = _by_longest(phrases)
    return Lexicon(
        tuple(subjects),
        {word: tuple(sorted(columns)) for word, columns in words.items()},
        by_longest,
        {start: tuple(sorted(terms)) for start, terms in stems.items()},
        {start: tuple(sorted(terms)) for start, terms in pieces.items()},
        tuple(sorted(characters)),
        frozenset(words),
        frozenset(by_longest),
        frozenset(pieces),
    )


def _by_longest(
    phrases: Iterable[tuple[bytes, int]],
) -> dict[bytes, tuple[tuple[bytes, frozenset[bytes], int], ...]]:
    """Phrases by their longest word, which is seldom a common one, with the others.

    The last word of a phrase in another script than Latin may go on, unless the phrase ends with a blank.
    """
    found: dict[bytes, list[tuple[bytes, frozenset[bytes], int]]] = {}
    for phrase, column in sorted(phrases):
        tokens = phrase.split()
        if phrase[0] >= _GREEK_BYTES and not phrase.endswith(b" "):
            tokens.pop()
        longest = max(tokens, key=len)
        found.setdefault(longest, []).append((phrase, frozenset(tokens) - {longest}, column))
    return {longest: tuple(some) for longest, some in found.items()}
