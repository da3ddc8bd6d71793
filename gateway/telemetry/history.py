"""Figures of the last ten minutes, for the console's charts: a bounded table, one row every two seconds."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from engines.fleet import Fleet
from gateway.telemetry.metrics import FIRST_TOKEN, Metrics

EVERY_SECONDS = 2.0
ROWS = 300
WINDOW = 30
"""Rows, a minute, over which quantiles are taken: of two seconds there would be too few requests."""

Row = list[float | None]
NOT_TOLD = (None, None, None)


class TierFigures(NamedTuple):
    """Requests that ended and their completion tokens since the start, requests in flight, and how many
    streams began within each bound of FIRST_TOKEN, and beyond the last."""

    requests: float
    tokens: float
    in_flight: int
    first: list[int]


class Figures(NamedTuple):
    """All tiers, and what each engine tells: running, waiting, the used share of its KV cache."""

    tiers: Mapping[str, TierFigures]
    engines: Mapping[str, tuple[int, int, float | None]]


def figures(fleet: Fleet, metrics: Metrics) -> Figures:
    """Those of this process."""
    totals = metrics.tier_totals()
    tiers = {
        tier: TierFigures(
            *totals.get(tier, (0.0, 0.0)), sum(e.in_flight for e in engines), metrics.first_tokens(tier)
        )
        for tier, engines in fleet.tiers.items()
    }
    return Figures(tiers, {e.spec.name: (e.running, e.waiting, e.kv) for e in fleet.engines})


class History:
    """`columns` names what stands in a row after its Unix time: of each tier requests and completion tokens a
    second, requests in flight, and the 50th and 90th percentile of seconds to the first token; of each engine
    the requests that it runs, those that wait, and the used share of its KV cache. None: not known."""

    def __init__(
        self,
        tiers: Sequence[str],
        engines: Sequence[str],
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._wall = wall
        self._rows: deque[Row] = deque(maxlen=ROWS)
        self._first: deque[dict[str, list[int]]] = deque(maxlen=WINDOW)
        self._before: tuple[float, Figures] | None = None
        self.made = 0
        self.tiers, self.engines = tuple(tiers), tuple(engines)
        self.columns = self._columns()
        # How often the columns have changed: rows from before mean something else.
        self.form = 0

    def _columns(self) -> tuple[str, ...]:
        per_tier = ("requests", "tokens", "in_flight", "ttft_p50", "ttft_p90")
        return (
            *(f"tier/{tier}/{name}" for tier in self.tiers for name in per_tier),
            *(f"engine/{engine}/{name}" for engine in self.engines for name in ("running", "waiting", "kv")),
        )

    def fit(self, engines: Sequence[str]) -> None:
        """Bring the rows into the form that they have with these engines."""
        before = {name: index for index, name in enumerate(self.columns, 1)}
        self.engines = tuple(engines)
        self.columns = self._columns()
        self.form += 1
        places = [before.get(name) for name in self.columns]
        for index, row in enumerate(self._rows):
            self._rows[index] = [row[0], *(None if place is None else row[place] for place in places)]

    async def run(self, look: Callable[[], Figures]) -> None:
        """Take a row every two seconds. Runs until it is cancelled."""
        while True:
            self.take(look())
            await asyncio.sleep(EVERY_SECONDS)

    def take(self, seen: Figures) -> None:
        """Add a row; the first look only sets the counters' start."""
        now = self._clock()
        if self._before is not None:
            started, before = self._before
            seconds = max(now - started, 1e-3)
            row: Row = [round(self._wall(), 1)]
            for tier in self.tiers:
                new, old = seen.tiers[tier], before.tiers[tier]
                counts = [b - a for a, b in zip(self._first[0][tier], new.first, strict=True)]
                row.append(round((new.requests - old.requests) / seconds, 2))
                row.append(round((new.tokens - old.tokens) / seconds, 1))
                row.append(new.in_flight)
                row.extend(quantile(counts, FIRST_TOKEN, share) for share in (0.5, 0.9))
            for engine in self.engines:
                row.extend(seen.engines.get(engine, NOT_TOLD))
            self._rows.append(row)
            self.made += 1
        self._first.append({tier: seen.tiers[tier].first for tier in self.tiers})
        self._before = now, seen

    def since(self, made: int) -> Sequence[Row]:
        """The rows that were added after so many were."""
        new = min(self.made - made, len(self._rows)) if 0 <= made <= self.made else len(self._rows)
        return list(islice(self._rows, len(self._rows) - new, None))


def quantile(counts: Sequence[int], bounds: Sequence[float], share: float) -> float | None:
    """The value below which `share` of the observations lie, by a straight line through their bucket, as
    Prometheus's histogram_quantile has it; the highest bound for what lies beyond. None without any."""
    total = sum(counts)
    if total == 0:
        return None
    rank, below = share * total, 0
    for index, bound in enumerate(bounds):
        count = counts[index]
        if count and below + count >= rank:
            low = bounds[index - 1] if index else 0.0
            return round(low + (bound - low) * (rank - below) / count, 4)
        below += count
    return bounds[-1]
