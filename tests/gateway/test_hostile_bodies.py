"""Bodies and chunks made to hurt: what they take of memory, of the loop, and of others' places."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from gateway import reading
from gateway.app import running
from gateway.config import Bounds
from gateway.dialects import openai_chat
from gateway.dialects.base import Dialect, Request
from gateway.dialects.body import Body
from gateway.dialects.openai_chat import OpenAIChat
from gateway.errors import InvalidRequest
from gateway.reading import parse
from gateway.relay import http1
from gateway.relay.http1 import LAST_CHUNK
from tests.gateway.test_asgi import Server
from tests.gateway.test_lane import EVENT, begun, chunk
from tests.support.client import Wire, ask, request, until
from tests.support.engine import FakeEngine, engines, hang, reply
from tests.support.serving import make, serving
from tests.support.shapes import CHAT, check_error

ROOM = {"requests": 100, "body": "1MiB", "memory": "1MiB"}
START = b'{"model" : "m", "messages":[{"role":"user","content":"h"}] '


def held() -> int:
    """Bytes of bodies that requests of this process still hold."""
    gc.collect()
    return sum(len(part) for one in gc.get_objects() if isinstance(one, http1.Request) for part in one._parts)


@pytest.mark.parametrize(
    "raw",
    [
        START + b', "x": [' + b"[]," * 500_000 + b"1]}",
        START + b"".join(b',"a%06d":1' % number for number in range(150_000)) + b"}",
    ],
    ids=["lists", "fields"],
)
def test_values_beyond_the_bound_are_not_all_decoded(raw: bytes) -> None:
    """The bound is asked before objects are made of them."""
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match=r"bounds\.nodes"):
            OpenAIChat().parse(Body(raw, 1000), Bounds(nodes=1000))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 6 * len(raw)


async def test_a_refused_body_is_let_go(tmp_path: Path) -> None:
    """Its connection may stay open for long."""
    engine = FakeEngine(reply(CHAT.reply))
    head = b"POST %b HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n" % CHAT.path.encode()
    async with engines(engine), serving(tmp_path, {"fast": engine}, bounds=ROOM) as served:
        wires = [await Wire.open(served.port) for _ in range(4)]
        for wire in wires:
            wire.raw(head + chunk(b"x" * (1 << 20)) + chunk(b"x"))
            assert (await wire.reply()).status == 413
        await until(lambda: served.clean)
        left = held()
        for wire in wires:
            wire.leave()
        assert left < 1 << 20


async def test_what_came_with_a_head_without_a_key_is_let_go(tmp_path: Path) -> None:
    """Nobody who has no key fills the memory."""
    engine = FakeEngine(reply(CHAT.reply))
    keys = "keys: []\n"
    async with engines(engine), serving(tmp_path, {"fast": engine}, keys=keys, bounds=ROOM) as served:
        wires = [await Wire.open(served.port) for _ in range(8)]
        for wire in wires:
            wire.send(CHAT.path, b"x" * 240_000)
            assert (await wire.reply()).status == 401
        left = held()
        for wire in wires:
            wire.leave()
        assert left < 64 << 10


async def test_bodies_whose_clients_left_are_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None waits in the queue of the thread that reads."""
    engine, go = FakeEngine(reply(CHAT.reply)), threading.Event()

    def slow(dialect: Dialect, raw: bytes, bounds: Bounds) -> Request:
        assert go.wait(20)
        return parse(dialect, raw, bounds)

    monkeypatch.setattr(reading, "parse", slow)
    async with engines(engine), serving(tmp_path, {"fast": engine}, bounds=ROOM) as served:
        load, thread = served.gateway.load, served.gateway.reader._thread
        try:
            for _ in range(6):
                async with await Wire.open(served.port) as wire:
                    wire.send(CHAT.path, CHAT.ask(messages=[{"role": "user", "content": "x" * 700_000}]))
                    await until(lambda: load.bytes > 0)
                    await asyncio.sleep(0.05)
                await until(lambda: served.clean)
            assert thread._work_queue.qsize() * 700_000 <= 1 << 20
        finally:
            go.set()


async def test_bodies_that_wait_behind_a_request_count(tmp_path: Path) -> None:
    """Pipelined ones are not counted, so that only small ones may wait."""
    engine = FakeEngine(hang)
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}, bounds=ROOM) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.send(CHAT.path, CHAT.ask())
        await until(lambda: engine.generations == 1)
        for _ in range(5):
            wire.raw(request(CHAT.path, b"x" * 1_000_000))
        # Whoever sends so much is cut off.
        await until(lambda: served.clean)
        assert held() <= 1 << 20


@pytest.mark.parametrize(("reads", "more"), [("read_plain", {}), ("read_messages", {"name": "ci"})])
async def test_what_many_turns_say_is_not_read_on_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: str, more: dict[str, str]
) -> None:
    """What is said is read where the body is."""
    engine, where = FakeEngine(reply(CHAT.reply)), set()
    real = getattr(openai_chat, reads)

    def noting(*args: Any) -> Any:
        where.add(threading.current_thread())
        return real(*args)

    monkeypatch.setattr(openai_chat, reads, noting)
    policy = Path("policies/default.yaml").read_text(encoding="utf-8")
    turns = [{"role": "user", "content": "a b 1 def", **more}] * 20_000
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine, "exact": engine}, policy=policy) as served,
    ):
        assert (await ask(served.port, CHAT.path, CHAT.ask(messages=turns))).status == 200
    assert where
    assert threading.main_thread() not in where


