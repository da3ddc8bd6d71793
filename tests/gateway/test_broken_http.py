"""Clients and engines that speak HTTP in odd ways: answered, bounded, and never a traceback."""

import contextlib
import json
import logging
from pathlib import Path

import pytest

from tests.support.client import Wire, ask, get, request
from tests.support.engine import Exchange, FakeEngine, close, engines, reply, stream
from tests.support.serving import serving
from tests.support.shapes import CHAT, check_openai

NOBODY = {"fast": "http://127.0.0.1:9"}
BODY = json.dumps(CHAT.ask()).encode()
UPGRADE = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQ"}
CHUNKED = b"POST %b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n" % CHAT.path.encode()


@pytest.mark.parametrize("pieces", [1, 2, 400])
async def test_a_wish_to_upgrade_is_ignored_and_the_body_read(tmp_path: Path, pieces: int) -> None:
    # Java's HttpClient asks so in every first request.
    engine = FakeEngine(reply(CHAT.reply))
    data = request(CHAT.path, CHAT.ask(), headers=UPGRADE)
    size = -(-len(data) // pieces)
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        for start in range(0, len(data), size):
            wire.raw(data[start : start + size])
        assert (await wire.reply()).body == CHAT.reply
        assert engine.last.body == BODY
        wire.send(CHAT.path, CHAT.ask())
        assert (await wire.reply()).status == 200


async def test_many_wishes_to_upgrade_in_one_write(tmp_path: Path) -> None:
    async with serving(tmp_path, NOBODY, wait=False) as served, await Wire.open(served.port) as wire:
        wire.raw(request("/healthz", method="GET", headers=UPGRADE) * 8)
        raw = b""
        while raw.count(b'{"status":"ok"}') < 8:
            more = await wire.some()
            assert more
            raw += more


async def test_connect_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, NOBODY, wait=False) as served, await Wire.open(served.port) as wire:
        wire.raw(b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = await wire.reply()
        assert answer.status == 405
        check_openai(answer.json["error"])
        assert await wire.closed()


@pytest.mark.parametrize("coding", [b"gzip", b"gzip, chunked", b"identity", b"CHUNKED;q=1"])
async def test_a_transfer_coding_that_is_not_known_is_not_implemented(tmp_path: Path, coding: bytes) -> None:
    async with serving(tmp_path, NOBODY, wait=False) as served, await Wire.open(served.port) as wire:
        head = b"POST %b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: %b\r\n\r\n0\r\n\r\n"
        wire.raw(head % (CHAT.path.encode(), coding))
        answer = await wire.reply()
        assert answer.status == 501
        check_openai(answer.json["error"])
        assert await wire.closed()


@pytest.mark.parametrize(
    "start",
    [
        b"GET /healthz HTTP/1.1\r\nx: ",
        CHUNKED + b"\r\n5;",
        CHUNKED + b"\r\n1\r\n{\r\n0\r\nx: ",
    ],
    ids=["header", "extension", "trailer"],
)
async def test_a_line_that_does_not_end_is_bounded(tmp_path: Path, start: bytes) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        async with await Wire.open(served.port) as wire:
            wire.raw(start)
            for _ in range(64):
                wire.raw(b"a" * 16384)
            raw = b""
            with contextlib.suppress(ConnectionResetError):
                while data := await wire.some():
                    raw += data
        # Behind a request that has begun, the connection just ends.
        assert raw.startswith(b"HTTP/1.1 431 ") == (start[:4] == b"GET ")
        assert not engine.generations


async def test_a_trailer_is_no_header(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine, "exact": NOBODY["fast"]}, wait=False) as served,
        await Wire.open(served.port) as wire,
    ):
        served.mark("fast-0", "ready")
        wire.raw(CHUNKED + b"\r\n%x\r\n%b\r\n0\r\nx-criticality: high\r\n\r\n" % (len(BODY), BODY))
        answer = await wire.reply()
        assert (answer.status, answer.headers["x-dualgauge-rule"]) == (200, "everything else")


async def test_an_engine_that_switches_protocols_is_a_502(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def switch(exchange: Exchange) -> None:
        exchange.raw(b"HTTP/1.1 101 X\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\nPRI")

    engine = FakeEngine(switch)
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        answer = await ask(served.port, CHAT.path, CHAT.ask())
        assert answer.status == 502
        check_openai(answer.json["error"])
        assert served.clean
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_media_type_may_be_in_capitals(tmp_path: Path) -> None:
    engine = FakeEngine(stream(CHAT.stream, content_type="Text/Event-Stream"))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        answer = await ask(
            served.port, CHAT.path, CHAT.ask(stream=True, stream_options={"include_usage": True})
        )
        assert answer.body == CHAT.stream
        assert (await get(served.port, "/healthz")).status == 200


async def test_an_injected_usage_chunk_is_found_however_it_is_spaced(tmp_path: Path) -> None:
    chunk = b'data: {"choices" : [ ] , "usage" : {"prompt_tokens": 3, "completion_tokens": 2}}\n\n'
    engine = FakeEngine(stream(chunk, b"data: [DONE]\n\n"))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        answer = await ask(served.port, CHAT.path, CHAT.ask(stream=True))
        assert answer.body == b"data: [DONE]\n\n"


async def test_a_body_that_was_not_waited_for_ends_the_connection(tmp_path: Path) -> None:
    async with serving(tmp_path, NOBODY, wait=False) as served, await Wire.open(served.port) as wire:
        wire.send("/v1/nothing", headers={"expect": "100-continue", "content-length": "10"})
        answer = await wire.reply()
        assert (answer.status, answer.headers["connection"]) == (404, "close")
        assert await wire.closed()


async def test_a_retry_on_a_fresh_connection_is_an_attempt(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        await ask(served.port, CHAT.path, CHAT.ask())
        engine.script = close
        before = engine.generations
        assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 502
        assert engine.generations - before == served.gateway.config.retries.attempts


async def test_an_engine_that_breaks_off_over_a_stored_reply_is_a_502(tmp_path: Path) -> None:
    engine = FakeEngine(close)
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        answer = await get(served.port, "/v1/responses/resp_1")
        assert answer.status == 502
        check_openai(answer.json["error"])
