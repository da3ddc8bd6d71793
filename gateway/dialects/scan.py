"""How deep and how large a body is, and whether it names a field twice: seen in its bytes, before it is read.

Each question is put to a whole body at once, by operations on bytes that run in C; one that is too short or
holds too few brackets to break a bound is not looked into.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

_STRUCTURE = b'[]{},"'
_TEXT = bytes(sorted(set(range(256)) - set(_STRUCTURE)))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
FIELD_SIGNS = len(b'"":,')
SPACED_SIGNS = len(b'"": , ')


def exceeds(raw: bytes, depth: int, nodes: int) -> str | None:
    """`depth` or `nodes` where valid JSON has more of it. An empty list or object counts as two nodes."""
    brackets = raw.count(b"[") + raw.count(b"{")
    # A value takes two bytes with what parts it from the next.
    many = len(raw) > 2 * nodes and raw.count(b",") + brackets >= nodes
    if brackets <= depth and not many:
        return None
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    kept = raw.translate(_ONE_KIND, _TEXT)
    if many and kept.count(b'"') > 4 * nodes:
        return "nodes"
    # Two quotes in a row begin and end nothing that counts: a text without brackets and commas, or two texts.
    kept = b"".join(kept.replace(b'""', b"").split(b'"')[::2])
    if many and kept.count(b",") + kept.count(b"[") >= nodes:
        return "nodes"
    kept = kept.translate(None, b",")
    for _ in range(depth):
        if not kept:
            return None
        kept = kept.replace(b"[]", b"")
    return "depth" if kept else None


def repeated(raw: bytes, fields: Mapping[str, msgspec.Raw]) -> str | None:
    """The name that the object `raw` gives to more than one of its own fields; `fields` are what it holds
    without them.

    Clients write JSON without blanks, or with those of Python's json: its length tells whether it is that.
    """
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
