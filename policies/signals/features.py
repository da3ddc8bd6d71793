"""What the classifier sees of a text: counts of words by subject and of the shapes that code has."""

from __future__ import annotations

from collections.abc import Mapping
from math import log1p
from typing import NamedTuple, TypeAlias

from policies.signals.lexicon import Lexicon, lexicon

Values: TypeAlias = dict[int, float]
"""Values by index in NAMES; what is not in it is 0."""


class Features(NamedTuple):
    """Of one text: the values of NAMES, and its words in lower case (UTF-8)."""

    values: Values
    words: frozenset[bytes]


VERSION = 4
HEAD = 350
TAIL = 250
"""Bytes of UTF-8 that are read of a long text, about: a character of three says as much as three of one."""

LONG = 300
"""Bytes from which on it pays to shorten runs of letters before patterns are counted: none looks into one."""

NEAR = 5
NEAR_TOKENS = 100
MOST = 50


def _class_of(byte: int) -> int:
    character = chr(byte)
    if byte >= 0x80:
        return ord("h")
    if character.islower():
        return ord("a")
    if character.isupper():
        return ord("A")
    return ord("0") if character.isdigit() else byte


# One byte a kind of character: what code looks like shows in a few of them side by side.
_CLASSES = bytes(map(_class_of, range(256)))
_PLAIN = b"aAh \r"
_NO_SYMBOLS = b"0\n\t"

SHAPES: Mapping[str, tuple[bytes, ...]] = {
    "fence": (b"```",),
    "snake": (b"a_a",),
    "camel": (b"aA",),
    "call": (b"a(",),
    "member": (b"a.a",),
    "block": (b":\n ",),
    "arrow": (b"=>", b"->"),
    "comparison": (b"==", b"!="),
    "spaced_equals": (b" = ",),
    "tag": (b"</", b"/>"),
    "comment": (b"//", b"/*", b"\n#"),
    "flag": (b" --a", b" -a"),
    "variable": (b"$A", b"${", b'"$'),
    "stamp": (b"0:00:00",),
    "path": (b"a/a", b"./"),
    "indent": (b"\n    ", b"\n\t"),
    "latex": (b"\\a", b"^{", b"_{"),
    "shown_number": (b" 0", b"h0"),
    "sum": (b"0+", b"0 +", b"0*", b"0 *", b"0/0", b"a^", b")^"),
    "solved": (b"= 0", b"=0"),
    "percent": (b"0%",),
    "money": (b"$0",),
}
"""Names of shapes and the byte patterns that are counted for each."""

SYMBOLS: Mapping[str, bytes] = {
    "parenthesis": b"(",
    "bracket": b"[",
    "braces": b"{",
    "semicolon": b";",
    "colon": b":",
    "equals": b"=",
    "less": b"<",
    "slash": b"/",
    "backslash": b"\\",
    "dollar": b"$",
    "hash": b"#",
    "star": b"*",
    "plus": b"+",
    "dash": b"-",
    "underscore": b"_",
    "tick": b"`",
    "quote": b'"',
    "power": b"^",
    "question": b"?",
}

SUBJECTS = lexicon().subjects
DERIVED = (
    "words",
    "lines",
    "asks_for_code",
    "asks_first",
    "code_weight",
    "code_twice",
    "code_density",
    "other_density",
    "symbol_density",
    "number_density",
    "not_ascii",
    "numbers",
    "letters",
    "asked",
    "number_asked",
    "numbers_asked",
    "sums_told",
    "maths_told",
    "named_language",
    "sql",
    "years",
)
NAMES = (*SUBJECTS, *SHAPES, *SYMBOLS, *DERIVED)
_AT = {name: index for index, name in enumerate(NAMES)}
_STRONG = tuple(_AT[name] for name in ("code_noun", "language", "code_verb", "language_likely"))
_WEAK = tuple(_AT[name] for name in ("code_noun_or_not", "language_or_not"))
_OTHER, _MATH, _QUANTITY, _NUMBER, _HOW_MANY = (
    _AT[name] for name in ("other", "math", "quantity", "number_word", "how_many")
)
_SHOWN_NUMBER, _MONEY = _AT["shown_number"], _AT["money"]
_LETTERS = frozenset(letter.encode() for letter in "bcdefghjklmnpqrstuvwxyz")
_YEAR_NUMBERS = frozenset(str(year).encode() for year in range(1400, 2101))
_IN = frozenset("in en em using with mit avec con usando w на в på med dans di do".encode().split())
(
    _WORDS,
    _LINES,
    _ASKS_FOR_CODE,
    _ASKS_FIRST,
    _CODE_WEIGHT,
    _CODE_TWICE,
    _CODE_DENSITY,
    _OTHER_DENSITY,
    _SYMBOL_DENSITY,
    _NUMBER_DENSITY,
    _NOT_ASCII,
    _NUMBERS,
    _LETTER,
    _ASKED,
    _NUMBER_ASKED,
    _NUMBERS_ASKED,
    _SUMS_TOLD,
    _MATHS_TOLD,
    _NAMED_LANGUAGE,
    _SQL_WORDS,
    _YEARS,
) = range(len(NAMES) - len(DERIVED), len(NAMES))
_LOG = tuple(log1p(count) for count in range(MOST + 1))


