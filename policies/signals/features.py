"""What the classifier sees of a text: counts of words by subject and of the shapes that code has."""

from __future__ import annotations

from collections.abc import Mapping
from math import log1p
from typing import TypeAlias

from policies.signals.lexicon import lexicon

Features: TypeAlias = dict[int, float]
"""Values by index in NAMES; what is not in it is 0."""

VERSION = 1
HEAD = 2000
TAIL = 1000
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
_PLAIN = b"aAh0 \n\t\r"

SHAPES: Mapping[str, tuple[bytes, ...]] = {
    "fence": (b"```",),
    "snake": (b"a_a",),
    "camel": (b"aAa",),
    "constant": (b"A_A",),
    "call": (b"a(",),
    "empty_call": (b"()",),
    "index": (b"a[",),
    "member": (b"a.a",),
    "statement": (b";\n",),
    "brace": (b"{\n",),
    "block": (b":\n ",),
    "arrow": (b"=>", b"->"),
    "scope": (b"::",),
    "comparison": (b"==", b"!="),
    "spaced_equals": (b" = ",),
    "tag": (b"</", b"/>"),
    "attribute": (b'="',),
    "comment": (b"//", b"/*", b"\n#"),
    "flag": (b" --a", b" -a"),
    "pipe": (b" | ",),
    "path": (b"a/a", b"./"),
    "url": (b"://",),
    "indent": (b"\n    ", b"\n\t"),
    "diff": (b"\n+", b"\n-", b"@@"),
    "keyed": (b'": ', b'":'),
    "clock": (b"0:00",),
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
    "at": b"@",
    "and": b"&",
    "bar": b"|",
    "star": b"*",
    "plus": b"+",
    "dash": b"-",
    "underscore": b"_",
    "tick": b"`",
    "quote": b'"',
    "power": b"^",
    "question": b"?",
}

_LEXICON = lexicon()
SUBJECTS = _LEXICON.subjects
DERIVED = (
    "words",
    "lines",
    "digits",
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
    "number_share",
    "asked",
    "number_asked",
    "numbers_asked",
    "sums_told",
    "maths_told",
    "named_language",
    "sql",
)
NAMES = (*SUBJECTS, *SHAPES, *SYMBOLS, *DERIVED)
_AT = {name: index for index, name in enumerate(NAMES)}
_STRONG = tuple(_AT[name] for name in ("code_noun", "language", "code_verb", "language_likely"))
_WEAK = tuple(_AT[name] for name in ("code_noun_or_not", "language_or_not"))
_OTHER, _MATH, _QUANTITY, _NUMBER, _HOW_MANY = (
    _AT[name] for name in ("other", "math", "quantity", "number_word", "how_many")
)
_LETTERS = frozenset(letter.encode() for letter in "bcdefghjklmnpqrstuvwxyz")
_IN = frozenset("in en em using with mit avec con usando w на в på med dans di do".encode().split())
_LANGUAGES = frozenset(
    word
    for word, columns in _LEXICON.words.items()
    if _AT["language_or_not"] in columns or _AT["language_likely"] in columns
)
_CODE_COLUMNS = frozenset((*_STRONG, *_WEAK))
_CODE_WORDS = frozenset(w for w, columns in _LEXICON.words.items() if not _CODE_COLUMNS.isdisjoint(columns))
_ASK_WORDS = frozenset(w for w, columns in _LEXICON.words.items() if _AT["ask"] in columns)
_FIRST_DERIVED = len(NAMES) - len(DERIVED)
_LOG = tuple(log1p(count) for count in range(MOST + 1))


def _by_symbol() -> dict[int, tuple[tuple[bytes, int], ...]]:
    """The patterns to count where a symbol is in the text: a pattern goes by its first symbol, 0 for none."""
    found: dict[int, list[tuple[bytes, int]]] = {}
    for name, patterns in SHAPES.items():
        for pattern in patterns:
            symbol = next((byte for byte in pattern if byte not in _PLAIN), 0)
            found.setdefault(symbol, []).append((pattern, _AT[name]))
    return {symbol: tuple(patterns) for symbol, patterns in found.items()}


