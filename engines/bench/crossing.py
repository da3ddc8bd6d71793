"""At how many requests at a time one engine stops being faster than another. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Crossing:
    """`kind`: `never` faster at any of `levels`, faster `at` some and not above them, or faster up to the
    highest one, which is `beyond` what was measured. `wins` are the levels at which it was faster.

    For `at`: the last of `wins` is the last at which it was faster, `first` is the next level, and `level`
    between the two is where a straight line in the logarithms of concurrency and of the ratio of speeds
    meets 1.
    """

    kind: Literal["never", "at", "beyond"]
    levels: tuple[int, ...]
    wins: tuple[int, ...] = ()
    first: int | None = None
    level: float | None = None


def crossing(fast: Mapping[int, float], other: Mapping[int, float]) -> Crossing | None:
    """By tokens a second at each concurrency; only levels of both count, None where there are none.

    What is looked for is the level above which `fast` wins no more, however often it loses below it.
    """
    levels = tuple(sorted(level for level in fast.keys() & other.keys() if fast[level] > 0 < other[level]))
    if not levels:
        return None
    ahead = {level: math.log(fast[level] / other[level]) for level in levels}
    wins = tuple(level for level in levels if fast[level] > other[level])
    if not wins:
        return Crossing("never", levels)
    last = wins[-1]
    if last == levels[-1]:
        return Crossing("beyond", levels, wins)
    first = levels[levels.index(last) + 1]
    gap = ahead[last] - ahead[first]
    part = ahead[last] / gap if gap > 0 else 0.0  # speeds so close that their logarithms are equal
    return Crossing("at", levels, wins, first, last * (first / last) ** part)
