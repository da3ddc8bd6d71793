"""What was measured of a text, kept by its hash: a conversation comes again with every turn, most of it
unchanged, and an application sends the same system prompt with every request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Seen(Generic[T]):
    """A pure function of a text, remembered for the `most` texts that were measured last.

    Holds hashes, never texts. Python's hash of a text has 64 bits and a seed of each process's own.
    """

    __slots__ = ("_found", "_measure", "_most")

    def __init__(self, measure: Callable[[str], T], most: int = 4096) -> None:
        self._measure = measure
        self._most = most
        self._found: dict[int, T] = {}

    def __call__(self, text: str) -> T:
        key = hash(text)
        found = self._found.get(key)
        if found is None:
            found = self._measure(text)
            if len(self._found) >= self._most:
                self._found.pop(next(iter(self._found)), None)
            self._found[key] = found
        return found
