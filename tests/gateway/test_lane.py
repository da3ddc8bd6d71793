"""The short way of a streamed token: a chunk that holds whole events goes on as the engine framed it.

Both ends are given transports that only record, and the engine's bytes in the pieces of each test.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import EngineBroke
from gateway.relay import http1, upstream
from gateway.relay.client import Head
from gateway.relay.forward import Forward
from gateway.relay.http1 import LAST_CHUNK, Request
from gateway.relay.sse import Tap, Usage
from tests.support.client import Reply, Wire
from tests.support.engine import split
from tests.support.recorder import Recorder
from tests.support.shapes import CHAT

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
LIMITS = upstream.Limits(connect=1, first_byte=5, idle=5, total=5)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Asker:
    def __init__(self) -> None:
        self.tap = Tap(CHAT.dialect.stream_usage, marker=b"\n\n", strip=True)

    def head(self, content_type: bytes) -> Head:
        return b"content-type: %b\r\n" % content_type

    def begun(self, data: bytes) -> None: ...

    def read_usage(self, reply: bytes) -> Usage | None:
        return None

    def follow(self) -> tuple[Tap, Any]:
        return self.tap, lambda: None


class Relay:
    """One stream between the recorders: `written` is what the client is sent, `feed` is the engine."""

    def __init__(self, version: bytes = b"1.1") -> None:
        loop = asyncio.get_running_loop()
        self.asker = Asker()
        self.engine = upstream.Connection(loop, upstream.Deadlines())
        self.engine.connection_made(Recorder())
        self.written: list[bytes] = []
        state = SimpleNamespace(connections=set(), tasks=set(), total_requests=0, default_headers=[])
        config = SimpleNamespace(app=SimpleNamespace(answer=self._answer), timeout_keep_alive=5)
        self.connection = http1.Connection(config, state, {}, loop)  # type: ignore[arg-type]
        self.connection.connection_made(Recorder(self.written.append))
        self.connection.data_received(b"GET /x HTTP/%b\r\n\r\n" % version)
        self.done = loop.create_future()

    async def _answer(self, request: Request) -> None:
        self.engine.start(b"", LIMITS)
        while not self.engine.headed:
            await self.engine.wait()
        try:
            await Forward(self.asker, request, self.engine, "fast-0").run()
        except EngineBroke as error:
            self.done.set_exception(error)
        else:
            self.done.set_result(None)

    async def feed(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.engine.data_received(piece)
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def close(self) -> None:
        self.connection.connection_lost(None)
        await asyncio.sleep(0)

    async def end(self) -> bytes:
        """The body that a client has read by now, the stream having ended."""
        await asyncio.wait_for(self.done, 5)
        await self.close()
        wire = Wire(None, None)  # type: ignore[arg-type]
        wire._parser.feed_data(b"".join(self.written))
        answer: Reply = wire.answer
        assert answer.complete
        return bytes(answer.body)


async def begun() -> Relay:
    relay = Relay()
    await asyncio.sleep(0)
    await relay.feed(HEAD + chunk(EVENT % b"first"))
    return relay


async def test_a_whole_chunk_goes_on_as_it_came() -> None:
    relay, token = await begun(), chunk(EVENT % b"second")
    await relay.feed(token)
    assert relay.written[-1] is token
    await relay.feed(LAST_CHUNK)
    assert await relay.end() == EVENT % b"first" + EVENT % b"second"


async def test_its_tokens_are_counted() -> None:
    relay = await begun()
    await relay.feed(chunk(EVENT % b"a" + EVENT % b"b"), LAST_CHUNK)
    await relay.end()
    assert relay.asker.tap.tokens == 3


async def test_the_injected_usage_is_taken_out() -> None:
    relay = await begun()
    await relay.feed(chunk(EVENT % b"a"), chunk(USAGE), chunk(b"data: [DONE]\n\n"), LAST_CHUNK)
    assert await relay.end() == EVENT % b"first" + EVENT % b"a" + b"data: [DONE]\n\n"
    assert relay.asker.tap.usage == Usage(3, 2, 0)


@pytest.mark.parametrize(
    "start", [b"2F", b"02f", b"2f;x=1", b"2f;x"], ids=["upper case", "zeros", "extension", "bare extension"]
)
async def test_what_is_framed_otherwise_is_framed_anew(start: bytes) -> None:
    relay, event = await begun(), EVENT % b"b"
    assert len(event) == 0x2F
    await relay.feed(b"%b\r\n%b\r\n" % (start, event))
    assert relay.written[-1] == chunk(event)
    await relay.feed(LAST_CHUNK)
    assert await relay.end() == EVENT % b"first" + event


@pytest.mark.parametrize("start", [b"+2f", b" 2f", b"2_f", b"0x2f", b"\n2f"])
async def test_a_size_that_is_none_ends_the_stream(start: bytes) -> None:
    relay = await begun()
    await relay.feed(b"%b\r\n%b\r\n" % (start, EVENT % b"b"))
    with pytest.raises(EngineBroke, match="not HTTP"):
        await relay.done
    assert relay.written[-1].endswith(chunk(EVENT % b"first"))
    await relay.close()


async def test_a_body_without_chunks_that_looks_like_one_is_a_body() -> None:
    relay = Relay()
    await asyncio.sleep(0)
    fake = chunk(EVENT % b"x")
    size = len(fake) * 2 + 2
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % size
    await relay.feed(head, fake, fake, b"\n\n")
    assert await relay.end() == fake + fake + b"\n\n"


async def test_nothing_goes_past_a_part_of_an_event_that_is_held() -> None:
    relay, event = await begun(), EVENT % b"held"
    await relay.feed(chunk(event[:9]), chunk(event[9:]), chunk(EVENT % b"z"), LAST_CHUNK)
    assert await relay.end() == EVENT % b"first" + event + EVENT % b"z"


async def test_a_client_of_http_1_0_gets_no_chunks() -> None:
    relay = Relay(b"1.0")
    await asyncio.sleep(0)
    await relay.feed(HEAD + chunk(EVENT % b"a"), chunk(EVENT % b"b"))
    assert relay.written[-1] == EVENT % b"b"
    await relay.feed(LAST_CHUNK)
    await relay.done
    await relay.close()


async def test_a_client_that_is_slow_stops_it() -> None:
    relay, second = await begun(), chunk(EVENT % b"second")
    relay.connection.pause_writing()
    await relay.feed(second, chunk(EVENT % b"third"), chunk(EVENT % b"fourth"))
    assert relay.written[-1] is second
    relay.connection.resume_writing()
    await relay.feed(LAST_CHUNK)
    texts = (b"first", b"second", b"third", b"fourth")
    assert await relay.end() == b"".join(EVENT % text for text in texts)


FRAMES = st.sampled_from([b"%x\r\n%b\r\n", b"%X\r\n%b\r\n", b"0%x\r\n%b\r\n", b"%x;a=b\r\n%b\r\n"])
PIECES = st.sampled_from([EVENT % b"a", EVENT % (b"x" * 300), EVENT % (b"y" * 5000), b": c\n\n", USAGE])


@given(
    st.lists(PIECES, min_size=1, max_size=8),
    st.lists(st.integers(1, 6000), max_size=6),
    st.lists(FRAMES, min_size=1, max_size=3),
    st.lists(st.integers(1, 9000), max_size=12),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_any_stream_in_any_chunks_and_any_reads(
    pieces: list[bytes], chunks: list[int], frames: list[bytes], reads: list[int], by_event: bool
) -> None:
    whole = EVENT % b"first" + b"".join(pieces)
    parts = [EVENT % b"first", *pieces] if by_event else split(whole, *offsets(chunks, whole))
    framed = [frames[n % len(frames)] % (len(part), part) for n, part in enumerate(parts)]
    bare = b"".join(framed)
    sent = split(bare, *offsets(reads, bare)) if reads else framed

    async def run() -> tuple[bytes, int]:
        relay = Relay()
        await asyncio.sleep(0)
        await relay.feed(HEAD, *sent, LAST_CHUNK)
        return await relay.end(), relay.asker.tap.tokens

    assert asyncio.run(run()) == (
        EVENT % b"first" + b"".join(piece for piece in pieces if piece != USAGE),
        whole.count(b"\n\n"),
    )


def offsets(given: list[int], data: bytes) -> list[int]:
    return sorted({offset for offset in given if offset < len(data)})
