"""A request body that is scanned once and changed by whole top-level fields.

The scan keeps each top-level value as its own bytes: what the gateway does not read reaches the engine
byte for byte (big integers, floats and escapes included), and what it reads is decoded once, by type.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from gateway.errors import InvalidRequest

T = TypeVar("T")
NULL = b"null"
_scan = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


class Field(Generic[T]):
    """How one kind of field is read; `expected` ends the sentence "… must be". Decoders are made once."""

    __slots__ = ("decode", "expected")

    def __init__(self, kind: type[T], expected: str) -> None:
        self.decode = msgspec.json.Decoder(kind).decode
        self.expected = expected


TEXT = Field(str, "a string")
FLAG = Field(bool, "true or false")
WHOLE = Field(int, "an integer")
NUMBER = Field(float, "a number")
OBJECT = Field(dict[str, Any], "an object")
LIST = Field(list[Any], "a list")
ANY = Field(object, "valid JSON, nested less deeply")


class Body:
    """`raw` is what the client sent, `encode()` what the engine gets, `dropped` the fields taken out."""

    __slots__ = ("_changed", "_fields", "dropped", "raw")

    def __init__(self, raw: bytes) -> None:
        """Raises InvalidRequest where `raw` is not one JSON object in UTF-8."""
        self.raw = raw
        self.dropped: list[str] = []
        self._changed = False
        try:
            if not raw.isascii():
                raw.decode()
            self._fields = _scan(raw)
        except msgspec.ValidationError:
            raise InvalidRequest("the body must be a JSON object") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise InvalidRequest(f"the body is not valid JSON: {exc}") from None
        for name in [name for name, value in self._fields.items() if value == _RAW_NULL]:
            del self._fields[name]
            self._changed = True

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def get(self, name: str, field: Field[T]) -> T | None:
        """The decoded value, None where it is absent. Raises InvalidRequest naming the field."""
        value = self._fields.get(name)
        if value is None:
            return None
        try:
            return field.decode(value)
        except (msgspec.DecodeError, RecursionError):
            raise InvalidRequest(f"{name} must be {field.expected}", param=name) from None

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
