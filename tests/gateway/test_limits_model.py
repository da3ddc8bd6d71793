"""Both stores beside a model, step by step, on a clock of the test's own: whatever is reserved, settled,
given back, expired, lost with its process or reloaded, they decide alike and hold the same.

The model is what `docs/limits.md` promises. A program is drawn as bytes, four a step;
`LIMITS_STEPS` says how many steps each store makes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis

from gateway.errors import LimitExceeded, SlotsTaken
from gateway.limits import Ask
from gateway.limits.course import Course, Meter, chart
from gateway.limits.memory import MemoryLease, MemoryStore
from gateway.limits.redis import LEASE_SECONDS, SCRIPT, _Route
from policies.plan import Plan
from policies.units import Rate
from tests.support.redis import needs_redis, server

STEPS = int(os.environ.get("LIMITS_STEPS", "100000"))
LENGTH = (150, 350)
PROGRAMS = st.binary(min_size=4 * LENGTH[0], max_size=4 * LENGTH[1])
CLOSE = 1e-4
MICRO = 1_000_000


def play_many(steps: int) -> settings:
    return settings(
        max_examples=max(1, steps // (sum(LENGTH) // 2)),
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=[
            HealthCheck.data_too_large,
            HealthCheck.too_slow,
            HealthCheck.large_base_example,
        ],
    )


TIERS = ("fast", "exact")
PLANS = (
    Plan("small", requests=(Rate(5, 60.0),), tokens=(Rate(1000, 60.0),), concurrent=3),
    Plan("large", requests=(Rate(9, 60.0), Rate(20, 3600.0)), tokens=(Rate(4000, 60.0),), concurrent=5),
    Plan(
        "weighted",
        tokens=(Rate(2000, 120.0), Rate(9000, 3600.0)),
        tier_tokens=MappingProxyType({"exact": (Rate(500, 60.0),), "fast": (Rate(1500, 30.0),)}),
        weights=MappingProxyType({"exact": 4.0, "fast": 0.5}),
        cached=0.25,
    ),
    Plan(
        "models",
        tokens=(Rate(3000, 60.0),),
        concurrent=4,
        models=MappingProxyType({"m2": Plan("m2", requests=(Rate(2, 30.0),), concurrent=1)}),
    ),
    Plan("free"),
)
SHARED = (
    Plan("team", requests=(Rate(12, 60.0),), tokens=(Rate(2500, 60.0),), concurrent=5),
    Plan("team2", tokens=(Rate(6000, 600.0),), concurrent=2, weights=MappingProxyType({"exact": 2.0})),
)
WAITS = (0.0, 0.001, 0.25, 1.0, 3.5, 17.0, 61.0, 4000.0)
# Of each tenant, its organisation.
TENANTS = {"a": "org", "b": "", "c": "org"}


Key = tuple[str, str, str]
"""A bucket: the root, the holder, the kind."""


class Clock:
    """Whole microseconds, as a server's; both stores must read the same from them, to the last bit."""

    def __init__(self) -> None:
        self.us = 1_700_000_000 * MICRO

    def pass_by(self, seconds: float) -> None:
        self.us += round(seconds * MICRO)

    @property
    def now(self) -> float:
        seconds, us = divmod(self.us, MICRO)
        return seconds + us / MICRO

    def __call__(self) -> float:
        return self.now


# the model


@dataclass
class Amount:
    """What is left of a limit."""

    level: float
    at: float
    rate: Rate

    def refilled(self, now: float) -> float:
        grown = self.level + (now - self.at) * self.rate.amount / self.rate.seconds
        return min(grown, self.rate.amount)

    def resized(self, rate: Rate, now: float) -> Amount:
        """The same share of an edited limit."""
        return Amount(self.refilled(now) / self.rate.amount * rate.amount, now, rate)


@dataclass(eq=False)
class Held:
    """A lease as the model knows it; one whose process died is settled by nobody."""

    course: Course
    tokens: int
    until: float
    lease: Any
    died: bool = False


