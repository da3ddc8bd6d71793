"""A client that leaves, in every phase and dialect: the engine is told at once, nothing stays behind."""

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.trace import StatusCode

from policies.signals.tokens import estimate_prompt
from tests.support.client import Wire, ask, until
from tests.support.engine import BlackHole, FakeEngine, Script, engines, hang, reply, stream
from tests.support.serving import Served, serving
from tests.support.shapes import CHAT, IDS, SHAPES, Shape, events
from tests.support.spans import Recorder

TOLD_WITHIN = 0.25
PROMPT = estimate_prompt([message["content"] for message in CHAT.body["messages"]])
POLICY = """
version: 1
rules: [{name: all, send: fast, if_unavailable: {wait: 20s}}]
plans: {default: {tokens: 100k/day, requests: 1k/day, concurrent: 1}}
"""


@pytest.fixture(autouse=True)
def _no_errors_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []


def partial_json(shape: Shape) -> Script:
    async def script(exchange: Any) -> None:
        exchange.head(200, "application/json", content_length=str(len(shape.reply)))
        exchange.raw(shape.reply[:50])
        await hang(exchange)

    return script


async def only_head(exchange: Any) -> None:
    exchange.head()
    await hang(exchange)


async def json_head(exchange: Any) -> None:
    exchange.head(200, "application/json", content_length="100")
    await hang(exchange)


def script_for(phase: str, shape: Shape, streamed: bool) -> Script:
    if phase == "first token":
        return only_head if streamed else json_head
    if phase == "mid-reply":
        return stream(*events(shape.stream)[:2], end="hang") if streamed else partial_json(shape)
    return hang


async def gone_from(served: Served, engine: FakeEngine, left: float) -> None:
    """The engine's socket is closed in time, and nothing of the request is left in the gateway."""
    await until(lambda: served.clean, TOLD_WITHIN)
    exchange = engine.exchanges[-1]
    await until(lambda: exchange.closed_at is not None, TOLD_WITHIN)
    assert exchange.closed_at is not None
    assert exchange.closed_at - left < TOLD_WITHIN


def check_record(served: Served, recorder: Recorder, shape: Shape) -> None:
    server = recorder.server()
    assert server.status.status_code is not StatusCode.ERROR
    assert all(span.status.status_code is not StatusCode.ERROR for span in recorder.spans())
    dialect = shape.dialect.name
    metrics = served.metrics().decode()
    counted = [line for line in metrics.splitlines() if line.startswith("dualgauge_requests_total")]
    assert len(counted) == 1
    assert f'dialect="{dialect}"' in counted[0]
    assert 'outcome="cancelled"' in counted[0]
    assert counted[0].endswith(" 1.0")


def tokens_left(served: Served) -> float:
    return served.gateway.store.usage()["anonymous"]["tokens"]


@pytest.mark.parametrize("phase", ["head", "first token", "mid-reply"])
@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "json"])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_the_engine_is_told(tmp_path: Path, shape: Shape, streamed: bool, phase: str) -> None:
    recorder = Recorder.make()
    engine = FakeEngine(script_for(phase, shape, streamed))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}, policy=POLICY, tracer=recorder.tracer) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.send(shape.path, shape.ask(stream=streamed))
        await until(lambda: engine.generations == 1)
        if phase == "mid-reply" and streamed:
            await wire.until(shape.mark, 2)
        else:
            await asyncio.sleep(0.02)
        assert served.in_flight == served.lent == served.leases == 1
        await gone_from(served, engine, wire.leave())
        check_record(served, recorder, shape)
        assert engine.generations == 1
        assert tokens_left(served) > 100_000 - 80


@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "json"])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_nothing_is_asked_after_a_wait_for_the_tier(
    tmp_path: Path, shape: Shape, streamed: bool
) -> None:
    recorder = Recorder.make()
    engine = FakeEngine()
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}, policy=POLICY, tracer=recorder.tracer) as served,
        await Wire.open(served.port) as wire,
    ):
        served.mark("fast-0", "down")
        wire.send(shape.path, shape.ask(stream=streamed))
        await until(lambda: served.leases == 1)
        await asyncio.sleep(0.02)
        wire.leave()
        await until(lambda: served.clean, TOLD_WITHIN)
        check_record(served, recorder, shape)
        assert tokens_left(served) == 100_000
        served.mark("fast-0", "ready")
        await asyncio.sleep(0.02)
        assert engine.generations == 0


