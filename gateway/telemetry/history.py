"""Figures of the last ten minutes, for the console's charts: a bounded table, one row every two seconds."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from engines.fleet import Fleet
from gateway.telemetry.metrics import FIRST_TOKEN, Metrics

EVERY_SECONDS = 2.0
ROWS = 300
WINDOW = 30
"""Rows, a minute, over which quantiles are taken: of two seconds there would be too few requests."""

Row = list[float | None]


class History:
    """`columns` names what stands in a row after its Unix time: of each tier requests and completion tokens a
    second, requests in flight, and the 50th and 90th percentile of seconds to the first token; of each engine
    the requests that it runs, those that wait, and the used share of its KV cache. None: not known."""

    def __init__(
        self, fleet: Fleet, metrics: Metrics, clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._clock = clock
        self._wall = wall
        self._rows: deque[Row] = deque(maxlen=ROWS)
        self._first: deque[dict[str, list[int]]] = deque(maxlen=WINDOW)
        self._before: tuple[float, dict[str, tuple[float, float]]] | None = None
        self.made = 0
        self.columns = self._columns()
        # How often the columns have changed: rows from before mean something else.
        self.form = 0
        fleet.movers.append(self._fit)

    def _columns(self) -> tuple[str, ...]:
        fleet = self._fleet
        per_tier = ("requests", "tokens", "in_flight", "ttft_p50", "ttft_p90")
        return (
            *(f"tier/{tier}/{name}" for tier in fleet.tiers for name in per_tier),
            *(f"engine/{e.spec.name}/{name}" for e in fleet.engines for name in ("running", "waiting", "kv")),
        )

    def _fit(self) -> None:
        """Bring the rows into the form that they have with the engines of now."""
        before = {name: index for index, name in enumerate(self.columns, 1)}
        self.columns = self._columns()
        self.form += 1
        places = [before.get(name) for name in self.columns]
        for index, row in enumerate(self._rows):
            self._rows[index] = [row[0], *(None if place is None else row[place] for place in places)]

    async def run(self) -> None:
        """Take a row every two seconds. Runs until it is cancelled."""
        while True:
            self.take()
            await asyncio.sleep(EVERY_SECONDS)

    def take(self) -> None:
        """Add a row; the first look only sets the counters' start."""
        now, totals = self._clock(), self._metrics.tier_totals()
        first = {tier: self._metrics.first_tokens(tier) for tier in self._fleet.tiers}
        if self._before is not None:
            started, before = self._before
            seconds = max(now - started, 1e-3)
            row: Row = [round(self._wall(), 1)]
            for tier, engines in self._fleet.tiers.items():
                requests, tokens = totals.get(tier, (0.0, 0.0))
                old_requests, old_tokens = before.get(tier, (0.0, 0.0))
                counts = [b - a for a, b in zip(self._first[0][tier], first[tier], strict=True)]
                row.append(round((requests - old_requests) / seconds, 2))
                row.append(round((tokens - old_tokens) / seconds, 1))
                row.append(sum(engine.in_flight for engine in engines))
                row.extend(quantile(counts, FIRST_TOKEN, share) for share in (0.5, 0.9))
            for engine in self._fleet.engines:
                row += [engine.running, engine.waiting, engine.kv]
            self._rows.append(row)
            self.made += 1
        self._first.append(first)
        self._before = now, totals

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
