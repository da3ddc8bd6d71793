"""SIGTERM: what runs may end, nothing new begins, and a second one ends at once."""

import asyncio
import signal
from pathlib import Path

import pytest

from tests.support.client import Wire, ask, get
from tests.support.engine import FakeEngine, engines, hang, reply, stream
from tests.support.serving import ServedProcess, process, serving
from tests.support.shapes import CHAT, IDS, SHAPES, Shape, check_error, check_error_event, events

ASKED = CHAT.ask(stream=True, stream_options={"include_usage": True})


async def ready(served: ServedProcess) -> None:
    async with asyncio.timeout(10):
        while (await get(served.admin, "/admin/status")).json["tiers"]["fast"] != "ready":
            await asyncio.sleep(0.01)


async def ended(served: ServedProcess, seconds: float) -> int:
    return await asyncio.to_thread(served.process.wait, seconds)


async def refused(port: int) -> bool:
    """Whether none listens. Connections that wait to be accepted as the listener closes are reset:
    that tells nothing."""
    try:
        await get(port, "/healthz")
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:
        pass
    return False


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_a_draining_gateway_refuses_on_kept_alive_connections(tmp_path: Path, shape: Shape) -> None:
    engine = FakeEngine(reply(shape.reply))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.send(shape.path, shape.ask())
        assert (await wire.reply()).status == 200
        served.gateway.draining = True
        wire.send(shape.path, shape.ask())
        answer = await wire.reply()
        check_error(answer, 503, shape=shape)
        assert answer.headers["connection"] == "close"
        assert await wire.closed()
        assert engine.generations == 1
        for port in (served.port, served.admin):
            state = await get(port, "/readyz")
            assert state.status == 503
            assert state.json["draining"] is True
            assert (await get(port, "/healthz")).status == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_running_stream_completes(tmp_path: Path, number: signal.Signals) -> None:
    engine = FakeEngine(stream(b"data: {}\n\n", CHAT.stream, between=1))
    async with engines(engine):
        with process(tmp_path, {"fast": engine}) as served:
            await ready(served)
            async with await Wire.open(served.port) as wire:
                wire.send(CHAT.path, ASKED)
                await wire.until(b"data: {}\n\n")
                served.process.send_signal(number)
                async with asyncio.timeout(5):
                    while not await refused(served.port):
                        await asyncio.sleep(0.01)
                state = await get(served.admin, "/readyz")
                assert state.status == 503
                assert state.json["draining"] is True
                answer = await wire.reply()
                assert answer.complete
                assert answer.body == b"data: {}\n\n" + CHAT.stream
                assert await wire.closed()
            assert await ended(served, 5) == 0
        assert "Traceback" not in served.log.read_text()


async def test_an_idle_connection_is_told_while_others_end(tmp_path: Path) -> None:
    engine = FakeEngine(stream(b"data: {}\n\n", CHAT.stream, between=1.5))
    async with engines(engine):
        with process(tmp_path, {"fast": engine}) as served:
            await ready(served)
            async with await Wire.open(served.port) as wire, await Wire.open(served.port) as idle:
                idle.send("/v1/models", method="GET")
                assert (await idle.reply()).status == 200
                wire.send(CHAT.path, ASKED)
                await wire.until(b"data: {}\n\n")
                served.process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.8)
                idle.send(CHAT.path, CHAT.ask())
                answer = await idle.reply()
                check_error(answer, 503)
                assert answer.headers["connection"] == "close"
                assert (await wire.reply()).complete
            assert await ended(served, 5) == 0


async def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    engine = FakeEngine(stream(b"data: {}\n\n", end="hang"))
    async with engines(engine):
        with process(tmp_path, {"fast": engine}) as served:
            await ready(served)
            async with await Wire.open(served.port) as wire:
                wire.send(CHAT.path, ASKED)
                await wire.until(b"data: {}\n\n")
                served.process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(5):
                    while not await refused(served.port):
                        await asyncio.sleep(0.01)
                assert served.process.poll() is None
                served.process.send_signal(signal.SIGTERM)
                assert await ended(served, 2) == 130
                assert not (await wire.reply()).complete


async def test_what_outlasts_the_grace_is_told(tmp_path: Path) -> None:
    engine = FakeEngine(hang)
    engine.scripts.append(stream(events(CHAT.stream)[0], end="hang"))
    async with engines(engine):
        with process(tmp_path, {"fast": engine}, shutdown_grace="1s") as served:
            await ready(served)
            async with await Wire.open(served.port) as wire, await Wire.open(served.port) as other:
                wire.send(CHAT.path, ASKED)
                await wire.until(b"\n\n")
                other.send(CHAT.path, CHAT.ask())
                async with asyncio.timeout(5):
                    while engine.generations < 2:
                        await asyncio.sleep(0.01)
                served.process.send_signal(signal.SIGTERM)
                answer = await wire.reply()
                check_error_event(events(answer.body)[-1], CHAT)
                check_error(await other.reply(), 503)
            assert await ended(served, 5) == 0
            assert all(exchange.closed_at is not None for exchange in engine.exchanges)
        assert "Traceback" not in served.log.read_text()


async def test_an_idle_gateway_ends_soon(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine):
        with process(tmp_path, {"fast": engine}) as served:
            await ready(served)
            async with await Wire.open(served.port) as wire:
                wire.send(CHAT.path, CHAT.ask())
                assert (await wire.reply()).status == 200
                served.process.send_signal(signal.SIGTERM)
                assert await ended(served, 5) == 0
                assert await wire.closed()


async def test_a_port_in_use_is_told(tmp_path: Path) -> None:
    async with serving(tmp_path, {"fast": "http://127.0.0.1:9"}, wait=False) as served:
        (tmp_path / "other").mkdir()
        with (
            pytest.raises(AssertionError, match="in use by another process: change `listen`"),
            process(tmp_path / "other", {"fast": "http://127.0.0.1:9"}, port=served.port),
        ):
            pass


async def test_the_process_serves_the_whole_way(tmp_path: Path) -> None:
    engine = FakeEngine(stream(CHAT.stream))
    async with engines(engine):
        with process(tmp_path, {"fast": engine}, keys="keys: [{name: a, key: sk-a}]") as served:
            await ready(served)
            answer = await ask(served.port, CHAT.path, ASKED, headers={"x-api-key": "sk-a"})
            assert answer.body == CHAT.stream
            assert "date" in answer.headers
            assert "server" not in answer.headers
            check_error(await ask(served.port, CHAT.path, ASKED), 401)
        assert "sk-a" not in served.log.read_text()
