"""Which words of a text speak for which subject: look-ups in sets, in many languages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import pairwise

PREFIX = 6
"""How many bytes of UTF-8 stems are found by: three Cyrillic letters, two of Hindi or Korean."""

_KEPT = frozenset(b"_+#")
_BLANKS = bytes(byte if byte >= 0x80 or chr(byte).isalnum() or byte in _KEPT else 0x20 for byte in range(256))
_ONLY_ASCII = bytes(byte if byte < 0x80 else 0x20 for byte in _BLANKS)
_MARKS = tuple(mark.encode() for mark in "\u2019\u201c\u201d\u201e\u2014\u2013\u00ab\u00bb\u00bf\u00a1")
# The Arabic article, alone and after "and", "by" and "for": words are looked up without it.
_ARTICLES = tuple(f" {article}".encode() for article in ("وال", "بال", "لل", "ال"))
_C2, _E280 = b"\xc2", b"\xe2\x80"  # with which each of them begins
_UNSPACED_LEADS = tuple(bytes((lead,)) for lead in (0xE0, *range(0xE3, 0xEA)))
_GREEK_AND_ON = 0x0370
_LATIN_AGAIN = 0x1E00
_THAI = range(0x0E00, 0x0E80)
_KANA_AND_HAN = range(0x3040, 0xA000)


@dataclass(frozen=True, slots=True)
class Lexicon:
    """Terms in UTF-8, each with the columns (of `subjects`) that it counts for.

    `words` are whole tokens; `phrases` go by their first token; `stems`, the beginnings of words in other
    scripts than Latin, by their first PREFIX bytes; `pieces` of unspaced scripts by their first two
    characters; `signs` are those of one.
    """

    subjects: tuple[str, ...]
    words: dict[bytes, tuple[int, ...]]
    phrases: dict[bytes, tuple[tuple[bytes, frozenset[bytes], int], ...]]
    stems: dict[bytes, tuple[tuple[bytes, int], ...]]
    pieces: dict[tuple[str, str], tuple[tuple[bytes, int], ...]]
    signs: tuple[tuple[str, int], ...]
    word_set: frozenset[bytes]
    phrase_set: frozenset[bytes]
    stem_set: frozenset[bytes]
    piece_set: frozenset[tuple[str, str]]

    def count(self, text: str) -> tuple[list[int], list[bytes], frozenset[bytes]]:
        """How many terms of each subject a text has, each term once; the text's tokens, and their set."""
        raw = text.lower().encode("utf-8", "surrogatepass")
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
        for head in known & self.phrase_set:
            for phrase, others, column in self.phrases[head]:
                if others <= known and phrase in padded:
                    counts[column] += 1
        return counts, tokens, known

    def _count_others(self, text: str, padded: bytes, known: Iterable[bytes], counts: list[int]) -> None:
        for start in {word[:PREFIX] for word in known} & self.stem_set:
            for stem, column in self.stems[start]:
                if stem in padded:
                    counts[column] += 1
        if not any(lead in padded for lead in _UNSPACED_LEADS):
            return
        for pair in self.piece_set.intersection(pairwise(text)):
            for piece, column in self.pieces[pair]:
                if piece in padded:
                    counts[column] += 1
        for sign, column in self.signs:
            if sign in text:
                counts[column] += 1


def _spaced(raw: bytes) -> tuple[bytes, list[bytes]]:
    """Text with blanks for punctuation, and its tokens: ASCII words stand alone beside unspaced scripts."""
    if _C2 in raw or _E280 in raw:
        for mark in _MARKS:
            raw = raw.replace(mark, b" ")
    padded = b" " + raw.translate(_BLANKS) + b" "
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
    return build((resources.files("policies.signals") / "lexicon.txt").read_text(encoding="utf-8"))


def build(text: str) -> Lexicon:
    """A lexicon from its text; the head of `lexicon.txt` says how it is written."""
    subjects: list[str] = []
    words: dict[bytes, set[int]] = {}
    phrases: dict[bytes, set[tuple[bytes, int]]] = {}
    stems: dict[bytes, set[tuple[bytes, int]]] = {}
    pieces: dict[tuple[str, str], set[tuple[bytes, int]]] = {}
    signs: set[tuple[str, int]] = set()
    for subject, term in _terms(text):
        if subject not in subjects:
            subjects.append(subject)
        column = subjects.index(subject)
        raw = term.encode().translate(_BLANKS)
        points = [ord(character) for character in term]
        if any(point in _THAI or point in _KANA_AND_HAN for point in points):
            if len(term) == 1:
                signs.add((term, column))
            else:
                pieces.setdefault((term[0], term[1]), set()).add((raw, column))
        elif points[0] >= _GREEK_AND_ON and points[0] not in range(_LATIN_AGAIN, 0x2000):
            stems.setdefault(raw[:PREFIX], set()).add((b" " + raw, column))
        elif b" " in raw.strip():
            phrases.setdefault(raw.split()[0], set()).add((raw.strip(), column))
        else:
            words.setdefault(raw.strip(), set()).add(column)
    return Lexicon(
        tuple(subjects),
        {word: tuple(sorted(columns)) for word, columns in words.items()},
        {
            head: tuple((term, frozenset(term.split()[1:]), column) for term, column in sorted(terms))
            for head, terms in phrases.items()
        },
        {start: tuple(sorted(terms)) for start, terms in stems.items()},
        {start: tuple(sorted(terms)) for start, terms in pieces.items()},
        tuple(sorted(signs)),
        frozenset(words),
        frozenset(phrases),
        frozenset(stems),
        frozenset(pieces),
    )


def _terms(text: str) -> Iterator[tuple[str, str]]:
    """(subject, term) of each entry, `_` as a blank where it is not part of a name like `__init__`."""
    subject = ""
    for line in text.splitlines():
        if line.startswith("["):
            subject = line.strip("[] ")
        elif subject and line and not line.startswith("#"):
            for term in line.partition(":")[2].split():
                yield subject, term if term.startswith("__") else term.replace("_", " ")