class Words(NamedTuple):
    """A lexicon, and the words of it that are looked for one beside the other."""

    lexicon: Lexicon
    languages: frozenset[bytes]
    code: frozenset[bytes]
    asking: frozenset[bytes]
    code_or_asking: frozenset[bytes]


def words_of(lexicon: Lexicon) -> Words:
    def of(*columns: int) -> frozenset[bytes]:
        return frozenset(w for w, among in lexicon.words.items() if not set(columns).isdisjoint(among))

    code, asking = of(*_STRONG, *_WEAK), of(_AT["ask"])
    languages = of(_AT["language_or_not"], _AT["language_likely"])
    return Words(lexicon, languages, code, asking, code | asking)


WORDS = words_of(lexicon())


def _by_mark() -> dict[int, tuple[bytes, int, tuple[tuple[bytes, int], ...]]]:
    """What to count where a mark (a symbol, a digit or a line break) is in the text: itself, if it is one of
    SYMBOLS, and the patterns that have it, each by its rarest mark; patterns of letters alone are under 0.
    """
    found: dict[int, list[tuple[bytes, int]]] = {symbol[0]: [] for symbol in SYMBOLS.values()}
    for name, patterns in SHAPES.items():
        for pattern in patterns:
            marks = [byte for byte in pattern if byte not in _PLAIN]
            mark = min(marks, key=lambda byte: byte in _NO_SYMBOLS, default=0)
            found.setdefault(mark, []).append((pattern, _AT[name]))
    alone = {symbol[0]: _AT[name] for name, symbol in SYMBOLS.items()}
    return {mark: (bytes((mark,)), alone.get(mark, -1), tuple(patterns)) for mark, patterns in found.items()}


_BY_MARK = _by_mark()
_WITHOUT = _BY_MARK.pop(0)[2]
_WIDE_QUESTION = "？".encode()  # noqa: RUF001
_SQL = (
    b"SELECT ",
    b"WHERE ",
    b"INSERT INTO",
    b"DELETE FROM",
    b"CREATE TABLE",
    b"UPDATE ",
    b"ORDER BY",
    b"GROUP BY",
)


def excerpt(text: str) -> str:
    """What is read of a text: all of a short one, the head and the tail of a long one."""
    if len(text) * 4 <= HEAD + TAIL:
        return text
    head, tail = HEAD, TAIL
    if not text.isascii():
        ends = text[:head] + text[-tail:]
        share = len(ends) / len(ends.encode("utf-8", "surrogatepass"))
        head, tail = int(head * share), int(tail * share)
    return text if len(text) <= head + tail else f"{text[:head]}\n{text[-tail:]}"


