"""The store of leases in memory, alone: what a reservation takes, what its end gives back, what is told."""

from collections.abc import Callable
from typing import Any

import pytest

from gateway.errors import LimitExceeded, SlotsTaken
from gateway.limits import NO_PLAN, Ask, duration
from gateway.limits.memory import MemoryLease, MemoryStore
from policies.plan import Plan
from policies.units import Rate

DAY = 86400.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(clock)


def ask(plan: Plan, prompt: int = 0, output: int | None = 0, **more: Any) -> Ask:
    return Ask(
        **{"tenant": "t", "plan": plan, "tier": "fast", "model": "m"} | more, prompt=prompt, output=output
    )


def per_day(**amounts: int) -> dict[str, Any]:
    return {kind: (Rate(amount, 1e12),) for kind, amount in amounts.items()}


def refused(reserve: Callable[[], MemoryLease]) -> LimitExceeded:
    with pytest.raises(LimitExceeded) as caught:
        reserve()
    return caught.value


def test_buckets_start_full_and_refill_continuously(store: MemoryStore, clock: Clock) -> None:
    plan = Plan("p", requests=(Rate(60, 60.0),))
    for _ in range(60):
        store.reserve(ask(plan)).refund()
    assert refused(lambda: store.reserve(ask(plan))).retry_after == pytest.approx(1)
    clock.now += 0.999
    refused(lambda: store.reserve(ask(plan)))
    clock.now += 0.002
    store.reserve(ask(plan))
    clock.now += 1e6
    assert store.usage()["t"]["requests"] == 60


def test_who_waits_as_long_as_told_is_admitted(store: MemoryStore, clock: Clock) -> None:
    plan = Plan("p", requests=(Rate(7, 60.0), Rate(9, 3600.0)), tokens=(Rate(1000, 61.0),))
    refusals = 0
    while refusals < 20:
        try:
            store.reserve(ask(plan, prompt=333)).refund()
        except LimitExceeded as error:
            refusals += 1
            clock.now += error.retry_after or 0
            store.reserve(ask(plan, prompt=333)).refund()


def test_a_settlement_above_the_reservation_is_a_debt(store: MemoryStore) -> None:
    plan = Plan("p", tokens=(Rate(100, 100.0),))
    store.reserve(ask(plan, prompt=10, output=10)).settle(10, 190)
    assert store.usage()["t"]["tokens"] == -100
    error = refused(lambda: store.reserve(ask(plan, prompt=1)))
    assert error.retry_after == pytest.approx(101)
    assert "0 left" in error.message


def test_a_lease_is_settled_once(store: MemoryStore) -> None:
    plan = Plan("p", **per_day(tokens=1000), concurrent=2)
    lease = store.reserve(ask(plan, prompt=100, output=400))
    lease.settle(100, 50)
    lease.settle(100, 400)
    lease.refund()
    assert store.usage()["t"] == {"concurrent": 0, "tokens": 850}
    assert store.in_use() == 0


def test_an_edited_plan_keeps_the_share_that_is_left(store: MemoryStore) -> None:
    lease = store.reserve(ask(Plan("p", **per_day(tokens=1000)), output=500))
    store.reserve(ask(Plan("p", **per_day(tokens=100)))).refund()
    assert store.usage()["t"]["tokens"] == 50
    lease.settle(0, 0)
    assert store.usage()["t"]["tokens"] == 100


def test_an_enlarged_plan_gets_back_what_was_reserved_in_the_small_one(store: MemoryStore) -> None:
    lease = store.reserve(ask(Plan("p", **per_day(tokens=100)), output=50))
    store.reserve(ask(Plan("p", **per_day(tokens=1000)))).refund()
    assert store.usage()["t"]["tokens"] == 500
    lease.refund()
    assert store.usage()["t"]["tokens"] == 1000


