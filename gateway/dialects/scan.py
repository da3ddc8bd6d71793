"""How deep and how large a body is, and whether it names a field twice.

Each question is put to all bytes at once, by operations that run in C; what is too short or holds too few
brackets to break a bound is not looked into.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import msgspec

_ALL_BUT_BRACKETS = bytes(sorted(set(range(256)) - set(b"[]{}")))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
FIELD_SIGNS = len(b'"":,')
SPACED_SIGNS = len(b'"": , ')
SMALL = 16 << 10
DEEP = 200
MARKS = 10_000
_MARK = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_MARK_OR_COMMA = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{},]', re.DOTALL)
_encode = msgspec.json.Encoder().encode


def too_deep(raw: bytes, depth: int) -> bool:
    """Whether valid JSON nests lists and objects more than `depth` levels."""
    if opening(raw) <= depth:
        return False
    left = _outside(raw).translate(_ONE_KIND, _ALL_BUT_BRACKETS)
    for _ in range(depth):
        if not left:
            return False
        left = left.replace(b"[]", b"")
    return bool(left)


def too_many(raw: bytes, nodes: int) -> bool:
    """Whether valid JSON holds more than `nodes` values; an empty list or object counts as two."""
    # A value takes two bytes with what parts it from the next.
    if len(raw) <= 2 * nodes or raw.count(b",") + opening(raw) < nodes:
        return False
    raw = _unescaped(raw)
    if raw.count(b'"') > 4 * nodes:
        return True
    outside = _outside(raw)
    return outside.count(b",") + opening(outside) >= nodes


def opening(raw: bytes) -> int:
    """Opening brackets, those in texts too."""
    return raw.count(b"[") + raw.count(b"{")


def _outside(raw: bytes) -> bytes:
    """JSON without its texts."""
    return b"".join(_unescaped(raw).split(b'"')[::2])


def _unescaped(raw: bytes) -> bytes:
    return raw.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in raw else raw


def deep_field(raw: bytes) -> str | None:
    """The field of an object that nests more than DEEP levels, if its first MARKS brackets and texts tell."""
    return _text(next((name for level, name in _marks(raw, _MARK) if level > DEEP), None))


def crowded_field(raw: bytes) -> str | None:
    """The field of an object that holds the most values, as far as its first MARKS marks tell; None where all
    stand in fields of their own."""
    counts = Counter(name for level, name in _marks(raw, _MARK_OR_COMMA) if level > 1)
    return _text(max(counts, key=counts.__getitem__, default=None))


def _marks(raw: bytes, marks: re.Pattern[bytes]) -> Iterator[tuple[int, bytes]]:
    """At each of the first marks, how deep it is inside, and the field of the outermost object."""
    level, name = 0, b""
    for match in islice(marks.finditer(raw), MARKS):
        mark = match[0]
        if mark in b"[{":
            level += 1
        elif mark in b"]}":
            level -= 1
        elif level == 1 and mark != b",":
            name = mark
        yield level, name


def _text(name: bytes | None) -> str | None:
    """A name as it is in JSON, decoded."""
    try:
        return None if name is None else str(json.loads(name))
    except ValueError:
        return None


def tree_too_deep(value: object, depth: int) -> bool:
    """The same of a value that has been decoded."""
    level: list[Any] = [value]
    for _ in range(depth + 1):
        level = [one for one in level if type(one) is dict or type(one) is list]
        if not level:
            return False
        level = [inner for one in level for inner in (one.values() if type(one) is dict else one)]
    return True


def repeated(raw: bytes, fields: Mapping[str, msgspec.Raw]) -> str | None:
    """The name that the object `raw` gives to more than one of its own fields; `fields` are what it holds
    without them.

    Clients write JSON without blanks, or with those of Python's json: written again, it would be the same.
    """
    if len(raw) <= SMALL and _encode(fields) == raw:
        return None
    values = [memoryview(value) for value in fields.values()]
    size = len(raw) - sum(map(len, fields)) - sum([value.nbytes for value in values])
    if size == 1 + FIELD_SIGNS * len(values):
        return None
    if size == SPACED_SIGNS * len(values):
        pairs = zip(fields, values, strict=True)
        if b"{%b}" % b", ".join([b'"%b": ' % name.encode() + value for name, value in pairs]) == raw:
            return None
    found: list[tuple[str, Any]] = []

    def hold(pairs: list[tuple[str, Any]]) -> None:
        # The outermost object is the last to be complete.
        found[:] = pairs

    json.loads(raw, object_pairs_hook=hold, parse_int=len, parse_float=len)
    names: set[str] = set()
    for name, _ in found:
        if name in names:
            return name
        names.add(name)
    return None
