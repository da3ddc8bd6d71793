"""What the harness makes of what it read: pure functions, tested in `tests/bench`."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

LOADED = "LOADED "
"""Begins the line that `wrk` is told to print when it is done."""


@dataclass(frozen=True)
class Spread:
    """Median, least and most of a figure over the rounds of one run."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Raises ValueError where there are none."""
        some = list(values)
        if not some:
            raise ValueError("no round has this figure")
        return cls(statistics.median(some), min(some), max(some))

    def text(self, digits: int = 1) -> str:
        if self.least == self.most:
            return f"{self.median:,.{digits}f}"
        return f"{self.median:,.{digits}f} ({self.least:,.{digits}f} to {self.most:,.{digits}f})"


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Of ours to theirs, round by round: what drifts in a run drifts for both. Raises ValueError where the
    rounds are not the same number or one of theirs is 0."""
    if len(ours) != len(theirs) or not all(theirs):
        raise ValueError(
            f"{len(ours)} rounds of ours cannot be held against {len(theirs)} of theirs: {theirs}"
        )
    return Spread.of(a / b for a, b in zip(ours, theirs, strict=True))


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Rise of y for one of x, by least squares. Raises ValueError for fewer than two different x."""
    try:
        return statistics.linear_regression(*zip(*points, strict=True)).slope
    except (statistics.StatisticsError, TypeError):
        raise ValueError(f"a slope needs samples at two times at least, here are {len(points)}") from None


def slope_error(points: Sequence[tuple[float, float]]) -> float:
    """Standard error of `slope`, of three points or more. Neighbours in time are alike, so it is rather too small."""
    rise = slope(points)
    mean_x = statistics.fmean(x for x, _ in points)
    mean_y = statistics.fmean(y for _, y in points)
    residuals = sum((y - mean_y - rise * (x - mean_x)) ** 2 for x, y in points)
    return math.sqrt(residuals / max(1, len(points) - 2) / sum((x - mean_x) ** 2 for x, _ in points))


@dataclass(frozen=True)
class Load:
    """What `wrk` saw: seconds, latencies in microseconds, and what went wrong by kind."""

    requests: int
    seconds: float
    p50: float
    p99: float
    errors: dict[str, int]

    @property
    def rate(self) -> float:
        return self.requests / self.seconds


def load_of(output: str) -> Load:
    """Raises ValueError where `wrk` did not end as it should."""
    for line in output.splitlines():
        if line.startswith(LOADED):
            seen = json.loads(line.removeprefix(LOADED))
            errors = {kind: count for kind, count in seen["errors"].items() if count}
            return Load(seen["requests"], seen["us"] / 1e6, seen["p50"], seen["p99"], errors)
    raise ValueError(f"wrk did not say what it saw: {output.strip()[-300:] or 'it printed nothing'}")


@dataclass(frozen=True)
class Stat:
    """A line of /proc/PID/stat; `ticks` are those of the process and of its children that have ended."""

    session: int
    ticks: int


def stat_of(line: str) -> Stat:
    # The name, in brackets, may hold blanks and brackets itself.
    fields = line.rpartition(")")[2].split()
    return Stat(int(fields[3]), sum(int(field) for field in fields[11:15]))


def memory_of(smaps_rollup: str) -> tuple[float, float]:
    """(RSS, PSS) in MiB of /proc/PID/smaps_rollup. Raises ValueError where one is missing."""
    found: dict[str, float] = {}
    for line in smaps_rollup.splitlines():
        name, _, value = line.partition(":")
        if name in ("Rss", "Pss"):
            found[name] = int(value.split()[0]) / 1024
    try:
        return found["Rss"], found["Pss"]
    except KeyError as exc:
        raise ValueError(f"smaps_rollup says nothing of {exc}") from None


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Markdown. All columns but the first are figures."""
    lines = [list(head), ["---", *["---:"] * (len(head) - 1)], *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def merged(results: dict[str, Any], part: str, result: dict[str, Any]) -> dict[str, Any]:
    """All parts' results, this one in the place of an older one of the same name."""
    return dict(sorted({**results, part: result}.items()))
