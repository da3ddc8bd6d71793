"""The public port's HTTP/1.1: framing, pipelining, limits, and what is not HTTP."""

import asyncio
import contextlib
import json
import re
from pathlib import Path

import pytest

from gateway import listeners
from tests.support.client import Wire, request, until
from tests.support.engine import FakeEngine, engines, hang, reply, stream
from tests.support.serving import serving
from tests.support.shapes import CHAT, check_openai

NOBODY = {"fast": "http://127.0.0.1:9"}
BODY = json.dumps(CHAT.ask()).encode()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


async def test_a_request_may_come_byte_by_byte(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        for byte in request(CHAT.path, CHAT.ask()):
            wire.raw(bytes([byte]))
            await asyncio.sleep(0)
        assert (await wire.reply()).body == CHAT.reply
        assert engine.last.body == BODY


async def test_chunks_with_extensions_and_trailers(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.raw(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        wire.raw(b"5;a=b\r\n%b\r\n%x\r\n%b\r\n0\r\nx: y\r\n\r\n" % (BODY[:5], len(BODY) - 5, BODY[5:]))
        assert (await wire.reply()).body == CHAT.reply
        assert engine.last.body == BODY
        wire.send(CHAT.path, CHAT.ask())
        assert (await wire.reply()).status == 200


async def test_a_client_that_expects_100_is_told_to_go_on(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.raw(HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY))
        assert await wire.some() == b"HTTP/1.1 100 Continue\r\n\r\n"
        wire.raw(BODY)
        assert (await wire.reply()).status == 200


@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "json"])
async def test_a_reply_to_http_1_0_ends_with_its_connection(tmp_path: Path, streamed: bool) -> None:
    engine = FakeEngine(stream(CHAT.stream) if streamed else reply(CHAT.reply))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        body = CHAT.ask(stream=streamed, stream_options={"include_usage": True})
        wire.raw(request(CHAT.path, body).replace(b"HTTP/1.1", b"HTTP/1.0"))
        raw = b""
        while data := await wire.some():
            raw += data
        head, _, sent = raw.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert sent == (CHAT.stream if streamed else CHAT.reply)


async def test_connection_close_is_obeyed(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.send(CHAT.path, CHAT.ask(), headers={"connection": "close"})
        answer = await wire.reply()
        assert answer.headers["connection"] == "close"
        assert await wire.closed()


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://other/healthz", 200),
        (b"/healthz?a=b&c", 200),
        (b"/%68ealthz", 200),
        (b"/healthz#x", 404),
        (b"/healthz/", 404),
        (b"/HEALTHZ", 404),
        (b"/\xe9", 404),
        (b"/%ff%00", 404),
    ],
    ids=str,
)
async def test_targets(tmp_path: Path, target: bytes, status: int) -> None:
    async with serving(tmp_path, NOBODY, wait=False) as served, await Wire.open(served.port) as wire:
        wire.raw(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % target)
        answer = await wire.reply()
        assert answer.status in (status, 400)
        assert answer.status == status or status == 404


