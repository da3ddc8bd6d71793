"""Gateways behind HAProxy that are replaced while they serve, with the file shipped for containers."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import subprocess
from pathlib import Path
from typing import Self

import pytest

from gateway.server import OPEN_FILES
from tests.support.client import Reply, Wire, ask, get, until
from tests.support.engine import FakeEngine, engines, hang, stream
from tests.support.haproxy import FILE, haproxy, needs_haproxy
from tests.support.serving import ServedProcess, free_port, process
from tests.support.shapes import CHAT, events

STREAMS = 100
ASK = CHAT.ask(stream=True, stream_options={"include_usage": True})


@needs_haproxy
def test_haproxy_accepts_its_file() -> None:
    done = subprocess.run(["haproxy", "-c", "-f", str(FILE)], capture_output=True, text=True, check=False)
    assert (done.returncode, "WARNING" in done.stderr) == (0, False), done.stderr


@needs_haproxy
@pytest.mark.parametrize("limits", ["1024:1024", "256:4096"])
async def test_haproxy_takes_as_many_connections_as_it_may_open_files(tmp_path: Path, limits: str) -> None:
    with haproxy(tmp_path, [], limits) as front:
        await answering(front.health)
        at_most = int(limits.partition(":")[2]) // 2
        assert at_most - 50 < front.info("Maxconn") < at_most
    assert "ALERT" not in (tmp_path / "haproxy.log").read_text()


def test_haproxy_keeps_memory_for_no_more_files_than_a_gateway_opens() -> None:
    assert re.findall(r"(?m)^ *fd-hard-limit +(\d+)", FILE.read_text()) == [str(OPEN_FILES)]


class Gateways:
    """Gateways on ports that HAProxy knows from its start, whether one runs there or not."""

    def __init__(self, folder: Path, engine: FakeEngine, ports: list[int]) -> None:
        self._folder = folder
        self._engine = engine
        self._ports = ports
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    async def start(self, index: int) -> ServedProcess:
        folder = self._folder / str(index)
        folder.mkdir()
        often = {"every": "200ms"}
        made = process(folder, {"fast": self._engine}, port=self._ports[index], health=often)
        one = await asyncio.to_thread(self._stack.enter_context, made)
        ready = False
        while not ready:
            ready = (await get(one.port, "/readyz")).json["tiers"]["fast"] == "ready"
        return one


async def answering(port: int) -> None:
    while True:
        with contextlib.suppress(ConnectionError):
            await get(port, "/healthz")
            return
        await asyncio.sleep(0.05)


async def healthy(port: int) -> None:
    while True:
        with contextlib.suppress(ConnectionError):
            if (await get(port, "/healthz")).status == 200:
                return
        await asyncio.sleep(0.05)


async def keep_asking(port: int, found: list[Reply], stop: asyncio.Event) -> None:
    while not stop.is_set():
        found.append(await ask(port, CHAT.path, ASK))


@needs_haproxy
async def test_a_rolling_restart_cuts_no_stream_and_refuses_no_request(tmp_path: Path) -> None:
    parts = events(CHAT.stream)
    pace = 8.0 / len(parts)
    slow, fast = stream(*parts, between=pace), stream(*parts, between=0.01)
    engine = FakeEngine(fast)
    engine.scripts.extend([slow] * STREAMS)
    ports = [free_port() for _ in range(4)]
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(engines(engine))
        gateways = stack.enter_context(Gateways(tmp_path, engine, ports))
        old = [await gateways.start(index) for index in (0, 1)]
        front = stack.enter_context(haproxy(tmp_path, [(one, one) for one in ports]))
        await healthy(front.health)
        await until(lambda: front.up() == ["gateway-0", "gateway-1"])  # all count as up before they are asked
        wires = [await stack.enter_async_context(await Wire.open(front.listen)) for _ in range(STREAMS)]
        for wire in wires:
            wire.send(CHAT.path, ASK)
        await asyncio.gather(*(wire.head() for wire in wires))
        asked: list[Reply] = []
        stop = asyncio.Event()
        asking = [asyncio.create_task(keep_asking(front.listen, asked, stop)) for _ in range(4)]
        for index in (2, 3):
            await gateways.start(index)
        await until(lambda: len(front.up()) == 4)
        before = len(asked)
        for index, _ in enumerate(old):
            assert front.order(f"set server gateways/gateway-{index} state drain").strip() == ""
        await asyncio.sleep(1)
        for one in old:
            one.process.send_signal(signal.SIGTERM)
        replies = await asyncio.gather(*(wire.reply() for wire in wires))
        await until(lambda: all(one.process.poll() is not None for one in old), 20)
        stop.set()
        await asyncio.gather(*asking)
    assert [reply for reply in replies if not (reply.complete and reply.body == CHAT.stream)] == []
    assert [reply for reply in asked if not (reply.complete and reply.body == CHAT.stream)] == []
    assert len(asked) > before
    assert [one.process.returncode for one in old] == [0, 0]


@needs_haproxy
async def test_requests_pass_by_gateways_that_do_not_listen_yet(tmp_path: Path) -> None:
    """HAProxy takes one that it found in the DNS for one that serves, until its first check has failed."""
    engine = FakeEngine(stream(*events(CHAT.stream)))
    ports = [free_port() for _ in range(16)]
    async with engines(engine):
        with Gateways(tmp_path, engine, ports) as gateways:
            for index in (8, 9):
                await gateways.start(index)
            with haproxy(tmp_path, [(one, one) for one in ports]) as front:
                await healthy(front.health)
                await until(lambda: front.up() == ["gateway-8", "gateway-9"])
                for index in range(8):
                    front.order(f"set server gateways/gateway-{index} health up")
                replies = await asyncio.gather(*(ask(front.listen, CHAT.path, ASK) for _ in range(8)))
    assert [reply.status for reply in replies] == [200] * 8


@needs_haproxy
async def test_a_client_that_leaves_is_seen_behind_it(tmp_path: Path) -> None:
    engine = FakeEngine(hang)
    ports = [free_port()]
    async with engines(engine):
        with Gateways(tmp_path, engine, ports) as gateways:
            await gateways.start(0)
            with haproxy(tmp_path, [(ports[0], ports[0])]) as front:
                await healthy(front.health)
                wire = await Wire.open(front.listen)
                wire.send(CHAT.path, ASK)
                await until(lambda: engine.generations == 1)
                wire.leave()
                await until(lambda: engine.exchanges[0].closed_at is not None)
