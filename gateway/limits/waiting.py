"""Requests that wait for their turn: for a slot of their plan, or for an engine of a tier.

Bounded, each for so long as it may, and fair: tenants take turns, so that one with a hundred waiting does not
delay another's first (round robin, as in RFC 970). A full line drops the newest of whoever has most in it
(longest queue drop; Suter et al., "Design considerations for supporting TCP with per-flow queueing", 1998).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from engines.fleet import Engine, Fleet
from gateway.errors import GatewayError, NothingReady, SlotsTaken
from gateway.limits import Ask, Lease, Store, claim
from gateway.limits.course import SLOT_SECONDS

T = TypeVar("T")

# Another process may free a slot, or a reload enlarge a plan: nobody tells of that.
LOOK_SECONDS = 0.1
FULL_SECONDS = 1.0


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

    def add(self, tenant: str, one: T) -> T | None:
        """Behind all of its tenant. Gives who has to leave because the line is full: perhaps `one` itself."""
        queue = self._queues.setdefault(tenant, OrderedDict())
        queue[one] = None
        self._count += 1
        if self._count <= self._most:
            return None
        longest = max(self._queues, key=lambda name: (len(self._queues[name]), name == tenant))
        dropped = next(reversed(self._queues[longest]))
        self.remove(longest, dropped)
        return dropped

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

    def put_back(self, tenant: str, one: T) -> None:
        """In front of all of its tenant, which has had its turn."""
        queue = self._queues.setdefault(tenant, OrderedDict())
        queue[one] = None
        queue.move_to_end(one, last=False)
        self._queues.move_to_end(tenant)
        self._count += 1


class _Waiter:
    __slots__ = ("ask", "lease", "refused")

    def __init__(self, ask: Ask, lease: asyncio.Future[Lease], refused: SlotsTaken | None) -> None:
        self.ask = ask
        self.lease = lease
        self.refused = refused


class SlotLines:
    """Lines for `concurrent`, one for all that share an organisation's or a tenant's limits."""

    def __init__(self, store: Store, most: int) -> None:
        self._store = store
        self._most = most
        self._lines: dict[str, Line[_Waiter]] = {}
        store.on_end(self._ended)

    def waiting(self, ask: Ask) -> bool:
        """Whether others wait already, so that this request must not overtake them."""
        return bool(self._lines) and root(ask) in self._lines

    async def wait(self, ask: Ask, refused: SlotsTaken | None = None) -> Lease:
        """A lease, once a slot is free; for `ask.plan.wait` seconds at most. Raises SlotsTaken, and whatever
        the store raises when its turn has come."""
        loop = asyncio.get_running_loop()
        name = root(ask)
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = Line(self._most)
            loop.call_later(LOOK_SECONDS, self._look, name)
        waiter = _Waiter(ask, loop.create_future(), refused)
        dropped = line.add(ask.tenant, waiter)
        if dropped is not None and not dropped.lease.done():
            dropped.lease.set_exception(_still_taken(dropped, "and too many wait for one"))
        try:
            async with asyncio.timeout(ask.plan.wait):
                return await claim(waiter.lease)
        except TimeoutError:
            raise _still_taken(waiter, f"and none became free in {ask.plan.wait:g} s") from None
        finally:
            line.remove(ask.tenant, waiter)
            if not line and self._lines.get(name) is line:
                del self._lines[name]

    def _look(self, name: str) -> None:
        line = self._lines.get(name)
        if line is not None:
            self._offer(line)
            asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look, name)

    def _ended(self, name: str) -> None:
        line = self._lines.get(name)
        if line is not None:
            self._offer(line)

    def _offer(self, line: Line[_Waiter]) -> None:
        """Let each tenant's first try, in turn, until one has got a slot or all have tried."""
        for _ in range(line.tenants):
            if not line:
                return
            tenant, waiter = line.take()
            if waiter.lease.done():
                continue
            try:
                reserved = self._store.reserve(waiter.ask)
            except SlotsTaken as refused:
                waiter.refused = refused
                line.put_back(tenant, waiter)
            except GatewayError as error:
                waiter.lease.set_exception(error)
            else:
                if isinstance(reserved, asyncio.Future):
                    reserved.add_done_callback(_hand(line, tenant, waiter))
                else:
                    waiter.lease.set_result(reserved)
                return


def _hand(line: Line[_Waiter], tenant: str, waiter: _Waiter) -> Callable[[asyncio.Future[Lease]], None]:
    def hand(reserved: asyncio.Future[Lease]) -> None:
        error = reserved.exception()
        if waiter.lease.done():
            if error is None:
                reserved.result().refund()
        elif error is None:
            waiter.lease.set_result(reserved.result())
        elif isinstance(error, SlotsTaken):
            waiter.refused = error
            line.put_back(tenant, waiter)
        else:
            waiter.lease.set_exception(error)

    return hand


def _still_taken(waiter: _Waiter, why: str) -> SlotsTaken:
    plan = waiter.ask.plan.name
    error = SlotsTaken(
        f"as many requests are running as plan `{plan}` allows, {why}", retry_after=SLOT_SECONDS
    )
    if waiter.refused is not None:
        error.headers = waiter.refused.headers
    return error


def root(ask: Ask) -> str:
    """What all limits of a request belong to."""
    return f"o:{ask.organisation}" if ask.organisation else f"t:{ask.tenant}"


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