async def test_head_has_no_body(tmp_path: Path) -> None:
    async with serving(tmp_path, NOBODY, wait=False) as served, await Wire.open(served.port) as wire:
        wire.raw(b"HEAD /healthz HTTP/1.1\r\nhost: x\r\n\r\nGET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        raw = b""
        while raw.count(b"HTTP/1.1 ") < 2 or not raw.endswith(b"}"):
            raw += await wire.some()
        first, second = raw.split(b"HTTP/1.1 ")[1:]
        assert first.startswith(b"405")
        assert first.endswith(b"\r\n\r\n")
        assert second.startswith(b"200")


@pytest.mark.parametrize(
    "raw",
    [
        b"\r\n\r\nhello\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /healthz HTTP/3.0\r\n\r\n",
        b"NOPE /healthz HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost : x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: x\x00y\r\n\r\n",
        HEAD + b"content-length: x\r\n\r\n",
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n",
        HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: gzip\r\n\r\n0\r\n\r\n",
    ],
    ids=lambda raw: str(raw.removeprefix(HEAD)[:40]),
)
async def test_what_is_not_http_is_refused_and_closed(tmp_path: Path, raw: bytes) -> None:
    engine = FakeEngine()
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.raw(raw)
        answer = await wire.reply()
        assert answer.status == 400
        check_openai(answer.json["error"])
        assert await wire.closed()
        assert engine.generations == 0
        await until(lambda: served.clean)


async def test_a_head_of_64_kib_is_the_most(tmp_path: Path) -> None:
    async with serving(tmp_path, NOBODY, wait=False) as served:
        async with await Wire.open(served.port) as wire:
            wire.raw(b"GET /healthz HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 60_000 + b"\r\n\r\n")
            assert (await wire.reply()).status == 200
        for large in (b"x: " + b"y" * 70_000, b"a: b\r\n" * 20_000):
            async with await Wire.open(served.port) as wire:
                wire.raw(b"GET /healthz HTTP/1.1\r\nhost: x\r\n" + large + b"\r\n\r\n")
                answer = await wire.reply()
                assert answer.status == 431
                check_openai(answer.json["error"])
                assert re.fullmatch("req_[0-9a-f]{32}", answer.headers["x-request-id"])
                assert await wire.closed()


@pytest.mark.parametrize("offered", ["websocket", "h2c"])
async def test_an_upgrade_is_not_taken(tmp_path: Path, offered: str) -> None:
    async with serving(tmp_path, NOBODY, wait=False) as served, await Wire.open(served.port) as wire:
        headers = {"connection": "upgrade", "upgrade": offered}
        wire.send("/healthz", method="GET", headers=headers)
        assert (await wire.reply()).status == 200


async def test_a_reply_to_a_body_that_was_not_read_is_followed_by_the_next(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        for path, status in (("/v1/nope", 404), ("/healthz", 405), (CHAT.path, 200)):
            wire.send(path, {**CHAT.ask(), "padding": "x" * 300_000})
            assert (await wire.reply()).status == status


async def test_a_client_that_pipelines_and_leaves_frees_the_engine(tmp_path: Path) -> None:
    engine = FakeEngine(hang)
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        for _ in range(3):
            wire.send(CHAT.path, CHAT.ask())
        await until(lambda: engine.generations == 1)
        await asyncio.sleep(0.02)
        left = wire.leave()
        await until(lambda: served.clean and engine.exchanges[0].closed_at is not None)
        assert (engine.exchanges[0].closed_at or 0) - left < 0.25
        await asyncio.sleep(0.02)
        assert engine.generations == 1


async def test_many_pipelined_requests_end_the_connection(tmp_path: Path) -> None:
    engine = FakeEngine(hang)
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        for _ in range(100):
            wire.send(CHAT.path, CHAT.ask())
        assert await wire.closed()
        await until(lambda: served.clean)
        assert engine.generations <= 1


async def test_a_body_behind_a_running_request_is_not_hoarded(tmp_path: Path) -> None:
    engine = FakeEngine(hang)
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.send(CHAT.path, CHAT.ask())
        await until(lambda: engine.generations == 1)
        wire.raw(HEAD + b"transfer-encoding: chunked\r\n\r\n100000000\r\n" + b"x" * (8 << 20))
        assert await wire.closed()
        await until(lambda: served.clean)
        assert engine.generations == 1


async def test_an_idle_connection_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "KEEP_ALIVE_SECONDS", 0.15)
    engine = FakeEngine(reply(CHAT.reply, delay=0.4))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.send(CHAT.path, CHAT.ask())
        assert (await wire.reply()).status == 200
        assert await wire.closed()


@pytest.mark.parametrize(
    "raw",
    [b"", b"GET /healthz HTT", HEAD + b"content-length: 1000\r\n\r\n{"],
    ids=["nothing", "head", "body"],
)
async def test_a_request_that_does_not_come_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: bytes
) -> None:
    monkeypatch.setattr(listeners, "KEEP_ALIVE_SECONDS", 0.15)
    async with serving(tmp_path, NOBODY, wait=False) as served, await Wire.open(served.port) as wire:
        wire.raw(raw)
        while await wire.some():
            pass
        await until(lambda: served.clean)


@pytest.mark.parametrize(
    ("start", "drop"),
    [
        (b"GET /healthz HTTP/1.1\r\n", b"x: y\r\n"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nc00000\r\n" + b"x" * (11 << 20), b"x"),
    ],
    ids=["head", "behind an answer"],
)
async def test_drops_keep_no_connection_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: bytes, drop: bytes
) -> None:
    monkeypatch.setattr(listeners, "KEEP_ALIVE_SECONDS", 0.2)
    async with serving(tmp_path, NOBODY, wait=False) as served, await Wire.open(served.port) as wire:
        wire.raw(start)
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(5):
                # Each drop would keep the connection for another 0.2 s.
                while not await wire.closes(0.05):
                    wire.raw(drop)
        await until(lambda: served.clean)


async def test_a_slow_upload_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "KEEP_ALIVE_SECONDS", 0.2)
    engine = FakeEngine(reply(CHAT.reply))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.raw(HEAD + b"content-length: %d\r\n\r\n" % len(BODY))
        for start in range(0, len(BODY), 15):
            wire.raw(BODY[start : start + 15])
            await asyncio.sleep(0.08)
        assert (await wire.reply()).status == 200
