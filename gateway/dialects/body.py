"""A request body that is scanned once and changed by whole top-level fields.

The scan keeps each top-level value as its own bytes: what the gateway does not read reaches the engine
byte for byte (big integers, floats and escapes included), and what it reads is decoded once, by type.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from gateway.errors import InvalidRequest

T = TypeVar("T")
NULL = b"null"
_scan = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


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

    def get(self, name: str, kind: type[T], expected: str) -> T | None:
        """The decoded value, None where it is absent. Raises InvalidRequest naming the field."""
        value = self._fields.get(name)
        if value is None:
            return None
        try:
            return msgspec.json.decode(value, type=kind)
        except (msgspec.DecodeError, RecursionError):
            raise InvalidRequest(f"{name} must be {expected}", param=name) from None

    def get_any(self, name: str) -> object:
        """The decoded value of any type, None where it is absent or nested too deeply to read."""
        value = self._fields.get(name)
        if value is None:
            return None
        try:
            return msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            raise InvalidRequest(f"{name} is not valid JSON or is nested too deeply", param=name) from None

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
