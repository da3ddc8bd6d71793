"""Two tiers that take turns on one GPU: `base` serves, the other sleeps until enough requests wait for it.

Each swap costs seconds in which neither serves, so the turns are long: a tier has the GPU for `residence` at
least, a swap waits until `batch` requests are there or the oldest has waited for `patience`, and in an hour
the base is left `budget` times at most. The base comes back when its own requests have waited like that, or
when nobody has used the other one for `idle`; coming back is never refused. Deciding is pure (`Arbiter`),
doing is `Swapper`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engines.launch import Sleep
from engines.supervise import Idle, OperationError

logger = logging.getLogger("dualgauge.swap")

HOUR = 3600.0
LOOK = 0.2
AFTER_FAILURE = 5.0


@dataclass(frozen=True, slots=True)
class Rules:
    """Seconds, requests, and swaps an hour."""

    residence: float = 30.0
    batch: int = 8
    patience: float = 2.0
    idle: float = 15.0
    budget: int = 30


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of a tier now: requests that wait for it and how long the oldest has, those under way."""

    waiting: int = 0
    oldest: float = 0.0
    running: int = 0


NONE = Demand()


@dataclass(slots=True)
class Arbiter:
    """Whose turn it is. Times are monotonic seconds of the caller's clock."""

    rules: Rules
    base: str
    other: str
    turn: str = ""
    since: float = 0.0
    used: float = 0.0
    _left: deque[float] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.turn = self.turn or self.base

    def next(self, demand: Mapping[str, Demand], now: float) -> str | None:
        """The tier that should have the GPU instead, None where nothing should change."""
        rules = self.rules
        away = self.other if self.turn == self.base else self.base
        here, there = demand.get(self.turn, NONE), demand.get(away, NONE)
        if here.running or here.waiting:
            self.used = now
        if now - self.since < rules.residence:
            return None
        wanted = there.waiting >= rules.batch or (there.waiting > 0 and there.oldest >= rules.patience)
        if self.turn == self.base:
            return away if wanted and self.left(now) > 0 else None
        return away if wanted or now - self.used >= rules.idle else None

    def left(self, now: float) -> int:
        """How often the base may still be left in this hour."""
        while self._left and now - self._left[0] >= HOUR:
            self._left.popleft()
        return self.rules.budget - len(self._left)

    def swapped(self, tier: str, now: float) -> None:
        """The tier has the GPU from now on."""
        if tier != self.base:
            self._left.append(now)
        self.turn, self.since, self.used = tier, now, now


class Engines(Protocol):
    """What a swap does to engines: `engines.supervise.Supervisor`."""

    async def sleep(self, name: str, idle: Idle) -> None: ...

    async def wake(self, name: str) -> str | None: ...

    def state(self, name: str) -> str: ...


Ask = Callable[[], Awaitable[Mapping[str, Demand]]]
"""The demand of each tier; empty where nobody can tell."""


class Swapper:
    """Carries the turns out. `tiers` are the names of each tier's engines, `idle` waits until nothing runs on
    one of them, `changed` hears in words whose turn it is."""

    def __init__(
        self,
        arbiter: Arbiter,
        tiers: Mapping[str, Sequence[str]],
        engines: Engines,
        ask: Ask,
        idle: Callable[[str], Awaitable[None]],
        changed: Callable[[str], None] = lambda _: None,
        *,
        clock: Callable[[], float],
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._arbiter = arbiter
        self._tiers = tiers
        self._engines = engines
        self._ask = ask
        self._idle = idle
        self._changed = changed
        self._clock = clock
        self._sleep = sleep

    async def run(self) -> None:
        """Swap whenever it is due, until cancelled."""
        self._tell()
        while True:
            await self._sleep(LOOK)
            tier = self._arbiter.next(await self._ask(), self._clock())
            if tier is not None and not await self.give(tier):
                await self._sleep(AFTER_FAILURE)

    async def give(self, tier: str) -> bool:
        """Let this tier have the GPU; whether it has it. Where it cannot be had the other keeps it."""
        other = self._arbiter.turn
        try:
            for name in self._tiers[other]:
                if self._engines.state(name) == "ready":
                    await self._engines.sleep(name, lambda name=name: self._idle(name))  # type: ignore[misc]
            awake = await self._wake(tier)
        except OperationError as error:
            logger.warning("no swap to tier %s: %s", tier, error)
            awake = False
        if awake:
            self._arbiter.swapped(tier, self._clock())
            self._tell()
            return True
        await self._back(tier, other)
        return False

    def _tell(self) -> None:
        arbiter, left = self._arbiter, self._arbiter.left(self._clock())
        times = f"may be woken {left} more times within an hour"
        self._changed(f"it is the turn of tier {arbiter.turn}; {arbiter.other} {times}")

    async def _wake(self, tier: str) -> bool:
        for name in self._tiers[tier]:
            if self._engines.state(name) == "asleep":
                why = await self._engines.wake(name)
                if why is not None:
                    logger.warning("engine %s was restarted instead of woken: %s", name, why)
        return any(self._engines.state(name) == "ready" for name in self._tiers[tier])

    async def _back(self, failed: str, tier: str) -> None:
        """Let the tier that had the GPU serve on, with what of the failed one is awake put to sleep."""
        try:
            for name in self._tiers[failed]:
                if self._engines.state(name) == "ready":
                    await self._engines.sleep(name, lambda name=name: self._idle(name))  # type: ignore[misc]
            await self._wake(tier)
        except OperationError as error:
            logger.error("tier %s did not come back: %s", tier, error)
