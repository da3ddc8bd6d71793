"""Many at once, and many that leave: sockets, tasks, pool slots and leases are counted, memory stays flat."""

import asyncio
import os
import random
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway import app
from tests.support.client import Wire, ask, until
from tests.support.engine import FakeEngine, engines, reply
from tests.support.serving import Served, serving
from tests.support.shapes import CHAT, SHAPES, events

STREAMS = 500
CANCELS = 1000
ROUNDS = 3
# An interpreter's arenas come and go by some MiB; a leak of 10 KiB a request would show as 15 MiB and more.
GROWTH_MIB = 12
POLICY = """
version: 1
rules: [{name: all, send: fast, if_unavailable: fail}]
plans: {default: {requests: 1M/s, tokens: 1G/s, concurrent: 2000}}
"""


@pytest.fixture(autouse=True)
def _enough_files() -> Iterator[None]:
    """Each stream takes four descriptors here: both ends of the client's connection, and of the engine's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


@asynccontextmanager
async def counted(served: Served, engine: FakeEngine) -> AsyncIterator[None]:
    """What is done inside leaves nothing behind but connections that idle in the pool."""
    pool = served.gateway.upstreams["fast-0"].pool

    def state() -> tuple[int, int]:
        return files() - 2 * len(engine.open), len(asyncio.all_tasks())

    await until(lambda: len(engine.open) == pool.open)
    before = state()
    yield
    await until(lambda: served.clean)
    await until(lambda: len(engine.open) == pool.open)
    await until(lambda: state() == before)


async def test_500_streams_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "EXTERNAL_IDLE_SECONDS", 60.0)
    everybody = asyncio.Event()
    chunks = events(CHAT.stream)

    async def together(exchange: Any) -> None:
        exchange.head()
        exchange.chunk(chunks[0])
        if engine.generations % STREAMS == 0:
            everybody.set()
        await everybody.wait()
        for chunk in chunks[1:]:
            exchange.chunk(chunk)
            await asyncio.sleep(0)
        exchange.end()

    async def one(port: int) -> None:
        answer = await ask(port, CHAT.path, CHAT.ask(stream=True, stream_options={"include_usage": True}))
        assert answer.complete
        assert answer.body == CHAT.stream

    engine = FakeEngine(together)
    async with engines(engine), serving(tmp_path, {"fast": engine}, policy=POLICY) as served:
        for _ in range(ROUNDS):
            everybody.clear()
            async with counted(served, engine):
                asking = [asyncio.create_task(one(served.port)) for _ in range(STREAMS)]
                await asyncio.wait_for(everybody.wait(), 20)
                assert served.in_flight == served.lent == served.leases == STREAMS
                await asyncio.gather(*asking)
                del asking
        assert engine.generations == ROUNDS * STREAMS
        assert engine.connections <= STREAMS + 1


async def test_1000_clients_leave_at_random_moments(tmp_path: Path) -> None:
    rand = random.Random(20261130)

    async def fitful(exchange: Any) -> None:
        shape = next(s for s in SHAPES if s.path == exchange.received.path)
        await asyncio.sleep(rand.random() * 0.02)
        if not exchange.received.json.get("stream"):
            await reply(shape.reply)(exchange)
            return
        exchange.head()
        for event in events(shape.stream):
            await asyncio.sleep(rand.random() * 0.005)
            exchange.chunk(event)
        exchange.end()

    async def one(port: int) -> None:
        shape = rand.choice(SHAPES)
        wire = await Wire.open(port)
        async with wire:
            wire.send(shape.path, shape.ask(stream=rand.random() < 0.7))
            await asyncio.sleep(rand.random() * 0.05)
            (wire.leave if rand.random() < 0.5 else wire.reset)()

    async def storm(port: int, at_once: int = 50) -> None:
        for _ in range(CANCELS // at_once):
            await asyncio.gather(*(one(port) for _ in range(at_once)))

    engine = FakeEngine(fitful)
    async with engines(engine), serving(tmp_path, {"fast": engine}, policy=POLICY) as served:
        async with counted(served, engine):
            await storm(served.port)
        engine.exchanges.clear()
        engine.closed.clear()
        warm = resident_mib()
        async with counted(served, engine):
            await storm(served.port)
        assert resident_mib() - warm < GROWTH_MIB
        assert served.engine("fast-0").state == "ready"
        outcomes = served.metrics().decode()
        assert 'outcome="cancelled"' in outcomes
        assert 'outcome="internal_error"' not in outcomes
        assert 'outcome="engine_error"' not in outcomes
        engine.script = reply(CHAT.reply)
        assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 200


async def test_an_engine_that_dies_under_load_takes_nothing_with_it(tmp_path: Path) -> None:
    async def endless(exchange: Any) -> None:
        exchange.head()
        while True:
            exchange.chunk(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
            await asyncio.sleep(0.2)

    engine = FakeEngine(endless)
    async with engines(engine), serving(tmp_path, {"fast": engine}, policy=POLICY) as served:
        async with counted(served, engine):
            asking = [
                asyncio.create_task(ask(served.port, CHAT.path, CHAT.ask(stream=True))) for _ in range(200)
            ]
            await until(lambda: engine.generations == 200, 20)
            await engine.stop()
            for answer in await asyncio.gather(*asking):
                # Either the reply had begun, and says that it broke, or it was refused.
                assert answer.complete
                assert answer.status in (200, 502, 503)
                assert b'"error"' in answer.body
            del asking
            await engine.start()
        served.mark("fast-0", "ready")
        engine.script = reply(CHAT.reply)
        assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 200
