"""The language of a text: by its script where one language has it to itself, else by its commonest words.

The words that hold sentences together tell languages apart as soon as there is a sentence; how other words
end helps. That is a look-up or two a word, so the cost is linear and small. A text of a word or two is `und`
(undetermined, as BCP 47 has it) rather than a guess. Words and endings are in `languages.txt`, the endings
fitted by `bench/fit_languages.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import NamedTuple

from policies.facts import Facts
from policies.signals.script import script_of
from policies.signals.seen import Seen
from policies.signals.signal import Memo, Signal

UNDETERMINED = "und"
LANGUAGES = (
    "af", "am", "ar", "az", "be", "bg", "bn", "bo", "ca", "cs", "cy", "da", "de", "el", "en", "eo",
    "es", "et", "eu", "fa", "fi", "fr", "ga", "gl", "gu", "ha", "he", "hi", "hr", "hu", "hy", "id",
    "is", "it", "ja", "ka", "kk", "km", "kn", "ko", "lo", "lt", "lv", "mk", "ml", "mn", "mr", "ms",
    "mt", "my", "ne", "nl", "no", "or", "pa", "pl", "ps", "pt", "ro", "ru", "si", "sk", "sl", "so",
    "sq", "sr", "sv", "sw", "ta", "te", "th", "tl", "tr", "uk", "ur", "vi", "yo", "zh", "zu", "und",
)  # fmt: skip
"""All that `language_of` can say."""

HEAD = 320
TAIL = 120
"""Characters that are read of a text, at either end."""

ENOUGH = 0.6
"""Below this weight there is no answer. A word has the weight 1 among the languages that share it."""

LETTER = 0.6
"""The weight of a telling letter, whichever and however often."""

ENDING = 0.15
"""The part of the weight of an ending that counts, where the word itself is not known."""

SHARED = 6
"""Languages that may share a word."""

ENGLISH = 4
"""So many different words that only English has, among the first, are enough to know it."""

FIRST = 150
PLAIN = 3.0
"""Where so many characters have this weight for one language and half of it for no other, that is enough."""

_ALONE = {
    "greek": "el",
    "armenian": "hy",
    "hebrew": "he",
    "bengali": "bn",
    "tamil": "ta",
    "telugu": "te",
    "thai": "th",
    "georgian": "ka",
    "hangul": "ko",
    "ethiopic": "am",
    "khmer": "km",
    "han": "zh",
    "japanese": "ja",
}
_OTHER = (
    (0x0A00, "pa"), (0x0A80, "gu"), (0x0B00, "or"), (0x0B80, ""), (0x0C80, "kn"), (0x0D00, "ml"),
    (0x0D80, "si"), (0x0E00, ""), (0x0E80, "lo"), (0x0F00, "bo"), (0x1000, "my"), (0x10A0, ""),
)  # fmt: skip
# Not `\w`: it leaves the vowel signs of Indic scripts out.
WORD = re.compile(r"""[^\s\d!-/:-@\[-`{-~¡¿«»…“”‘’„،؛؟।、。]+""")  # noqa: RUF001
_WEIGHT = re.compile(r"(\D+)(\d+)")


Weights = tuple[tuple[str, float], ...]
"""Languages, each with what a word adds to its score."""


class Words(NamedTuple):
    """What tells the languages of one script apart: words and their endings, with their weights for some
    languages; letters, with their languages."""

    words: Mapping[str, Weights]
    letters: Mapping[str, tuple[str, ...]]
    endings: Mapping[str, Weights]


def ending(word: str) -> str:
    """The last three letters of a word; of a shorter one, all, marked as the whole."""
    return word[-3:] if len(word) > 3 else f"^{word}"


def build(text: str) -> Mapping[str, Words]:
    """Words by script, of lines `code: word word` below `[script]`; letters below `[letters]`."""
    words: dict[str, dict[str, tuple[str, ...]]] = {}
    script_of_code: dict[str, str] = {}
    letters: dict[str, dict[str, tuple[str, ...]]] = {}
    endings: dict[str, dict[str, Weights]] = {}
    section = ""
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            section = line.strip("[]")
            continue
        code, _, rest = line.partition(": ")
        if section == "endings":
            weighed = endings.setdefault(script_of_code[code], {})
            for end, tenths in _WEIGHT.findall(rest.replace(" ", "")):
                weighed[end] = (*weighed.get(end, ()), (code, ENDING * int(tenths) / 10))
            continue
        if section == "letters":
            found, parts = letters.setdefault(script_of_code[code], {}), list(rest)
        else:
            script_of_code[code] = section
            found, parts = words.setdefault(section, {}), rest.split()
        for part in dict.fromkeys(parts):
            found[part] = (*found.get(part, ()), code)
    return {
        script: Words(
            {word: _weighed(codes) for word, codes in found.items()},
            letters.get(script, {}),
            endings.get(script, {}),
        )
        for script, found in words.items()
    }


def _weighed(codes: Sequence[str]) -> Weights:
    """A word that many languages share tells nothing of any."""
    return tuple((code, 1 / len(codes)) for code in codes) if len(codes) <= SHARED else ()


@cache
def shipped_words() -> Mapping[str, Words]:
    """The words that come with the package."""
    return build((resources.files("policies.signals") / "languages.txt").read_text(encoding="utf-8"))


@cache
def _plain_english() -> frozenset[str]:
    """The words of English that no other language of the file has."""
    words = shipped_words()["latin"].words
    return frozenset(word for word, weights in words.items() if [code for code, _ in weights] == ["en"])


def language_of(text: str) -> str:
    """The ISO 639-1 code of a text's language."""
    script = script_of(text)
    # The commonest case first, by one look: most requests are in English.
    if script == "latin" and len(_plain_english().intersection(text[:FIRST].split())) >= ENGLISH:
        return "en"
    alone = _ALONE.get(script)
    if alone is not None:
        return alone
    if len(text) > HEAD + TAIL:
        text = f"{text[:HEAD]} {text[-TAIL:]}"
    if script == "other":
        return _by_block(text)
    words = shipped_words().get(script)
    if words is None:
        return UNDETERMINED
    lowered = text.lower()
    cut = lowered.find(" ", FIRST)
    scores: dict[str, float] = {}
    for part in (lowered,) if cut < 0 else (lowered[:cut], lowered[cut:]):
        _add(scores, WORD.findall(part), words)
        best = max(scores, key=scores.__getitem__, default=UNDETERMINED)
        most = scores.get(best, 0.0)
        if most >= PLAIN and all(score * 2 <= most for code, score in scores.items() if code != best):
            return best
    if not lowered.isascii():
        for letter in words.letters.keys() & set(lowered):
            for code in words.letters[letter]:
                scores[code] = scores.get(code, 0.0) + LETTER
    best = max(scores, key=scores.__getitem__, default=UNDETERMINED)
    return best if scores.get(best, 0.0) >= ENOUGH else UNDETERMINED


def _add(scores: dict[str, float], some: Sequence[str], words: Words) -> None:
    known, endings = words.words, words.endings
    for word in some:
        weights = known.get(word)
        if weights is None:
            weights = endings.get(ending(word), ())
        for code, weight in weights:
            scores[code] = scores.get(code, 0.0) + weight


def _by_block(text: str) -> str:
    """For scripts that have a block of Unicode each, and one language that most write in it."""
    counts: dict[str, int] = {}
    for character in text:
        point = ord(character)
        if 0x0A00 <= point < 0x10A0:
            code = next(name for start, name in reversed(_OTHER) if start <= point)
            if code:
                counts[code] = counts.get(code, 0) + 1
    return max(counts, key=counts.__getitem__, default=UNDETERMINED)


_SEEN = Seen(language_of)


def _language(facts: Facts, _memo: Memo) -> str:
    return _SEEN(facts.last_user_text())


LANGUAGE_SIGNAL = Signal(
    "language", "text", "the language of the last user turn, as ISO 639-1", _language, True, LANGUAGES
)