@dataclass
class Model:
    clock: Clock
    amounts: dict[Key, Amount] = field(default_factory=dict)
    held: list[Held] = field(default_factory=list)

    def running(self, holder: str) -> int:
        return sum(holder in (scope.name for scope in one.course.scopes) for one in self.held)

    def amount(self, course: Course, meter: Meter) -> tuple[Key, Amount]:
        key = (course.root, course.scopes[meter.scope].name, meter.field)
        if key not in self.amounts:
            self.amounts[key] = Amount(meter.rate.amount, self.clock.now, meter.rate)
        return key, self.amounts[key]

    def decide(self, course: Course, tokens: int, *, touch: bool) -> tuple[bool, float]:
        """(whether a slot is missing, by how much the bucket with the least room is short). `touch`: buckets
        get the plan's new size by a refusal too."""
        short = -1e9
        for meter in course.meters:
            key, amount = self.amount(course, meter)
            amount = amount.resized(meter.rate, self.clock.now)
            if touch:
                self.amounts[key] = amount
            short = max(short, meter.each + tokens * meter.weight - amount.level)
        full = any(
            scope.concurrent is not None and self.running(scope.name) >= scope.concurrent
            for scope in course.scopes
        )
        return full, short

    def take(self, course: Course, tokens: int, lease: Any) -> None:
        for meter in course.meters:
            key, amount = self.amount(course, meter)
            self.amounts[key] = amount = amount.resized(meter.rate, self.clock.now)
            amount.level -= meter.each + tokens * meter.weight
        self.held.append(Held(course, tokens, self.clock.now + LEASE_SECONDS, lease))

    def end(self, one: Held, used: int, cached: int, tier: str) -> None:
        self.held.remove(one)
        answered = one.course if tier == one.course.ask.tier else chart(_moved(one.course.ask, tier))
        changes: dict[Key, float] = {}
        for course, ended in ((answered, False), (one.course, True)):
            for meter in course.meters:
                key, amount = self.amount(course, meter)
                change = one.tokens * meter.weight
                if not ended:
                    change = cached * meter.saved - used * meter.weight
                changes[key] = changes.get(key, 0.0) + change * amount.rate.amount / meter.rate.amount
        for key, change in changes.items():
            amount = self.amounts[key].resized(self.amounts[key].rate, self.clock.now)
            amount.level = min(amount.rate.amount, amount.level + change)
            self.amounts[key] = amount

    def expire(self) -> None:
        """What a lease reserved stays taken: nobody knows what was used."""
        self.held = [one for one in self.held if one.until > self.clock.now]


def _moved(ask: Ask, tier: str) -> Ask:
    return Ask(ask.tenant, ask.plan, tier, ask.model, ask.prompt, ask.output, ask.organisation, ask.shared)


# the stores, as a program drives them


class InMemory:
    """Its leases live as long as it does."""

    redis = False

    def __init__(self, clock: Clock) -> None:
        self.store = MemoryStore(clock)

    def reserve(self, ask: Ask) -> MemoryLease:
        """Raises LimitExceeded."""
        return self.store.reserve(ask)

    def settle(self, lease: MemoryLease, used: int, cached: int, tier: str) -> None:
        lease.settle(used, 0, cached, tier)
        lease.settle(9999, 9999)
        lease.refund()

    def look(self, holders: Sequence[str], keys: Sequence[Key]) -> tuple[list[int], list[float]]:
        """How many leases each holder has, and what share is left of each bucket."""
        buckets = [self.store.holder(holder).buckets[kind] for _, holder, kind in keys]
        now = self.store.clock()
        shares = [bucket.refill(now) / bucket.amount for bucket in buckets]
        return [self.store.holder(holder).running for holder in holders], shares

    def renew(self, lease: MemoryLease) -> None: ...


class InRedis:
    """The script, called as the store does."""

    redis = True

    def __init__(self, clock: Clock, client: Redis) -> None:
        self.clock = clock
        self.client = client
        self.made = 0
        # The server's own clock cannot be set: a key holds the time, and none is let go by the real one.
        script = SCRIPT.replace(b"redis.call('TIME')", b"redis.call('HMGET', 'clock', 's', 'us')")
        self.sha = client.script_load(script.replace(b"redis.call('PEXPIRE',", b"tostring("))
        client.flushdb()

    def call(self, keys: Sequence[str], *args: Any) -> Any:
        with self.client.pipeline(transaction=False) as pipe:
            pipe.hset("clock", mapping=dict(zip(("s", "us"), divmod(self.clock.us, MICRO), strict=True)))
            pipe.evalsha(self.sha, len(keys), *keys, *args)
            return pipe.execute()[1]

    def reserve(self, ask: Ask) -> Any:
        """Raises LimitExceeded."""
        course = chart(ask)
        route = _Route(course, ())
        self.made += 1
        name, tokens = f"l{self.made}", course.tokens(ask)
        reply = self.call(route.keys, "reserve", name, tokens, LEASE_SECONDS, route.limits)
        if reply[0]:
            return route, name, tokens
        levels = [level / 1e6 for level in reply[2:]]
        error = course.slots_taken(reply[1] - 1, levels) if reply[1] else course.over_limit(tokens, levels)
        assert error is not None
        raise error

    def settle(self, lease: Any, used: int, cached: int, tier: str) -> None:
        route, name, tokens = lease
        ask = route.course.ask
        others = b"" if tier == ask.tier else _Route(chart(_moved(ask, tier)), ()).limits
        assert self.call(route.keys, "settle", name, tokens, used, cached, route.limits, others) == 1
        assert self.call(route.keys, "settle", name, tokens, 9999, 0, route.limits, b"") == 0

    def look(self, holders: Sequence[str], keys: Sequence[Key]) -> tuple[list[int], list[float]]:
        """How many leases each holder has, and what share is left of each bucket."""
        now = float(self.clock.now)
        with self.client.pipeline(transaction=False) as pipe:
            for holder in holders:
                root = holder if holder == "t:b" else "o:org"
                pipe.zcount(f"dualgauge:{{{root}}}:{holder}:leases", f"({now}", "+inf")
            for root, holder, kind in keys:
                pipe.hget(f"dualgauge:{{{root}}}:{holder}:buckets", kind)
            found: Any = pipe.execute()
        shares = []
        for kept in found[len(holders) :]:
            taken, at, limit, window = (0.0, now, 1.0, 1.0) if kept is None else struct.unpack("<dddd", kept)
            assert taken >= 0
            shares.append(1.0 - max(0.0, taken / limit - (now - at) / window))
        return found[: len(holders)], shares

    def renew(self, lease: Any) -> None:
        for key in lease[0].leases:
            self.call((key,), "renew", LEASE_SECONDS, lease[1])