@pytest.mark.parametrize("size", [0, 100_000], ids=["on the loop", "in the thread"])
async def test_a_body_nested_up_to_pythons_limit_is_a_400(tmp_path: Path, size: int) -> None:
    """At each depth around the limit: some of what reads it calls deeper than the rest."""
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        statuses = set()
        for depth in range(900, 1000):
            raw = START + b', "x": %b%b, "y": "%b"}' % (b"[" * depth, b"]" * depth, b"y" * size)
            statuses.add((await ask(served.port, CHAT.path, raw)).status)
        assert statuses == {400}


@pytest.mark.parametrize("path", [CHAT.path, "/v1/responses/resp_1"])
async def test_a_length_with_many_zeros_is_no_fault_of_the_gateway(tmp_path: Path, path: str) -> None:
    """Which `int` refuses to read, and the parser of HTTP does not."""
    engine = FakeEngine(reply(CHAT.reply))
    body = b'{"model":"smollm2","messages":[{"role":"user","content":"hi"}]}'
    length = b"0" * 5000 + b"%d" % len(body)
    method = b"POST" if path == CHAT.path else b"GET"
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        head = b"%b %b HTTP/1.1\r\nhost: h\r\ncontent-length: %b\r\n\r\n" % (method, path.encode(), length)
        wire.raw(head + body)
        assert (await wire.reply()).status < 500


async def test_a_server_that_names_no_length_meets_the_bound_too(tmp_path: Path) -> None:
    """As with HTTP/2."""
    engine = FakeEngine(hang)
    async with engines(engine):
        gateway = make(tmp_path, {"fast": engine}, bounds=ROOM)
        async with running(gateway):
            await until(lambda: gateway.fleet.by_name["fast-0"].ready)
            raw = json.dumps(CHAT.ask(messages=[{"role": "user", "content": "x" * 700_000}])).encode()
            servers = [Server([raw]) for _ in range(4)]
            asking = [asyncio.create_task(server.call(gateway)) for server in servers]
            await until(lambda: engine.generations + sum(bool(s.messages) for s in servers) == 4)
            most = gateway.load.bytes
            for server in servers:
                server.gone.set()
            await asyncio.gather(*asking)
            assert most <= 1 << 20


async def test_a_body_that_never_fits_is_a_413_at_any_load(tmp_path: Path) -> None:
    """To come back would not help."""
    engine = FakeEngine(hang)
    async with engines(engine), serving(tmp_path, {"fast": engine}, bounds=ROOM) as served:
        async with await Wire.open(served.port) as wire, await Wire.open(served.port) as other:
            wire.send(CHAT.path, CHAT.ask(messages=[{"role": "user", "content": "x" * 700_000}]))
            await until(lambda: engine.generations == 1)
            other.raw(b"POST %b HTTP/1.1\r\nhost: h\r\ncontent-length: 9000000\r\n\r\n" % CHAT.path.encode())
            check_error(await other.reply(), 413)
        await until(lambda: served.clean)


@pytest.mark.parametrize("payload", [b"\n", b"\n" + EVENT % b"b"], ids=["a lone LF", "an LF before an event"])
async def test_a_chunks_framing_is_no_part_of_its_events(payload: bytes) -> None:
    """A line feed behind that of the framing makes no blank line."""
    relay = await begun()
    for _ in range(5):
        await relay.feed(chunk(payload))
    passed = relay.asker.tap.tokens
    await relay.feed(LAST_CHUNK)
    await relay.end()

    # The same in two reads, which the parser is given.
    relay = await begun()
    for _ in range(5):
        await relay.feed(chunk(payload)[:1], chunk(payload)[1:])
    parsed = relay.asker.tap.tokens
    await relay.feed(LAST_CHUNK)
    await relay.end()
    assert passed == parsed


async def test_one_tenant_does_not_take_all_room_for_large_bodies(tmp_path: Path) -> None:
    """Heads that announce large bodies and send none, of one key, and a body of another."""
    engine = FakeEngine(reply(CHAT.reply))
    keys = "keys: [{name: a, plan: default, key: sk-a}, {name: b, plan: default, key: sk-b}]"
    bounds = {"body": "1MiB", "memory": "4MiB"}
    head = b"POST %b HTTP/1.1\r\nhost: h\r\nauthorization: Bearer sk-a\r\ncontent-length: 900000\r\n\r\n"
    async with engines(engine), serving(tmp_path, {"fast": engine}, keys=keys, bounds=bounds) as served:
        wires = [await Wire.open(served.port) for _ in range(8)]
        for wire in wires:
            wire.raw(head % CHAT.path.encode())
        await until(lambda: served.gateway.load.bytes == 2 * 900_000)
        body = CHAT.ask(messages=[{"role": "user", "content": "x" * 900_000}])
        answer = await ask(served.port, CHAT.path, body, headers={"authorization": "Bearer sk-b"})
        for wire in wires:
            wire.leave()
        await until(lambda: served.clean)
        assert answer.status == 200


async def test_heads_take_no_places(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}, bounds={"requests": 2}) as served:
        wires = [await Wire.open(served.port) for _ in range(4)]
        for wire in wires:
            wire.raw(b"POST %b HTTP/1.1\r\nhost: h\r\ncontent-length: 9\r\n\r\n" % CHAT.path.encode())
        await until(lambda: served.gateway.load.bytes == 36)
        assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 200
        for wire in wires:
            wire.leave()
        await until(lambda: served.clean)