def measure(text: str, words: Words = WORDS) -> Features:
    """The features of a whole text; of a long one take `excerpt` first."""
    counts, tokens, known = words.lexicon.count(text)
    values = {
        column: _LOG[count] if count < MOST else _LOG[MOST] for column, count in enumerate(counts) if count
    }
    raw = text.encode("utf-8", "surrogatepass")
    shape = raw.translate(_CLASSES)
    length = len(shape) or 1
    if b"h" in shape:
        values[_NOT_ASCII] = 1.0
        shape = shape.replace(b"hhhhhh", b"h").replace(b"hhh", b"h")
    if len(shape) > LONG:
        shape = shape.replace(b"aaaa", b"a").replace(b"aa", b"a")
    marks = shape.translate(None, _PLAIN)
    symbols = marks.translate(None, _NO_SYMBOLS)
    found: dict[int, int] = {}
    for pattern, index in _WITHOUT:
        if count := shape.count(pattern):
            found[index] = found.get(index, 0) + count
    for mark in set(marks):
        if mark in _BY_MARK:
            alone, at, patterns = _BY_MARK[mark]
            if at >= 0:
                found[at] = symbols.count(alone)
            for pattern, index in patterns:
                if count := shape.count(pattern):
                    found[index] = found.get(index, 0) + count
    for index, count in found.items():
        values[index] = _LOG[count] if count < MOST else _LOG[MOST]
    size = max(len(tokens), length // 12) or 1
    values[_WORDS] = log1p(size) / 4
    if symbols:
        values[_SYMBOL_DENSITY] = min(1.0, 5 * len(symbols) / length)
    if lines := marks.count(b"\n"):
        values[_LINES] = log1p(lines)
    if counts[_OTHER]:
        values[_OTHER_DENSITY] = min(1.0, 4 * counts[_OTHER] / size)
    if b"AAAAA" in shape and any(word in raw for word in _SQL):
        values[_SQL_WORDS] = 1.0
    if not words.asking.isdisjoint(tokens[:4]):
        values[_ASKS_FIRST] = 1.0
    _weigh_code(values, counts, size)
    if not words.code.isdisjoint(known):
        _look_around(values, tokens, words)
    _weigh_numbers(values, counts, _numbers_shown(shape, marks, found), known)
    if digits := marks.count(b"0"):
        values[_NUMBER_DENSITY] = min(1.0, 5 * digits / length)
    if b"?" in symbols or (_NOT_ASCII in values and _WIDE_QUESTION in raw):
        values[_ASKED] = 1.0
        if _NUMBERS in values:
            values[_NUMBERS_ASKED] = values[_NUMBERS]
    return Features(values, known)


def _weigh_code(values: Values, counts: list[int], size: int) -> None:
    """How much a text speaks of code, surely and perhaps, in all and by its length."""
    strong = counts[_STRONG[0]] + counts[_STRONG[1]] + counts[_STRONG[2]] + counts[_STRONG[3]]
    weak = counts[_WEAK[0]] + counts[_WEAK[1]]
    if strong or weak:
        values[_CODE_WEIGHT] = log1p(2 * strong + weak)
        values[_CODE_DENSITY] = min(1.0, 4 * (strong + weak) / size)
        if strong + min(weak, 2) >= 2:
            values[_CODE_TWICE] = 1.0


def _numbers_shown(shape: bytes, marks: bytes, found: Mapping[int, int]) -> int:
    """Numbers in digits that begin after a blank, a letter of another script, $, ( or a line break."""
    if b"0" not in marks:
        return 0
    shown = found.get(_SHOWN_NUMBER, 0) + found.get(_MONEY, 0)
    if b"(" in marks:
        shown += shape.count(b"(0")
    if b"\n" in marks:
        shown += shape.count(b"\n0")
    return shown


def _weigh_numbers(values: Values, counts: list[int], shown: int, known: frozenset[bytes]) -> None:
    """Numbers, single letters, and how they meet words of sums and of maths."""
    numbers = counts[_NUMBER] + shown
    if shown and (years := len(known & _YEAR_NUMBERS)):
        values[_YEARS] = float(min(3, years))
        numbers -= years
    if letters := min(6, len(known & _LETTERS)):
        values[_LETTER] = log1p(letters)
    if numbers > 0:
        numbers = min(8, numbers)
        values[_NUMBERS] = log1p(numbers)
        if counts[_HOW_MANY]:
            values[_NUMBER_ASKED] = min(2, counts[_HOW_MANY]) * min(numbers, 3) / 3
        if counts[_QUANTITY]:
            values[_SUMS_TOLD] = min(3, counts[_QUANTITY]) * min(numbers, 3) / 3
    if counts[_MATH] and (numbers > 0 or letters):
        values[_MATHS_TOLD] = min(3, counts[_MATH]) * (max(0, min(numbers, 2)) + min(letters, 2)) / 3


def _look_around(values: Values, tokens: list[bytes], words: Words) -> None:
    """How often a word of code closely follows a word of asking, and whether a language is named as what
    something is written in.
    """
    languages, code, either = words.languages, words.code, words.code_or_asking
    near, last = 0, -NEAR - 1
    for index, token in enumerate(tokens[:NEAR_TOKENS]):
        if token not in either:
            continue
        if token in code:
            if index - last <= NEAR:
                near += 1
                last = -NEAR - 1
            if index and token in languages and tokens[index - 1] in _IN:
                values[_NAMED_LANGUAGE] = 1.0
        else:
            last = index
    if near:
        values[_ASKS_FOR_CODE] = float(min(near, 3))
