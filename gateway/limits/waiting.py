"""Requests that wait for their turn: for a slot of their plan, or for an engine of a tier.

Bounded, each for so long as it may, and fair: tenants take turns, so that one with a hundred waiting does not
delay another's first (round robin, as in RFC 970). A full line drops the newest of whoever has most in it
(longest queue drop; Suter et al., "Design considerations for supporting TCP with per-flow queueing", 1998).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from engines.fleet import Engine, Fleet
from gateway.errors import GatewayError, NothingReady, SlotsTaken
from gateway.limits import Ask, Lease, Store, claim
from gateway.limits.course import SLOT_SECONDS, Scope

T = TypeVar("T")

# Another process may free a slot, or a reload enlarge a plan: nobody tells of that.
LOOK_SECONDS = 0.1
FULL_SECONDS = 1.0
# Timers of an event loop go by whole milliseconds: one may fire so much too early.
RESOLUTION = 0.001


class Line(Generic[T]):
    """Who waits, by tenant: `most` at once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._queues: OrderedDict[str, OrderedDict[T, None]] = OrderedDict()

    def __len__(self) -> int:
        return self._count

    @property
    def tenants(self) -> int:
        return len(self._queues)

    def add(self, tenant: str, one: T, *, first: bool = False) -> T | None:
        """Behind all of its tenant, or in front of them. Gives who has to leave because the line is full:
        perhaps `one` itself."""
        queue = self._queues.setdefault(tenant, OrderedDict())
        queue[one] = None
        if first:
            queue.move_to_end(one, last=False)
        self._count += 1
        if self._count <= self._most:
            return None
        longest = max(self._queues, key=lambda name: (len(self._queues[name]), name == tenant))
        dropped = next(reversed(self._queues[longest]))
        self.remove(longest, dropped)
        return dropped

    def put_back(self, tenant: str, one: T) -> None:
        """Where it was taken from: its turn is still to come."""
        queue = self._queues.setdefault(tenant, OrderedDict())
        queue[one] = None
        queue.move_to_end(one, last=False)
        self._queues.move_to_end(tenant, last=False)
        self._count += 1

    def remove(self, tenant: str, one: T) -> None:
        queue = self._queues.get(tenant)
        if queue is None or one not in queue:
            return
        del queue[one]
        self._count -= 1
        if not queue:
            del self._queues[tenant]

    def take(self) -> tuple[str, T]:
        """The first of the tenant whose turn it is. The line is not empty."""
        tenant, queue = next(iter(self._queues.items()))
        one = next(iter(queue))
        self.remove(tenant, one)
        if queue:
            self._queues.move_to_end(tenant)
        return tenant, one


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    ask: Ask
    lease: asyncio.Future[Lease]


