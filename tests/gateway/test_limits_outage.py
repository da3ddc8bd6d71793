"""What becomes of reservations while Redis is killed, stands still, takes no writes or has forgotten, and how
all is as it was when it is back."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import LimitsPart, Seconds
from gateway.errors import LimitExceeded, LimitsUnavailable, SlotsTaken
from gateway.limits import Ask, Lease, claim
from gateway.limits.local import LocalShare
from gateway.limits.redis import RedisStore
from policies.plan import Plan
from policies.units import Rate
from tests.support.client import ask, until
from tests.support.engine import FakeEngine, engines, hang, reply
from tests.support.redis import Server, needs_redis, server
from tests.support.serving import serving
from tests.support.shapes import CHAT, check_error

PLAN = Plan("p", requests=(Rate(100, 60.0),), tokens=(Rate(10_000, 60.0),), concurrent=6)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@contextlib.asynccontextmanager
async def running(
    url: str, name: str = "a", clock: Callable[[], float] = time.monotonic, **settings: Any
) -> AsyncIterator[RedisStore]:
    part = LimitsPart(store=url, **{"timeout": Seconds(0.3), **settings})
    store = RedisStore(part, workers=1, process=name, clock=clock)
    async with store.running():
        yield store


def asking(plan: Plan = PLAN, output: int = 10, **more: Any) -> Ask:
    fields = {"tenant": "t", "plan": plan, "tier": "fast", "model": "m"} | more
    return Ask(**fields, prompt=0, output=output)


async def take(store: RedisStore, *args: Any, **more: Any) -> Lease:
    reserved = store.reserve(asking(*args, **more))
    return await claim(reserved) if isinstance(reserved, asyncio.Future) else reserved


async def down(store: RedisStore) -> None:
    """Ask until the store is known to be down."""
    while store.up():
        with contextlib.suppress(LimitsUnavailable, LimitExceeded):
            (await take(store, tenant="another")).refund()
        await asyncio.sleep(0.005)


@pytest.fixture
def redis() -> Iterator[Server]:
    with server() as one:
        yield one


def leases(redis: Server) -> int:
    with contextlib.closing(redis.client()) as client:
        return int(client.zcard("dualgauge:{t:t}:t:t:leases"))  # type: ignore[arg-type]


# Ways to fail, and back.
FAULTS = [
    pytest.param(Server.kill, Server.start, id="killed"),
    pytest.param(Server.stop, Server.resume, id="stopped"),
    pytest.param(Server.read_only, Server.writable, id="read-only"),
]
Fault = Callable[[Server], None]


@needs_redis
@pytest.mark.parametrize(("fault", "mend"), FAULTS)
@pytest.mark.parametrize("mode", ["closed", "open", "local"])
async def test_each_mode_keeps_its_promise_and_recovers(
    redis: Server, fault: Fault, mend: Fault, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(redis.url, on_store_failure=mode) as store:
        assert store.up()
        fault(redis)
        await down(store)
        before = store.fallbacks()
        if mode == "closed":
            for _ in range(3):
                with pytest.raises(LimitsUnavailable) as caught:
                    store.reserve(asking())
                assert caught.value.retry_after == 1
            assert store.fallbacks() == 0
        elif mode == "open":
            held = [store.reserve(asking()) for _ in range(200)]
            for lease in held:
                assert not isinstance(lease, asyncio.Future)
                assert lease.headers == b""
                lease.refund()
            assert store.fallbacks() == before + 200
        else:
            held = [store.reserve(asking()) for _ in range(6)]
            with pytest.raises(SlotsTaken):
                store.reserve(asking())
            for lease in held:
                assert not isinstance(lease, asyncio.Future)
                assert b"x-ratelimit-limit-requests: 50\r\n" in lease.headers
                lease.settle(0, 10)
            assert store.fallbacks() == before + 6
        mend(redis)
        await until(store.up, 10)
        (await take(store)).settle(0, 5)
        await until(lambda: leases(redis) == 0 and store.in_use() == 0)
        told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        assert len(told) == 2
        assert f"on_store_failure: {mode}" in told[0]
        assert "answers again" in told[1]


@needs_redis
async def test_nobody_waits_for_a_server_that_is_known_to_be_down(redis: Server) -> None:
    async with running(redis.url) as store:
        redis.stop()
        first = [store.reserve(asking(concurrent_plan())) for _ in range(20)]
        assert all(isinstance(promise, asyncio.Future) for promise in first)
        leases = [await claim(promise) for promise in first if isinstance(promise, asyncio.Future)]
        assert not isinstance(store.reserve(asking(concurrent_plan())), asyncio.Future)
        assert store.fallbacks() == len(leases) + 1
        redis.resume()


def concurrent_plan() -> Plan:
    return Plan("wide", concurrent=1000)


@needs_redis
async def test_what_could_not_be_settled_is_settled_later(redis: Server) -> None:
    plan = Plan("p", tokens=(Rate(10_000, 1e9),), concurrent=9)
    async with running(redis.url) as store:
        kept = [await take(store, plan, output=500) for _ in range(3)]
        redis.stop()
        await down(store)
        for lease in kept:
            lease.settle(0, 20)
        assert store.in_use() == 0
        redis.resume()
        await until(store.up, 10)
        await until(lambda: leases(redis) == 0)
        lease = await take(store, plan, output=0)
        assert b"x-ratelimit-remaining-tokens: 9940\r\n" in lease.headers
        lease.refund()


@needs_redis
async def test_what_was_granted_too_late_is_given_back(redis: Server) -> None:
    async with running(redis.url) as store:
        redis.stop()
        lease = await take(store, output=500)  # the server reads it when it goes on
        lease.refund()
        redis.resume()
        await until(store.up, 10)
        with contextlib.closing(redis.client()) as client:
            await until(lambda: client.exists("dualgauge:{t:t}:t:t:buckets") == 1)
        await until(lambda: leases(redis) == 0)


@needs_redis
async def test_a_server_that_was_flushed_counts_running_leases_again(
    redis: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.limits.redis.RENEW_SECONDS", 0.1)
    async with running(redis.url) as store:
        held = [await take(store) for _ in range(6)]
        with contextlib.closing(redis.client()) as client:
            client.flushall()
        await until(lambda: leases(redis) == 6)
        with pytest.raises(SlotsTaken):
            await take(store)
        for lease in held:
            lease.settle(0, 10)
        await until(lambda: leases(redis) == 0)
        assert store.up()


@needs_redis
async def test_running_leases_count_in_the_local_share(redis: Server) -> None:
    async with running(redis.url) as store:
        held = [await take(store) for _ in range(4)]
        redis.kill()
        await down(store)
        here = [store.reserve(asking()) for _ in range(2)]
        with pytest.raises(SlotsTaken):
            store.reserve(asking())
        for lease in [*held, *here]:
            assert not isinstance(lease, asyncio.Future)
            lease.settle(0, 1)
        assert store.in_use() == 0


@needs_redis
async def test_a_share_begins_with_what_the_store_had_left(redis: Server) -> None:
    plan = Plan("p", requests=(Rate(100, 1e9),), tokens=(Rate(1000, 1e9),))
    async with running(redis.url) as store:
        for _ in range(80):
            (await take(store, plan, output=1)).settle(0, 1)
        redis.kill()
        await down(store)
        lease = store.reserve(asking(plan, output=0))
        assert not isinstance(lease, asyncio.Future)
        # A fifth of the requests was left, of a share of 50; and 0.92 of the tokens, of 500.
        assert b"x-ratelimit-remaining-requests: 9\r\n" in lease.headers
        assert b"x-ratelimit-remaining-tokens: 460\r\n" in lease.headers
        lease.refund()


@needs_redis
async def test_c12_two_processes_admit_no_more_than_the_plan_while_redis_is_away(redis: Server) -> None:
    clock = Clock()
    plan = Plan("p", requests=(Rate(100, 60.0),))
    async with running(redis.url, "a", clock) as one, running(redis.url, "b", clock) as other:
        await until(lambda: one._local._processes == other._local._processes == 2)
        redis.kill()
        await down(one)
        await down(other)
        clock.now += 1e6
        admitted = 0
        for _ in range(600):
            for store in (one, other):
                with contextlib.suppress(LimitExceeded):
                    lease = store.reserve(asking(plan))
                    assert not isinstance(lease, asyncio.Future)
                    lease.settle(0, 1)
                    admitted += 1
            clock.now += 0.1
        assert 90 <= admitted <= 100
        redis.start()
        await until(lambda: one.up() and other.up(), 10)
        (await take(one, plan)).refund()


@needs_redis
async def test_a_gateway_that_starts_without_its_store_serves_and_finds_it(tmp_path: Path) -> None:
    with server() as redis:
        redis.kill()
        engine = FakeEngine(reply(CHAT.reply))
        limits = {"store": redis.url, "timeout": "300ms"}
        text = "version: 1\nrules: [{name: all, send: fast}]\nplans: {default: {requests: 100/day}}\n"
        async with (
            engines(engine),
            serving(tmp_path, {"fast": engine}, policy=text, limits=limits) as served,
        ):
            assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 200
            metrics = served.metrics().decode()
            assert "dualgauge_store_up 0.0" in metrics
            assert "dualgauge_store_fallback_total 1.0" in metrics
            redis.start()
            await until(served.gateway.store.up, 10)
            answer = await ask(served.port, CHAT.path, CHAT.ask())
            assert answer.headers["x-ratelimit-limit-requests"] == "100"
            assert "dualgauge_store_up 1.0" in served.metrics().decode()
            await until(lambda: served.clean)


@needs_redis
async def test_a_closed_gateway_says_503_and_when_to_come_back(tmp_path: Path) -> None:
    with server() as redis:
        engine = FakeEngine(reply(CHAT.reply))
        limits = {"store": redis.url, "timeout": "300ms", "on_store_failure": "closed"}
        text = "version: 1\nrules: [{name: all, send: fast}]\nplans: {default: {requests: 100/day}}\n"
        async with (
            engines(engine),
            serving(tmp_path, {"fast": engine}, policy=text, limits=limits) as served,
        ):
            redis.kill()
            answer = await ask(served.port, CHAT.path, CHAT.ask())
            check_error(answer, 503, code="limits_unavailable")
            assert answer.headers["retry-after"] == "1"
            assert engine.generations == 0


@needs_redis
async def test_a_client_that_leaves_a_server_that_stands_still_leaves_nothing(tmp_path: Path) -> None:
    with server() as redis:
        engine = FakeEngine(hang)
        limits = {"store": redis.url, "timeout": "1s"}
        text = "version: 1\nrules: [{name: all, send: fast}]\nplans: {default: {concurrent: 5}}\n"
        async with (
            engines(engine),
            serving(tmp_path, {"fast": engine}, policy=text, limits=limits) as served,
        ):
            redis.stop()
            asked = asyncio.create_task(ask(served.port, CHAT.path, CHAT.ask()))
            await asyncio.sleep(0.1)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            redis.resume()
            with contextlib.closing(redis.client()) as client:
                await until(lambda: not client.keys("*:leases") and served.clean)
            assert engine.generations == 0


# the share of a process


@given(
    st.integers(1, 7),
    st.integers(1, 200),
    st.lists(st.tuples(st.integers(0, 6), st.floats(0, 30)), max_size=120),
)
def test_in_no_window_all_shares_admit_more_than_the_limit(
    processes: int, limit: int, asked: list[tuple[int, float]]
) -> None:
    clock, plan = Clock(), Plan("p", requests=(Rate(limit, 60.0),))
    shares = [LocalShare(clock) for _ in range(processes)]
    for rank, share in enumerate(shares):
        share.divide(processes, rank)
    admitted: deque[float] = deque()
    for process, wait in asked:
        clock.now += wait
        for _ in range(40):
            try:
                shares[process % processes].reserve(asking(plan)).settle(0, 1)
            except LimitExceeded:
                break
            admitted.append(clock.now)
        while admitted and admitted[0] <= clock.now - 60.0:
            admitted.popleft()
        assert len(admitted) <= limit


@given(st.integers(1, 9), st.integers(1, 20))
def test_slots_are_divided_without_a_rest(processes: int, slots: int) -> None:
    plan, taken = Plan("p", concurrent=slots), 0
    for rank in range(processes):
        share = LocalShare(Clock())
        share.divide(processes, rank)
        with contextlib.suppress(LimitExceeded):
            while True:
                share.reserve(asking(plan))
                taken += 1
    assert taken == slots


def test_what_fits_the_whole_limit_but_no_share_is_asked_to_come_back() -> None:
    share = LocalShare(Clock())
    share.divide(4, 0)
    plan = Plan("p", tokens=(Rate(1000, 60.0),))
    with pytest.raises(LimitExceeded, match="a share of them only") as caught:
        share.reserve(asking(plan, output=800))
    assert (caught.value.error_code, caught.value.retry_after) == ("rate_limit_exceeded", 2)
