"""A request body that is scanned once and changed by whole top-level fields.

The scan keeps each top-level value as its own bytes: what the gateway does not read reaches the engine
byte for byte (big integers, floats and escapes included), and what it reads is decoded once, by type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, KeysView
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from gateway.dialects.scan import SMALL, crowded_field, deep_field, repeated, too_many
from gateway.errors import InvalidRequest

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
NULL = b"null"
_scan = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


EXPECTED = (
    (str, "a string"),
    (bool, "true or false"),
    (int, "an integer"),
    (float, "a number"),
    (dict, "an object"),
    (list, "a list"),
)
_WHERE = re.compile(r" - at `(?:key(?: in)? )?\$\.?(?P<param>[A-Za-z0-9_.\[\]]*)")


# Of a path into a field, what stands behind its name.
_FIRST = re.compile(r"[.\[].*")


class Field(Generic[T]):
    """How one field is read; `expected` ends the sentence "… must be". Decoders are made once."""

    __slots__ = ("decode", "expected")

    def __init__(self, kind: type[T], expected: str) -> None:
        self.decode = msgspec.json.Decoder(kind).decode
        self.expected = expected


WHOLE = Field(int, "an integer")
OBJECT = Field(dict[str, Any], "an object")
ANY = Field(object, "JSON that is nested less deeply, with numbers that a double holds")


class Fields(Generic[S]):
    """The fields of one API shape that the gateway reads, decoded in one go; others are skipped."""

    __slots__ = ("_decode", "_expected")

    def __init__(self, kind: type[S]) -> None:
        self._decode = msgspec.json.Decoder(kind).decode
        hints = get_type_hints(kind)
        self._expected = {name: _expected(hint) for name, hint in hints.items()}

    def read(self, raw: bytes) -> S:
        """Raises InvalidRequest naming the field. `raw` is valid JSON already."""
        try:
            return self._decode(raw)
        except msgspec.ValidationError as exc:
            match = _WHERE.search(str(exc))
            param = match["param"] if match else ""
            expected = self._expected.get(param)
            message = f"{param} must be {expected}" if expected else str(exc)
            raise InvalidRequest(message, param=_FIRST.sub("", param) or None) from None
        except msgspec.DecodeError as exc:
            raise InvalidRequest(f"the body is not valid JSON: {exc}") from None
        except RecursionError:
            raise _too_deep(raw) from None


def _too_deep(raw: bytes) -> InvalidRequest:
    name = deep_field(raw)
    return InvalidRequest(f"{name or 'the body'} is nested too deeply (bounds.depth)", param=name)


def _expected(hint: Any) -> str | None:
    kinds = {get_origin(part) or part for part in (get_args(hint) or (hint,))}
    return next((text for kind, text in EXPECTED if kind in kinds), None)


class Body:
    """`raw` is what the client sent, `encode()` what the engine gets, `dropped` the fields taken out."""

    __slots__ = ("_changed", "_fields", "dropped", "raw")

    def __init__(self, raw: bytes, nodes: int | None = None) -> None:
        """Raises InvalidRequest where `raw` is not one JSON object in UTF-8, names a field twice, or holds
        more than `nodes` values: no more are made into objects."""
        if nodes is not None and too_many(raw, nodes):
            message = f"the body holds more than {nodes} values (bounds.nodes)"
            raise InvalidRequest(message, param=crowded_field(raw))
        self.raw = raw
        self.dropped: list[str] = []
        self._changed = False
        try:
            if not raw.isascii():
                raw.decode()
            self._fields = _scan(raw)
            twice = repeated(raw, self._fields)
        except msgspec.ValidationError:
            raise InvalidRequest("the body must be a JSON object") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise InvalidRequest(f"the body is not valid JSON: {exc}") from None
        except RecursionError:
            raise _too_deep(raw) from None
        if twice is not None:
            # Parsers differ in which of the two they take: another could be used than was checked.
            raise InvalidRequest(f"{twice[:64]} is given twice", param=twice[:64])
        if len(raw) > SMALL or NULL in raw:
            for name in [name for name, value in self._fields.items() if value == _RAW_NULL]:
                del self._fields[name]
                self._changed = True

    @property
    def names(self) -> KeysView[str]:
        return self._fields.keys()

    def size(self, name: str) -> int:
        """Bytes of a field's value."""
        return memoryview(self._fields[name]).nbytes

    def value(self, name: str) -> bytes:
        """A field's value as it came."""
        return bytes(self._fields[name])

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def offers(self, name: str) -> bool:
        """Whether the field is there, and more than an empty list."""
        value = self._fields.get(name)
        return value is not None and _EMPTY_LIST.fullmatch(value) is None

    def get(self, name: str, field: Field[T]) -> T | None:
        """The decoded value, None where it is absent. Raises InvalidRequest naming the field."""
        value = self._fields.get(name)
        if value is None:
            return None
        try:
            return field.decode(value)
        except (msgspec.DecodeError, RecursionError):
            raise InvalidRequest(f"{name} must be {field.expected}", param=name) from None

    def fits(self, name: str, decode: Callable[[msgspec.Raw], T]) -> T | None:
        """What a decoder makes of the value, None where it is absent or is nothing for that decoder."""
        value = self._fields.get(name)
        try:
            return None if value is None else decode(value)
        except msgspec.DecodeError:
            return None

    def set(self, name: str, value: object) -> None:
        self._fields[name] = msgspec.Raw(_encode(value))
        self._changed = True

    def drop(self, name: str) -> None:
        if self._fields.pop(name, None) is not None:
            self._changed = True
            self.dropped.append(name)

    def encode(self) -> bytes:
        return _encode(self._fields) if self._changed else self.raw


_RAW_NULL = msgspec.Raw(NULL)
_EMPTY_LIST = re.compile(rb"\[\s*\]")
