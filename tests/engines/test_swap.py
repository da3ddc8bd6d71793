from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.supervise import Idle, OperationError
from engines.swap import HOUR, NONE, Arbiter, Demand, Rules, Swapper

RULES = Rules(residence=30, batch=8, patience=2, idle=15, budget=3)


def arbiter(turn: str = "fast") -> Arbiter:
    return Arbiter(RULES, "fast", "exact", turn)


@pytest.mark.parametrize(
    ("demand", "now", "tier"),
    [
        (NONE, 100, None),
        (Demand(waiting=1, oldest=1.9), 100, None),
        (Demand(waiting=1, oldest=2.0), 100, "exact"),
        (Demand(waiting=7), 100, None),
        (Demand(waiting=8), 100, "exact"),
        (Demand(waiting=8, oldest=60), 29.9, None),
        (Demand(running=5), 100, None),
    ],
)
def test_a_swap_is_due_when_enough_wait_or_one_does_for_long(
    demand: Demand, now: float, tier: str | None
) -> None:
    assert arbiter().next({"exact": demand}, now) == tier


def test_the_base_comes_back_when_its_own_requests_wait() -> None:
    one = arbiter("exact")
    busy = Demand(waiting=3, oldest=1, running=20)
    assert one.next({"exact": busy, "fast": Demand(waiting=7, oldest=1)}, 50) is None
    assert one.next({"exact": busy, "fast": Demand(waiting=8, oldest=1)}, 50) == "fast"


def test_the_base_comes_back_when_nobody_uses_the_other() -> None:
    one = arbiter("exact")
    assert one.next({"exact": Demand(running=1)}, 40) is None
    assert one.next({}, 54.9) is None
    assert one.next({}, 55) == "fast"


def test_the_base_is_left_so_often_in_an_hour_and_comes_back_each_time() -> None:
    one, now = arbiter(), 0.0
    wanted = {"exact": Demand(waiting=8), "fast": Demand(waiting=8)}
    for _ in range(RULES.budget):
        for tier in ("exact", "fast"):
            now += RULES.residence
            assert one.next(wanted, now) == tier
            one.swapped(tier, now)
    assert one.left(now) == 0
    assert one.next(wanted, now + RULES.residence) is None
    assert one.next(wanted, RULES.residence + HOUR) == "exact"


STEPS = st.lists(
    st.tuples(st.floats(0, 40), st.integers(0, 12), st.floats(0, 5), st.integers(0, 12), st.floats(0, 5)),
    max_size=200,
)


@given(STEPS)
def test_whatever_is_asked_turns_are_long_and_within_the_budget(
    steps: list[tuple[float, int, float, int, float]],
) -> None:
    one, now = arbiter(), 0.0
    swaps: list[tuple[float, str]] = []
    for pause, fast, fast_oldest, exact, exact_oldest in steps:
        now += pause
        demand = {"fast": Demand(fast, fast_oldest), "exact": Demand(exact, exact_oldest)}
        tier = one.next(demand, now)
        if tier is not None:
            assert tier != one.turn
            assert tier == "fast" or exact > 0
            swaps.append((now, tier))
            one.swapped(tier, now)
    for (before, _), (after, _) in itertools.pairwise(swaps):
        assert after - before >= RULES.residence
    left = [at for at, tier in swaps if tier == "exact"]
    assert all(sum(at <= other < at + HOUR for other in left) <= RULES.budget for at in left)


class Pair:
    """Two engines that take turns, with faults on demand; at no time are both awake."""

    def __init__(self) -> None:
        self.states = {"fast-0": "ready", "exact-0": "asleep"}
        self.faults: dict[tuple[str, str], str] = {}
        self.journal: list[str] = []

    def state(self, name: str) -> str:
        return self.states[name]

    async def sleep(self, name: str, idle: Idle) -> None:
        await idle()
        self._fault("sleep", name)
        self.states[name] = "asleep"

    async def wake(self, name: str) -> str | None:
        self._fault("wake", name)
        self.states[name] = "ready"
        assert list(self.states.values()).count("ready") == 1
        return None

    def _fault(self, what: str, name: str) -> None:
        self.journal.append(f"{what} {name}")
        failed = self.faults.pop((what, name), None)
        if failed is not None:
            self.states[name] = failed
            raise OperationError(f"{name} would not {what}")


def swapper(pair: Pair, one: Arbiter, now: list[float], demand: Mapping[str, Demand]) -> Swapper:
    async def ask() -> Mapping[str, Demand]:
        return demand

    async def idle(name: str) -> None:
        pair.journal.append(f"idle {name}")

    async def sleep(seconds: float) -> None:
        now[0] += seconds
        await asyncio.sleep(0)

    tiers = {"fast": ["fast-0"], "exact": ["exact-0"]}
    return Swapper(one, tiers, pair, ask, idle, clock=lambda: now[0], sleep=sleep)


def test_a_swap_waits_for_what_runs_and_puts_one_to_sleep_before_it_wakes_the_other() -> None:
    pair, one = Pair(), arbiter()
    assert asyncio.run(swapper(pair, one, [100.0], {}).give("exact"))
    assert pair.journal == ["idle fast-0", "sleep fast-0", "wake exact-0"]
    assert (one.turn, one.since) == ("exact", 100.0)


@pytest.mark.parametrize(
    ("fault", "becomes", "journal"),
    [
        # It would not sleep and serves on.
        (("sleep", "fast-0"), "ready", ["idle fast-0", "sleep fast-0"]),
        # It could not be woken, nor restarted: the one that had the GPU comes back.
        (
            ("wake", "exact-0"),
            "backoff",
            ["idle fast-0", "sleep fast-0", "wake exact-0", "wake fast-0"],
        ),
    ],
)
def test_where_a_swap_fails_the_other_serves_on(
    fault: tuple[str, str], becomes: str, journal: list[str]
) -> None:
    pair, one = Pair(), arbiter()
    pair.faults[fault] = becomes
    assert not asyncio.run(swapper(pair, one, [100.0], {}).give("exact"))
    assert pair.journal == journal
    assert pair.states["fast-0"] == "ready"
    assert one.turn == "fast"


def test_it_swaps_there_and_back() -> None:
    async def main() -> None:
        pair, one, now = Pair(), arbiter(), [0.0]
        demand = {"exact": Demand(waiting=8)}
        running = asyncio.create_task(swapper(pair, one, now, demand).run())
        while one.turn != "exact":
            await asyncio.sleep(0)
        assert now[0] >= RULES.residence
        demand.clear()
        left = now[0]
        while one.turn != "fast":
            await asyncio.sleep(0)
        assert now[0] - left >= RULES.residence
        running.cancel()

    asyncio.run(asyncio.wait_for(main(), 30))
