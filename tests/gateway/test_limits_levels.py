"""What the stores tell of the levels of buckets, for the console."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.config import LimitsPart, Seconds
from gateway.limits import Ask, Held, Lease, Store, claim
from gateway.limits.memory import MemoryStore
from gateway.limits.redis import RedisStore
from policies.plan import Plan
from policies.units import Rate
from tests.support.redis import needs_redis, server

DAY = 86400.0
PLAN = Plan(
    "p", requests=(Rate(10, DAY), Rate(50, 7 * DAY)), tokens=(Rate(1000, DAY),), concurrent=4, wait=0.0
)
FIELDS = ("requests", "requests.1", "tokens")
OWN, NOBODY = Held("t:a", "t:a", FIELDS), Held("t:x", "t:x", ())
SHARED = Held("o:acme", "o:acme", FIELDS)


@contextlib.asynccontextmanager
async def a_store(kind: str) -> AsyncIterator[Store]:
    if kind == "memory":
        yield MemoryStore(time.monotonic)
        return
    with server() as redis:
        part = LimitsPart(store=redis.url, timeout=Seconds(10))
        store = RedisStore(part, workers=1, process="p", clock=time.monotonic)
        async with store.running():
            yield store


async def take(store: Store, **more: Any) -> Lease:
    fields = {"tenant": "a", "plan": PLAN, "tier": "fast", "model": "m", "prompt": 100, "output": 20} | more
    reserved = store.reserve(Ask(**fields))
    return await claim(reserved) if isinstance(reserved, asyncio.Future) else reserved


@pytest.mark.parametrize("kind", ["memory", pytest.param("redis", marks=needs_redis)])
async def test_levels_are_what_reservations_left(kind: str) -> None:
    async with a_store(kind) as store:
        first = await take(store)
        await take(store, tenant="b", organisation="acme", shared=PLAN)
        levels = await store.levels([OWN, NOBODY, SHARED])
        left = pytest.approx({"requests": 9, "requests.1": 49, "tokens": 880, "concurrent": 1}, abs=0.1)
        assert levels[OWN.name] == left
        assert levels[SHARED.name] == left
        assert levels[NOBODY.name].get("concurrent", 0) == 0
        first.settle(30, 10)
        await asyncio.sleep(0.05)
        levels = await store.levels([OWN])
        assert levels[OWN.name] == pytest.approx(
            {"requests": 9, "requests.1": 49, "tokens": 960, "concurrent": 0}, abs=0.1
        )


@needs_redis
async def test_a_server_that_does_not_answer_tells_nothing() -> None:
    with server() as redis:
        part = LimitsPart(store=redis.url, timeout=Seconds(0.05))
        store = RedisStore(part, workers=1, process="p", clock=time.monotonic)
        async with store.running():
            await take(store)
            redis.kill()
            assert await store.levels([OWN]) == {}
