"""Keeps conversations where their prefix cache is: rendezvous hashing with bounded load.

An engine's weight for a conversation is a hash of both; the heaviest takes it. When an engine goes, only its
own conversations move, and when it returns only they come back (Thaler and Ravishankar, 1998). An engine that
has more than its share of the requests is passed over (the bound of Mirrokni, Thorup and Zadimoghaddam,
2016), so that a few long conversations cannot pile up on one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol, TypeVar

SHARE = 1.25
"""An engine takes at most so many times the mean."""
ALWAYS = 8
"""So many requests an engine may have in any case: a batch of that size costs less than a lost prefix
cache."""

_MASK = (1 << 64) - 1


class Loaded(Protocol):
    @property
    def seed(self) -> int: ...
    def requests(self) -> int: ...


E = TypeVar("E", bound=Loaded)


def seed(name: str) -> int:
    """64 bits of an engine's name: the same in every process."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")


def weight(seed: int, key: int) -> int:
    """How much an engine is a conversation's own: 64 evenly spread bits (the mixer of splitmix64)."""
    mixed = (seed ^ (key * 0x9E3779B97F4A7C15)) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def bound(requests: int, engines: int) -> int:
    """How many requests one of these engines may have once another one has come."""
    return max(ALWAYS, math.ceil(SHARE * (requests + 1) / engines))


def choose(engines: Sequence[E], key: int) -> E:
    """The conversation's own engine, or the next of its order that is below the bound. One always is: the
    least loaded has no more than the mean."""
    have = [engine.requests() for engine in engines]
    most = bound(sum(have), len(engines))
    return max(
        (engine for engine, requests in zip(engines, have, strict=True) if requests < most),
        key=lambda engine: weight(engine.seed, key),
    )
