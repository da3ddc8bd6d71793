"""Leases of one process while the store that all share is down: a bounded share of each limit.

A limit is divided by the number of processes. Of its share a process admits at once half, and refills at the
same half a window, so that in no window all processes together admit more than the limit. It begins with no
more than the part of its share that this process saw the store to have left of the limit. What cannot be
divided (two slots among three processes) goes to the first ones, in the order in which the store has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from gateway.errors import LimitExceeded
from gateway.limits import NO_PLAN, Ask, Ended
from gateway.limits.course import Course
from gateway.limits.memory import Holder, MemoryLease, MemoryStore
from policies.plan import Plan
from policies.units import Rate

# By then the store is asked again.
RETRY_SECONDS = 2.0
MOST_SHARES = 1000


class LocalShare:
    """`divide` sets the number of processes, and how many of them come before this one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._memory = MemoryStore(clock)
        self._processes = 1
        self._rank = 0
        self._shares: dict[int, tuple[Plan, Plan]] = {}

    def divide(self, processes: int, rank: int) -> None:
        if (processes, rank) != (self._processes, self._rank):
            self._processes, self._rank = processes, rank
            self._shares.clear()

    def in_use(self) -> int:
        return self._memory.in_use()

    def on_end(self, hook: Ended) -> None:
        self._memory.on_end(hook)

    def holders(self, course: Course) -> tuple[Holder, ...]:
        """Whose requests in flight are counted here too while the store is up."""
        return tuple(self._memory.holder(scope.name) for scope in course.scopes)

    def reserve(self, ask: Ask) -> MemoryLease:
        """Raises LimitExceeded."""
        plan, shared = self._share(ask.plan), self._share(ask.shared)
        if plan is None or shared is None:
            raise self._later("its limits are too small to be divided among the gateway's processes")
        try:
            return self._memory.reserve(msgspec.structs.replace(ask, plan=plan, shared=shared))
        except LimitExceeded as error:
            if error.retry_after is not None:
                raise
            # It may well fit the whole limit.
            raise self._later(error.message) from error

    def go_on(self, ask: Ask, course: Course, levels: Sequence[float], seconds: float) -> None:
        """Begin with no more than the share of what the store had left of each limit, so many seconds ago."""
        plan, shared = self._share(ask.plan), self._share(ask.shared)
        if plan is not None and shared is not None and levels:
            rates = [meter.rate for meter in course.meters]
            left = [
                level / rate.amount + seconds / rate.seconds
                for level, rate in zip(levels, rates, strict=True)
            ]
            self._memory.lower(msgspec.structs.replace(ask, plan=plan, shared=shared), left)

    def _later(self, why: str) -> LimitExceeded:
        return LimitExceeded(
            f"the store of limits is down, and this process has a share of them only: {why}",
            retry_after=RETRY_SECONDS,
        )

    def _share(self, plan: Plan) -> Plan | None:
        """None where this process has no share at all."""
        if plan is NO_PLAN:
            return plan
        found = self._shares.get(id(plan))
        if found is None or found[0] is not plan:
            if len(self._shares) > MOST_SHARES:
                self._shares.clear()  # of policies that were reloaded since
            found = self._shares[id(plan)] = plan, self._divided(plan)
        return found[1] if _usable(found[1]) else None

    def _divided(self, plan: Plan) -> Plan:
        whole = plan.concurrent
        return Plan(
            f"{plan.name}, a share of it",
            requests=self._rates(plan.requests),
            tokens=self._rates(plan.tokens),
            tier_tokens={tier: self._rates(rates) for tier, rates in plan.tier_tokens.items()},
            concurrent=None if whole is None else self._part(whole),
            output=plan.output,
            wait=plan.wait,
            weights=plan.weights,
            cached=plan.cached,
            models={model: self._divided(limits) for model, limits in plan.models.items()},
        )

    def _part(self, whole: int) -> int:
        part, rest = divmod(whole, self._processes)
        return part + (self._rank < rest)

    def _rates(self, rates: Sequence[Rate]) -> tuple[Rate, ...]:
        parts = [(self._part(rate.amount), rate.seconds) for rate in rates]
        return tuple(Rate(max(part // 2, min(part, 1)), seconds) for part, seconds in parts)


def _usable(plan: Plan) -> bool:
    rates = (*plan.requests, *plan.tokens, *(rate for some in plan.tier_tokens.values() for rate in some))
    return plan.concurrent != 0 and all(rate.amount for rate in rates)
