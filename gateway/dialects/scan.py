"""How deep and how large a body is, and whether it names a field twice.

Each question is put to all bytes at once, by operations that run in C; what is too short or holds too few
brackets to break a bound is not looked into.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
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


def too_many(raw: bytes, nodes: int, brackets: int) -> bool:
    """Whether valid JSON, in which so many `brackets` open, holds more than `nodes` values; an empty list or
    object counts as two."""
    if raw.count(b",") + brackets < nodes:
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
    level, name = 0, b""
    for count, match in enumerate(_MARK.finditer(raw)):
        mark = match[0]
        if mark in b"[{":
            level += 1
        elif mark in b"]}":
            level -= 1
        elif level == 1:
            name = mark
        if level > DEEP or count > MARKS:
            break
    try:
        return str(json.loads(name)) if level > DEEP else None
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