@pytest.mark.parametrize("amount", [10, 500, 100_000])
def test_an_unbounded_request_leaves_room_for_others(store: MemoryStore, amount: int) -> None:
    plan = Plan("p", **per_day(tokens=amount), weights={"fast": 2.0})
    store.reserve(ask(plan, prompt=amount // 20, output=None))
    assert store.usage()["t"]["tokens"] >= amount / 2 - 2


def test_of_several_windows_all_hold_and_the_tightest_is_shown(store: MemoryStore) -> None:
    plan = Plan("p", requests=(Rate(3, 60.0), Rate(4, DAY)))
    assert b"limit-requests: 3\r\nx-ratelimit-remaining-requests: 2\r\n" in store.reserve(ask(plan)).headers
    for _ in range(2):
        store.reserve(ask(plan))
    error = refused(lambda: store.reserve(ask(plan)))
    assert error.retry_after == pytest.approx(20)
    assert error.headers.startswith(b"x-ratelimit-limit-requests: 3\r\nx-ratelimit-remaining-requests: 0\r\n")


def test_the_price_of_a_tier_is_charged_in_one_currency(store: MemoryStore) -> None:
    plan = Plan("p", **per_day(tokens=10_000), weights={"exact": 4.0})
    store.reserve(ask(plan, prompt=100, output=100)).settle(100, 50)
    assert store.usage()["t"]["tokens"] == 9850
    lease = store.reserve(ask(plan, prompt=100, output=100, tier="exact"))
    assert store.usage()["t"]["tokens"] == 9050
    lease.settle(100, 50)
    assert store.usage()["t"]["tokens"] == 9250


def test_the_tier_that_answered_is_charged(store: MemoryStore) -> None:
    tiers = {"exact": (Rate(1000, 1e12),), "fast": (Rate(1000, 1e12),)}
    plan = Plan("p", **per_day(tokens=10_000), tier_tokens=tiers, weights={"exact": 4.0})
    lease = store.reserve(ask(plan, prompt=100, output=100, tier="exact"))
    lease.settle(100, 50, tier="fast")
    usage = {"concurrent": 0, "tokens": 9850, "exact_tokens": 1000, "fast_tokens": 850}
    assert store.usage()["t"] == usage


def test_cached_tokens_count_less(store: MemoryStore) -> None:
    plan = Plan("p", **per_day(tokens=1000), cached=0.25, tier_tokens={"fast": (Rate(500, 1e12),)})
    store.reserve(ask(plan, prompt=200, output=100)).settle(200, 10, cached=160)
    assert store.usage()["t"] == {"concurrent": 0, "tokens": 910, "fast_tokens": 410}


def test_an_organisation_holds_beside_its_tenants(store: MemoryStore) -> None:
    plan, shared = Plan("p", **per_day(requests=2)), Plan("team", **per_day(requests=3), concurrent=9)
    inside = {"organisation": "acme", "shared": shared}
    for tenant in ("a", "a", "b"):
        store.reserve(ask(plan, tenant=tenant, **inside)).refund()
    assert "plan `p` allows 2" in refused(lambda: store.reserve(ask(plan, tenant="a", **inside))).message
    assert "plan `team` allows 3" in refused(lambda: store.reserve(ask(plan, tenant="b", **inside))).message
    assert store.usage()["o:acme"] == {"requests": 0, "concurrent": 0}
    assert store.usage()["b"]["requests"] == 1
    store.reserve(ask(plan, tenant="b"))


def test_a_model_has_limits_beside_the_plans(store: MemoryStore) -> None:
    dear = Plan("p, dear", **per_day(requests=1), concurrent=1)
    plan = Plan("p", **per_day(requests=10), models={"dear": dear})
    lease = store.reserve(ask(plan, model="dear"))
    assert "plan `p, dear`" in refused(lambda: store.reserve(ask(plan, model="dear"))).message
    lease.refund()
    assert "1 requests in" in refused(lambda: store.reserve(ask(plan, model="dear"))).message
    store.reserve(ask(plan, model="m"))
    assert store.usage()["t"]["requests"] == 8


def test_what_one_limit_refuses_is_charged_on_none(store: MemoryStore) -> None:
    shared = Plan("team", **per_day(tokens=10))
    plan = Plan("p", **per_day(requests=5, tokens=100), concurrent=3)
    refused(lambda: store.reserve(ask(plan, 5, 15, organisation="acme", shared=shared)))
    assert store.usage()["t"] == {"concurrent": 0, "requests": 5, "tokens": 100}
    assert store.in_use() == 0


def test_no_place_is_told_with_what_is_left(store: MemoryStore) -> None:
    plan = Plan("p", **per_day(requests=5), concurrent=1)
    store.reserve(ask(plan))
    error = refused(lambda: store.reserve(ask(plan)))
    assert isinstance(error, SlotsTaken)
    assert b"x-ratelimit-remaining-requests: 4\r\n" in error.headers


def test_without_limits_leases_are_counted(store: MemoryStore) -> None:
    lease = store.reserve(ask(NO_PLAN))
    assert (store.in_use(), lease.headers) == (1, b"")
    lease.settle(10, 10)
    assert store.in_use() == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0s"),
        (0, "0s"),
        (0.0001, "1ms"),
        (0.25, "250ms"),
        (1, "1s"),
        (6.5, "6.5s"),
        (59.9996, "1m0s"),
        (60, "1m0s"),
        (90, "1m30s"),
        (3599.9999, "1h0m0s"),
        (7205, "2h0m5s"),
    ],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text
