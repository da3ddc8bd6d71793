"""The client towards engines alone: its pool, and what it makes of the bytes that come."""

import asyncio
import gc
import weakref
from typing import Any

import pytest

from gateway.relay.upstream import (
    ConnectFailed,
    Connection,
    ConnectTimeout,
    Limits,
    LostEarly,
    LostLate,
    Pool,
    TimedOut,
)
from tests.support.client import until
from tests.support.engine import BlackHole, FakeEngine, engines, hang, reply, reset, stream

LIMITS = Limits(connect=1, first_byte=5, idle=5, total=5)
GET = b"GET /x HTTP/1.1\r\nhost: h\r\n\r\n"


async def acquire(pool: Pool) -> Connection:
    return pool.reuse() or await pool.connect(LIMITS.connect)


async def exchange(pool: Pool, limits: Limits = LIMITS) -> bytes:
    """One whole exchange; the connection is given back whatever happens."""
    connection = await acquire(pool)
    try:
        connection.start(GET, limits)
        body = b""
        while not connection.complete:
            await connection.wait()
            body += connection.take()
            connection.check()
        return body + connection.take()
    finally:
        pool.release(connection)


async def test_a_connection_is_kept_and_used_again() -> None:
    engine = FakeEngine(reply(b"abc"))
    async with engines(engine):
        pool = Pool(engine.url)
        for _ in range(5):
            assert await exchange(pool) == b"abc"
        assert (engine.connections, pool.idle, pool.open, len(pool.lent)) == (1, 1, 1, 0)
        pool.close()
        await until(lambda: not engine.open)


async def test_idle_connections_are_closed_before_the_engine_does() -> None:
    engine = FakeEngine(reply(b"abc"))
    async with engines(engine):
        pool = Pool(engine.url, idle_seconds=0.1)
        await asyncio.gather(*(exchange(pool) for _ in range(5)))
        assert pool.idle == 5
        await until(lambda: pool.idle == 0 and not engine.open)
        assert await exchange(pool) == b"abc"
        pool.close()


async def test_the_youngest_connection_is_used_first() -> None:
    """So that the older ones, which are not needed, run out."""
    engine = FakeEngine(reply(b"abc", delay=0.02))
    async with engines(engine):
        pool = Pool(engine.url, idle_seconds=0.3)
        await asyncio.gather(*(exchange(pool) for _ in range(3)))
        for _ in range(12):
            await exchange(pool)
        await until(lambda: pool.idle == 1)
        assert engine.connections == 3
        pool.close()


async def test_a_connection_that_the_engine_closed_is_forgotten() -> None:
    engine = FakeEngine(reply(b"abc"))
    async with engines(engine):
        pool = Pool(engine.url)
        await exchange(pool)
        engine.close_idle()
        await until(lambda: pool.idle == 0)
        assert pool.reuse() is None
        pool.close()


@pytest.mark.parametrize(
    "script",
    [reply(b"abc", connection="close"), stream(b"abc", end="hang"), reset],
    ids=["close", "unfinished", "reset"],
)
async def test_what_is_not_clean_is_not_kept(script: Any) -> None:
    engine = FakeEngine(script)
    async with engines(engine):
        pool = Pool(engine.url)
        connection = await acquire(pool)
        connection.start(GET, LIMITS)
        await connection.wait()
        pool.release(connection)
        assert (pool.idle, len(pool.lent)) == (0, 0)
        await until(lambda: not engine.open)
        pool.close()


async def test_a_closed_pool_keeps_nothing() -> None:
    engine = FakeEngine(reply(b"abc", delay=0.05))
    async with engines(engine):
        pool = Pool(engine.url)
        running = asyncio.create_task(exchange(pool))
        await until(lambda: engine.generations == 1)
        pool.close()
        assert await running == b"abc"
        assert (pool.idle, pool.open) == (0, 0)
        await until(lambda: not engine.open)


async def test_connecting_to_nobody_fails() -> None:
    pool = Pool("http://127.0.0.1:9")
    with pytest.raises(ConnectFailed, match=r"127\.0\.0\.1:9"):
        await pool.connect(1)
    assert pool.open == 0
    pool.close()


async def test_connecting_takes_no_longer_than_it_may() -> None:
    with BlackHole() as hole:
        pool = Pool(hole.url)
        with pytest.raises(ConnectTimeout, match=r"within 0\.05 s"):
            await pool.connect(0.05)
        assert pool.open == 0
        pool.close()


async def test_cancelling_at_any_moment_leaks_nothing() -> None:
    engine = FakeEngine(stream(b"a" * 100, b"b" * 100, between=0.003))
    async with engines(engine):
        pool = Pool(engine.url)
        for round_ in range(60):
            task = asyncio.create_task(exchange(pool))
            for _ in range(round_ % 12):
                await asyncio.sleep(0)
            if round_ >= 30:
                await asyncio.sleep(round_ % 10 / 2000)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert not pool.lent
        await until(lambda: len(engine.open) == pool.open)
        pool.close()


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (reset, LostEarly),
        (stream(b"abc", end="reset"), LostLate),
        (stream(b"abc", end="close"), LostLate),
        (hang, TimedOut),
        (stream(b"abc", end="hang"), TimedOut),
    ],
    ids=["reset", "reset late", "close late", "no first byte", "idle"],
)
async def test_how_an_exchange_ends_badly(script: Any, error: type[Exception]) -> None:
    engine = FakeEngine(script)
    async with engines(engine):
        pool = Pool(engine.url)
        with pytest.raises(error):
            await exchange(pool, Limits(1, 0.1, 0.1, 5))
        assert pool.open == 0
        pool.close()


async def test_a_reused_connection_that_is_lost_says_so() -> None:
    engine = FakeEngine(reply(b"abc"))
    async with engines(engine):
        pool = Pool(engine.url)
        await exchange(pool)
        engine.script = reset
        with pytest.raises(LostEarly) as caught:
            await exchange(pool)
        assert caught.value.reused
        with pytest.raises(LostEarly) as caught:
            await exchange(pool)
        assert not caught.value.reused
        pool.close()


async def test_bytes_that_nobody_asked_for_end_an_idle_connection() -> None:
    async def chatty(exchange: Any) -> None:
        await reply(b"abc")(exchange)
        await asyncio.sleep(0.02)
        exchange.raw(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")

    engine = FakeEngine(chatty)
    async with engines(engine):
        pool = Pool(engine.url)
        await exchange(pool)
        await until(lambda: pool.idle == 0 and not engine.open)
        pool.close()


async def test_a_lost_connection_is_freed_at_once() -> None:
    """Without the collector, which stops all streams for as long as it looks."""
    engine = FakeEngine(hang)
    async with engines(engine):
        pool = Pool(engine.url)
        connection = await pool.connect(LIMITS.connect)
        freed = weakref.ref(connection)
        gc.disable()
        try:
            pool.release(connection)
            del connection
            await until(lambda: freed() is None)
        finally:
            gc.enable()
        pool.close()
