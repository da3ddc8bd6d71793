"""Which of several engines takes a request that belongs to none: the less loaded of two drawn by chance.

The power of two choices (Mitzenmacher, 2001): nearly as even as looking at all, and several gateways whose
figures are a moment old do not all rush to the one that was free.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar


class Loaded(Protocol):
    def load(self) -> float: ...


E = TypeVar("E", bound=Loaded)


def less_loaded(engines: Sequence[E], rand: random.Random) -> E:
    """One of two or more engines; of two that are as loaded, the one that was named first."""
    count = len(engines)
    first = int(rand.random() * count)
    second = int(rand.random() * (count - 1))
    low, high = (first, second + 1) if second >= first else (second, first)
    one, other = engines[low], engines[high]
    return one if one.load() <= other.load() else other