_PATTERNS = _by_symbol()
_SQL = (b"SELECT ", b"INSERT INTO", b"DELETE FROM", b"CREATE TABLE", b"UPDATE ", b"ORDER BY", b"GROUP BY")
_SINGLE = {symbol[0]: (symbol, _AT[name]) for name, symbol in SYMBOLS.items()}


def measure(text: str) -> Features:
    """The features of a text; a long one is read at its head and its tail."""
    if len(text) > HEAD + TAIL:
        text = f"{text[:HEAD]}\n{text[-TAIL:]}"
    counts, tokens = _LEXICON.count(text)
    features = {column: _LOG[min(count, MOST)] for column, count in enumerate(counts) if count}
    raw = text.encode("utf-8", "surrogatepass")
    shape = raw.translate(_CLASSES)
    symbols = shape.translate(None, _PLAIN)
    found: dict[int, int] = {}
    for pattern, index in _PATTERNS[0]:
        if count := shape.count(pattern):
            found[index] = found.get(index, 0) + count
    for symbol in set(symbols):
        if symbol in _SINGLE:
            single, index = _SINGLE[symbol]
            found[index] = symbols.count(single)
        for pattern, index in _PATTERNS.get(symbol, ()):
            if count := shape.count(pattern):
                found[index] = found.get(index, 0) + count
    for index, count in found.items():
        features[index] = _LOG[count] if count < MOST else _LOG[MOST]
    length, digits = len(shape) or 1, shape.count(b"0")
    size = max(len(tokens), length // 12) or 1
    strong = counts[_STRONG[0]] + counts[_STRONG[1]] + counts[_STRONG[2]] + counts[_STRONG[3]]
    weak = counts[_WEAK[0]] + counts[_WEAK[1]]
    near, first, named = _asks(tokens)
    numbers = min(
        8, shape.count(b" 0") + shape.count(b"$0") + shape.count(b"h0") + shape.count(b"(0") + counts[_NUMBER]
    )
    letters = min(6, sum(token in _LETTERS for token in tokens[:NEAR_TOKENS]))
    asked = b"?" in symbols or b"\xef\xbc\x9f" in raw
    derived = (
        log1p(size) / 4,
        log1p(shape.count(b"\n")),
        log1p(digits),
        min(near, 3),
        first,
        log1p(2 * strong + weak),
        min(weak, 2) + strong >= 2,
        min(1.0, 4 * (strong + weak) / size),
        min(1.0, 4 * counts[_OTHER] / size),
        min(1.0, 5 * len(symbols) / length),
        min(1.0, 5 * digits / length),
        b"h" in shape,
        log1p(numbers),
        log1p(letters),
        min(1.0, 4 * numbers / size),
        asked,
        min(2, counts[_HOW_MANY]) * min(numbers, 3) / 3,
        log1p(numbers) if asked else 0.0,
        min(numbers, 3) * min(3, counts[_QUANTITY]) / 3,
        min(3, counts[_MATH]) * (min(numbers, 2) + min(letters, 2)) / 3,
        named,
        any(word in raw for word in _SQL) if b"A" in shape else False,
    )
    for index, value in enumerate(derived, _FIRST_DERIVED):
        if value:
            features[index] = float(value)
    return features


def _asks(tokens: list[bytes]) -> tuple[int, bool, bool]:
    """How often a word of code closely follows a word of asking, whether the text begins by asking, and
    whether a language is named as what something is written in.
    """
    near, last = 0, -NEAR - 1
    first = named = False
    before = b""
    for index, token in enumerate(tokens[:NEAR_TOKENS]):
        if token in _ASK_WORDS:
            last = index
            first = first or index < 4
        elif index - last <= NEAR and token in _CODE_WORDS:
            near += 1
            last = -NEAR - 1
        if before in _IN and token in _LANGUAGES:
            named = True
        before = token
    return near, first, named
