"""The public application under a server other than ours: plain ASGI, one `receive` and one `send`."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gateway.app import Public, running
from gateway.runtime import Gateway
from tests.support.client import until
from tests.support.engine import FakeEngine, engines, hang, reply, stream
from tests.support.serving import make
from tests.support.shapes import CHAT, IDS, SHAPES, Shape, check_error_event, events


@dataclass
class Server:
    """What an ASGI server keeps of one request; `gone` is set by a client that leaves."""

    body: list[bytes]
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    messages: list[Any] = field(default_factory=list)

    async def receive(self) -> dict[str, Any]:
        if self.body:
            part = self.body.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self.body)}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.messages.append(message)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.messages[0]["headers"])

    @property
    def sent(self) -> bytes:
        return b"".join(message["body"] for message in self.messages[1:])

    @property
    def complete(self) -> bool:
        return bool(self.messages) and not self.messages[-1].get("more_body", True)

    async def call(self, gateway: Gateway, path: str = CHAT.path, method: str = "POST") -> None:
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        await Public(gateway)(scope, self.receive, self.send)


@asynccontextmanager
async def made(folder: Path, engine: FakeEngine, **settings: Any) -> AsyncIterator[Gateway]:
    async with engines(engine):
        gateway = make(folder, {"fast": engine}, **settings)
        async with running(gateway):
            await until(lambda: gateway.fleet.engines[0].ready)
            yield gateway


def body(shape: Shape = CHAT, **fields: Any) -> bytes:
    return json.dumps(shape.ask(**fields)).encode()


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_a_whole_reply(tmp_path: Path, shape: Shape) -> None:
    async with made(tmp_path, FakeEngine(reply(shape.reply))) as gateway:
        raw = body(shape)
        server = Server([raw[:10], raw[10:20], raw[20:]])
        await server.call(gateway, shape.path)
        assert server.status == 200
        assert server.headers[b"content-length"] == str(len(shape.reply)).encode()
        assert server.headers[b"x-dualgauge-tier"] == b"fast"
        assert server.sent == shape.reply
        assert server.complete


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_a_stream(tmp_path: Path, shape: Shape) -> None:
    async with made(tmp_path, FakeEngine(stream(*events(shape.stream)))) as gateway:
        usage = {"stream_options": {"include_usage": True}} if shape.mark == b"data: " else {}
        server = Server([body(shape, stream=True, **usage)])
        await server.call(gateway, shape.path)
        assert server.status == 200
        assert server.sent == shape.stream
        assert server.complete


async def test_a_stream_that_breaks(tmp_path: Path) -> None:
    first = events(CHAT.stream)[0]
    async with made(tmp_path, FakeEngine(stream(first, end="reset"))) as gateway:
        server = Server([body(stream=True)])
        await server.call(gateway)
        assert server.sent.startswith(first)
        check_error_event(server.sent[len(first) :], CHAT)
        assert server.complete


async def test_a_large_reply_that_is_cut_is_left_incomplete(tmp_path: Path) -> None:
    async def cut(exchange: Any) -> None:
        exchange.head(200, "application/json", content_length=str(20 << 20))
        exchange.raw(b'{"text": "' + b"x" * (10 << 20))
        await asyncio.sleep(0.1)
        exchange.close()

    async with made(tmp_path, FakeEngine(cut)) as gateway:
        server = Server([body()])
        await server.call(gateway)
        assert server.status == 200
        assert not server.complete


@pytest.mark.parametrize("script", [hang, stream(b"data: {}\n\n", end="hang")], ids=["before", "inside"])
async def test_a_client_that_leaves(tmp_path: Path, script: Any) -> None:
    engine = FakeEngine(script)
    async with made(tmp_path, engine) as gateway:
        server = Server([body(stream=True)])
        calling = asyncio.create_task(server.call(gateway))
        await until(lambda: engine.generations == 1)
        await asyncio.sleep(0.02)
        server.gone.set()
        await asyncio.wait_for(calling, 0.25)
        await until(lambda: engine.exchanges[0].closed_at is not None)
        assert not server.complete
        assert gateway.store.in_use() == 0
        assert gateway.fleet.engines[0].in_flight == 0


async def test_a_client_that_leaves_inside_its_body(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with made(tmp_path, engine) as gateway:
        server = Server([b'{"model":'])
        server.gone.set()

        async def receive() -> dict[str, Any]:
            return {**await server.receive(), "more_body": True}

        scope = {"type": "http", "method": "POST", "path": CHAT.path, "headers": []}
        await Public(gateway)(scope, receive, server.send)
        assert server.messages == []
        assert engine.generations == 0


async def test_errors_and_what_needs_no_engine(tmp_path: Path) -> None:
    async with made(tmp_path, FakeEngine(), bounds={"body": 1000}) as gateway:
        server = Server([b"x" * 600, b"x" * 600])
        await server.call(gateway)
        assert server.status == 413
        for path, status in (("/healthz", 200), ("/v1/models", 200), ("/readyz", 503), ("/nope", 404)):
            server = Server([b""])
            await server.call(gateway, path, "GET")
            assert server.status == status
            assert server.complete


async def test_other_scopes_are_left_alone(tmp_path: Path) -> None:
    async with made(tmp_path, FakeEngine()) as gateway:
        server = Server([])
        await Public(gateway)({"type": "websocket"}, server.receive, server.send)
        assert server.messages == []