def play(driver: InMemory | InRedis, clock: Clock, program: bytes) -> None:
    """Run a program on a store and on the model; they may never differ."""
    model = Model(clock)
    plan, shared = PLANS[0], SHARED[0]
    for step in range(0, len(program) - 3, 4):
        op, a, b, c = program[step : step + 4]
        live = [one for one in model.held if not one.died]
        one = live[a % len(live)] if live else None
        if op < 120:
            tenant = "abc"[a % 3]
            tier, model_name = TIERS[b & 1], ("m1", "m2")[b >> 1 & 1]
            output, organisation = None if c < 30 else c * 3, TENANTS[tenant]
            attempt(driver, model, Ask(tenant, plan, tier, model_name, b * 3, output, organisation, shared))
        elif op < 180 and one is not None:
            used = b * 8 if c < 40 else min(one.tokens, b * 3)
            tier = TIERS[c >> 2 & 1] if c & 128 else one.course.ask.tier
            driver.settle(one.lease, used, used * (c & 3) // 4, tier)
            model.end(one, used, used * (c & 3) // 4, tier)
        elif op < 230:
            clock.pass_by(WAITS[a % len(WAITS)])
            if driver.redis:
                model.expire()
        elif op < 242:
            plan, shared = PLANS[a % len(PLANS)], SHARED[b % len(SHARED)]
        elif op < 248 and one is not None:
            driver.renew(one.lease)
            one.until = clock.now + LEASE_SECONDS
        elif one is not None and driver.redis:
            one.died = True
        if op & 15 == 0:
            compare(driver, model)
    for one in [one for one in model.held if not one.died]:
        driver.settle(one.lease, 0, 0, one.course.ask.tier)
        model.end(one, 0, 0, one.course.ask.tier)
    clock.pass_by(10**6)
    model.expire()
    assert not model.held
    compare(driver, model)
    assert set(driver.look((), tuple(model.amounts))[1]) <= {1.0}


def attempt(driver: InMemory | InRedis, model: Model, ask: Ask) -> None:
    course = chart(ask)
    tokens = course.tokens(ask)
    full, short = model.decide(course, tokens, touch=not driver.redis)
    lease, error = None, None
    try:
        lease = driver.reserve(ask)
    except LimitExceeded as refused:
        error = refused
    if full or abs(short) > CLOSE:
        assert (error is None) == (not full and short <= 0)
        assert isinstance(error, SlotsTaken) == full
    if error is None:
        model.take(course, tokens, lease)


def compare(driver: InMemory | InRedis, model: Model) -> None:
    holders = ("t:a", "t:b", "t:c", "o:org")
    running, shares = driver.look(holders, tuple(model.amounts))
    assert running == [model.running(holder) for holder in holders]
    for share, amount in zip(shares, model.amounts.values(), strict=True):
        assert share <= 1
        assert abs(share - float(amount.refilled(model.clock.now) / amount.rate.amount)) < CLOSE


@play_many(STEPS)
@given(program=PROGRAMS)
def test_the_store_in_memory_is_the_model(program: bytes) -> None:
    clock = Clock()
    play(InMemory(clock), clock, program)


@pytest.fixture(scope="module")
def client() -> Iterator[Redis]:
    with server() as one, one.client() as client:
        yield client


@needs_redis
@play_many(STEPS)
@given(program=PROGRAMS)
def test_the_store_in_redis_is_the_model(client: Redis, program: bytes) -> None:
    clock = Clock()
    play(InRedis(clock, client), clock, program)