@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "json"])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_a_connection_under_way_is_given_up(tmp_path: Path, shape: Shape, streamed: bool) -> None:
    recorder = Recorder.make()
    with BlackHole() as hole:
        async with (
            serving(
                tmp_path, {"fast": hole.url}, policy=POLICY, tracer=recorder.tracer, wait=False
            ) as served,
            await Wire.open(served.port) as wire,
        ):
            served.mark("fast-0", "ready")
            wire.send(shape.path, shape.ask(stream=streamed))
            await until(lambda: served.in_flight == 1)
            await asyncio.sleep(0.02)
            assert served.in_flight == 1
            wire.leave()
            await until(lambda: served.clean, TOLD_WITHIN)
            check_record(served, recorder, shape)
            assert tokens_left(served) == 100_000


async def test_c06_a_client_leaves_a_slow_json_reply(tmp_path: Path) -> None:
    recorder = Recorder.make()
    engine = FakeEngine(reply(CHAT.reply, delay=30))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}, policy=POLICY, tracer=recorder.tracer) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.send(CHAT.path, CHAT.ask(max_tokens=5000))
        await asyncio.sleep(1)
        await gone_from(served, engine, wire.leave())
        usage = served.gateway.store.usage()["anonymous"]
        assert usage["concurrent"] == 0
        assert usage["tokens"] >= 100_000 - PROMPT
        assert recorder.server().status.status_code is not StatusCode.ERROR
        assert recorder.client().status.status_code is not StatusCode.ERROR
        engine.script = reply(CHAT.reply)
        assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 200


async def test_c07_a_client_leaves_a_stream_before_its_first_byte(tmp_path: Path) -> None:
    recorder = Recorder.make()
    engine = FakeEngine(hang)
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}, policy=POLICY, tracer=recorder.tracer) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.send(CHAT.path, CHAT.ask(stream=True, max_tokens=5000))
        await until(lambda: engine.generations == 1)
        await gone_from(served, engine, wire.leave())
        usage = served.gateway.store.usage()["anonymous"]
        assert usage["concurrent"] == 0
        assert usage["tokens"] >= 100_000 - PROMPT
        assert recorder.server().status.status_code is not StatusCode.ERROR
        assert recorder.client().status.status_code is not StatusCode.ERROR


@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "json"])
async def test_a_client_that_dies(tmp_path: Path, streamed: bool) -> None:
    engine = FakeEngine(script_for("mid-reply", CHAT, streamed))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.send(CHAT.path, CHAT.ask(stream=streamed))
        await until(lambda: engine.generations == 1)
        await gone_from(served, engine, wire.reset())


async def test_a_client_that_leaves_while_it_sends_its_body(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.send(CHAT.path, b'{"model":', headers={"content-length": "1000"})
        await asyncio.sleep(0.05)
        wire.leave()
        await until(lambda: b'outcome="cancelled"' in served.metrics())
        assert engine.generations == 0


async def test_a_client_that_leaves_without_reading_a_stream(tmp_path: Path) -> None:
    """Its socket is full, and the gateway waits for room in it."""

    async def pour(exchange: Any) -> None:
        exchange.head()
        while True:
            exchange.chunk(b'data: {"x": "%b"}\n\n' % (b"y" * 60_000))
            await exchange.drain()
            await asyncio.sleep(0)

    engine = FakeEngine(pour)
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.pause()
        wire.send(CHAT.path, CHAT.ask(stream=True))
        await until(lambda: engine.generations == 1)
        await asyncio.sleep(0.3)
        await gone_from(served, engine, wire.reset())


async def test_a_client_that_leaves_a_stored_reply(tmp_path: Path) -> None:
    engine = FakeEngine(hang)
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.send("/v1/responses/resp_1", method="GET")
        await until(lambda: engine.generations == 1)
        await gone_from(served, engine, wire.leave())


async def test_a_client_that_pipelines_and_leaves(tmp_path: Path) -> None:
    """Its second request waits behind the first, which is the one that an engine works for."""
    engine = FakeEngine(stream(*[b'data: {"x": "%b"}\n\n' % (b"y" * 1000)] * 10_000, between=0.005))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.send(CHAT.path, CHAT.ask(stream=True))
        wire.send(CHAT.path, CHAT.ask(stream=True))
        await until(lambda: engine.generations == 1)
        await gone_from(served, engine, wire.reset())
        assert engine.generations == 1


async def test_the_others_on_an_engine_go_on(tmp_path: Path) -> None:
    engine = FakeEngine(stream(*events(CHAT.stream), first=0.05, between=0.05))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        contextlib.AsyncExitStack() as stack,
    ):
        wires = [await stack.enter_async_context(await Wire.open(served.port)) for _ in range(4)]
        for wire in wires:
            wire.send(CHAT.path, CHAT.ask(stream=True, stream_options={"include_usage": True}))
        await until(lambda: engine.generations == 4)
        wires[0].leave()
        wires[1].reset()
        for wire in wires[2:]:
            answer = await wire.reply()
            assert answer.complete
            assert answer.body == CHAT.stream
        await until(lambda: served.clean)
