"""How many tokens a text has, without its tokenizer: a sum over kinds of characters.

The weights are fitted by `bench/fit_tokens.py` to the geometric mean of three byte-level BPE vocabularies,
o200k_base (200k tokens), Qwen2.5's (152k) and DeepSeek V3's (128k), on English prose and Python sources of
the standard library and on short requests in 20 languages. Older or smaller vocabularies need more tokens
outside English: cl100k_base about 1.6 times as many for Chinese.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from policies.signals.seen import Seen

SAMPLES = ((2, 4000), (8, 1500), (32, 400))
"""Up to so many turns, so many characters are looked at of each: of longer ones, the head and the middle. In
steps, so that the turns of a growing conversation are seldom looked at anew."""

LEAST = 120
"""Characters that are looked at of each turn of longer conversations."""

OVERHEAD = 4

KINDS = "aA0 .nlcriphkge"
"""Lower case, upper case, digit, blank, other ASCII, line break; then the first bytes of accented Latin,
Greek and Cyrillic, Hebrew and Arabic, Indic and Thai, punctuation, Han, kana, Hangul, emoji."""


def _kind(byte: int) -> str:
    character = chr(byte)
    if byte < 0x80:
        if character.isalpha():
            return "a" if character.islower() else "A"
        if character.isdigit():
            return "0"
        return character if character == " " else "n" if character in "\n\r\t" else "."
    bounds = ((0xC0, "x"), (0xCD, "l"), (0xD6, "c"), (0xE0, "r"), (0xE2, "i"), (0xE3, "p"))
    for end, kind in (*bounds, (0xE4, "k"), (0xEA, "h"), (0xF0, "g")):
        if byte < end:
            return kind
    return "e"


_KINDS = bytes(ord(_kind(byte)) for byte in range(256))
_COMMON = b"a x"

FEATURES = (*KINDS, "pairs", "foreign")
"""Counts of KINDS; pairs of digits, since digits are cut in threes; lower-case letters of a text that has
accented ones, since words of other languages than English are cut smaller."""

WEIGHTS: Sequence[float] = (
    0.226,
    0.29,
    0.47,
    0.137,
    0.473,
    0.229,
    0.798,
    0.349,
    0.414,
    0.672,
    0.768,
    0.625,
    0.685,
    0.863,
    0.957,
    1.5,
    0.046,
)


# The frequent ones first: where nothing is left, the rest need not be looked for.
_OTHERS = tuple((kind.encode(), WEIGHTS[KINDS.index(kind)]) for kind in ".Anch0kgpirle")
_LOWER, _BLANK = WEIGHTS[0], WEIGHTS[KINDS.index(" ")]
_PAIRS, _FOREIGN = WEIGHTS[-2:]


def features(text: str) -> list[float]:
    """The counts that FEATURES names."""
    kinds = text.encode("utf-8", "surrogatepass").translate(_KINDS)
    rest = kinds.translate(None, _COMMON)
    lower = len(kinds) - len(kinds.translate(None, b"a"))
    counts = [float(rest.count(kind)) for kind in map(ord, KINDS)]
    counts[0] = lower
    counts[KINDS.index(" ")] = kinds.count(b" ")
    digits = rest.count(b"0")
    accented = counts[KINDS.index("l")]
    return [*counts, digits - rest.count(b"00"), lower if accented * 200 > lower else 0.0]


def estimate_tokens(text: str) -> int:
    """Tokens of one text; a long one is read at its head and in its middle."""
    return round(_estimate(text, SAMPLES[0][1]))


def estimate_prompt(texts: Iterable[str]) -> int:
    """Tokens of a prompt: those of its turns, and OVERHEAD for the role and marks of each."""
    turns = list(texts)
    count = len(turns)
    most = LEAST
    for up_to, size in SAMPLES:
        if count <= up_to:
            most = size
            break
    total = float(OVERHEAD * count)
    for text in turns:
        total += _SEEN(text) if len(text) <= most else _estimate(text, most)
    return round(total)


def _estimate(text: str, most: int) -> float:
    size = len(text)
    if size <= most:
        return _SEEN(text)
    half, middle = most // 2, size // 2
    return _SEEN(text[:half] + text[middle : middle + half]) * size / (2 * half)


def _whole(text: str) -> float:
    """The weighted sum of `features`: each kind is counted by what its removal takes away."""
    rest = text.encode("utf-8", "surrogatepass").translate(_KINDS)
    size = len(rest)
    if not text.isascii():
        rest = rest.translate(None, b"x")
        size = len(rest)
    rest = rest.translate(None, b"a")
    lower = size - len(rest)
    size = len(rest)
    rest = rest.translate(None, b" ")
    left = len(rest)
    total = _LOWER * lower + _BLANK * (size - left)
    if b"0" in rest:
        total += _PAIRS * (rest.count(b"0") - rest.count(b"00"))
    if b"l" in rest and rest.count(b"l") * 200 > lower:
        total += _FOREIGN * lower
    for kind, weight in _OTHERS:
        if not left:
            break
        rest = rest.translate(None, kind)
        total += weight * (left - len(rest))
        left = len(rest)
    return total


_SEEN = Seen(_whole)