class _SlotLine(Line[_Waiter]):
    """`offering` while somebody's turn is tried, `again` where a slot became free meanwhile."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.offering = False
        self.again = False


class SlotLines:
    """Lines for `concurrent`, one for each scope (see `course.Scope`) that has no slot left: who waits for
    another one of a tenant's own slots stands in nobody else's way."""

    def __init__(self, store: Store, most: int) -> None:
        self._store = store
        self._most = most
        self._lines: dict[str, _SlotLine] = {}
        self._looking: asyncio.TimerHandle | None = None
        store.on_end(self._ended)

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def ahead(self, ask: Ask) -> str | None:
        """The scope of which others wait for a slot already, so that a request that may wait must not
        overtake them."""
        if not self._lines or not ask.plan.wait:
            return None
        return next((name for name in scope_names(ask) if name in self._lines), None)

    async def wait(self, ask: Ask, scope: str) -> Lease:
        """A lease, once `scope` has a slot; for `ask.plan.wait` seconds at most. Raises SlotsTaken, and
        whatever the store raises when its turn has come."""
        waiter = _Waiter(ask, asyncio.get_running_loop().create_future())
        self._join(scope, waiter)
        try:
            async with asyncio.timeout(ask.plan.wait + RESOLUTION):
                return await claim(waiter.lease)
        except TimeoutError:
            raise self._still_taken(ask, f"and none became free in {ask.plan.wait:g} s") from None
        finally:
            for name in scope_names(ask):
                line = self._lines.get(name)
                if line is not None:
                    line.remove(ask.tenant, waiter)
                    self._forget(name, line)

    def _join(self, scope: str, waiter: _Waiter, *, first: bool = False) -> None:
        line = self._lines.get(scope)
        if line is None:
            line = self._lines[scope] = _SlotLine(self._most)
            if self._looking is None:
                self._look_later()
        dropped = line.add(waiter.ask.tenant, waiter, first=first)
        if dropped is not None and not dropped.lease.done():
            dropped.lease.set_exception(self._still_taken(dropped.ask, "and too many wait for one"))

    def _still_taken(self, ask: Ask, why: str) -> SlotsTaken:
        error = SlotsTaken(
            f"as many requests are running as plan `{ask.plan.name}` allows, {why}", retry_after=SLOT_SECONDS
        )
        error.headers = self._store.last_seen(ask)
        return error

    def _forget(self, scope: str, line: _SlotLine) -> None:
        if not line and not line.offering:
            self._lines.pop(scope, None)

    def _look_later(self) -> None:
        self._looking = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._looking = None
        for scope in tuple(self._lines):
            self._offer(scope)
        if self._lines:
            self._look_later()

    def _ended(self, scopes: Sequence[Scope]) -> None:
        if self._lines:
            for scope in scopes:
                if scope.name in self._lines:
                    self._offer(scope.name)

    def _offer(self, scope: str) -> None:
        line = self._lines.get(scope)
        if line is None:
            return
        if line.offering:
            line.again = True
            return
        line.offering = True
        self._next(scope, line)

    def _next(self, scope: str, line: _SlotLine) -> None:
        """Let one after the other try, in turn, until the scope has no slot left."""
        going_on = True
        while going_on and line:
            line.again = False
            _, waiter = line.take()
            if waiter.lease.done():
                continue
            try:
                reserved = self._store.reserve(waiter.ask)
            except GatewayError as error:
                going_on = self._goes_on(scope, line, waiter, error)
            else:
                if isinstance(reserved, asyncio.Future):
                    reserved.add_done_callback(partial(self._answered, scope, line, waiter))
                    return
                waiter.lease.set_result(reserved)
        line.offering = False
        self._forget(scope, line)

    def _answered(
        self, scope: str, line: _SlotLine, waiter: _Waiter, reserved: asyncio.Future[Lease]
    ) -> None:
        error = reserved.exception()
        if error is None:
            if waiter.lease.done():
                reserved.result().refund()
            else:
                waiter.lease.set_result(reserved.result())
        elif not self._goes_on(scope, line, waiter, error):
            line.offering = False
            self._forget(scope, line)
            return
        self._next(scope, line)

    def _goes_on(self, scope: str, line: _SlotLine, waiter: _Waiter, error: BaseException) -> bool:
        """Whether the next may try now that this one was refused."""
        taken = error.scope if isinstance(error, SlotsTaken) else None
        if waiter.lease.done():
            pass  # it has left meanwhile
        elif taken is None:
            waiter.lease.set_exception(error)
        elif taken == scope:
            line.put_back(waiter.ask.tenant, waiter)
        else:
            self._join(taken, waiter, first=True)
        return taken != scope or line.again


def scope_names(ask: Ask) -> tuple[str, ...]:
    """The names of all scopes that a request may belong to, its own first."""
    own = f"t:{ask.tenant}"
    if not ask.organisation:
        return f"{own}/{ask.model}", own
    shared = f"o:{ask.organisation}"
    return f"{own}/{ask.model}", own, f"{shared}/{ask.model}", shared


class TierLines:
    """Lines for tiers that have no ready engine."""

    def __init__(self, fleet: Fleet, most: int) -> None:
        self._fleet = fleet
        self._lines: dict[str, Line[asyncio.Future[None]]] = {tier: Line(most) for tier in fleet.tiers}
        self._since: dict[str, dict[asyncio.Future[None], float]] = {tier: {} for tier in fleet.tiers}
        fleet.watchers.append(self._changed)

    async def wait(self, tier: str, tenant: str, seconds: float) -> None:
        """Until an engine of the tier is ready, or the time is over. Raises NothingReady where too many
        wait."""
        if self._fleet.pick(tier) is not None:
            return
        line, since = self._lines[tier], self._since[tier]
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        since[turn] = loop.time()
        dropped = line.add(tenant, turn)
        if dropped is not None and not dropped.done():
            dropped.set_exception(
                NothingReady(f"too many requests wait for tier `{tier}` already", retry_after=FULL_SECONDS)
            )
        try:
            async with asyncio.timeout(seconds):
                await turn
        except TimeoutError:
            return
        finally:
            line.remove(tenant, turn)
            del since[turn]

    def oldest(self, tier: str) -> tuple[int, float]:
        """How many wait for the tier, and for how many seconds the first of them has."""
        since = self._since[tier]
        if not since:
            return 0, 0.0
        return len(since), asyncio.get_running_loop().time() - next(iter(since.values()))

    def _changed(self, engine: Engine) -> None:
        line = self._lines.get(engine.spec.tier)
        while engine.ready and line:
            _, turn = line.take()
            if not turn.done():
                turn.set_result(None)
