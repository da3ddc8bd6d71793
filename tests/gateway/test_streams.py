"""Streams through a real gateway: bytes, usage, and what becomes of a stream that breaks."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from policies.signals.tokens import estimate_prompt
from tests.support.client import Wire, ask, until
from tests.support.engine import FakeEngine, engines, reply, split, stream
from tests.support.serving import Served, serving
from tests.support.shapes import (
    CHAT,
    COMPLETIONS,
    IDS,
    SHAPES,
    Shape,
    check_error,
    check_error_event,
    events,
)

METERED = """
version: 1
rules: [{name: all, send: fast, if_unavailable: fail}]
plans: {default: {tokens: 100k/day, requests: 10k/day}}
"""
EVENT = b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def tokens_left(served: Served) -> float:
    store = served.gateway.store
    return store.usage()["anonymous"]["tokens"]


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_c01_bytes_equal_the_engines_for_every_cut(tmp_path: Path, shape: Shape) -> None:
    whole = shape.stream
    offsets = list(range(1, len(whole), 1 if len(whole) < 1100 else 5))
    engine = FakeEngine()

    async def lane(port: int, some: list[int]) -> None:
        async with await Wire.open(port) as wire:
            for offset in some:
                wire.send(shape.path, shape.ask(stream=True, **usage, offset=offset))
                answer = await wire.reply()
                assert answer.complete, f"cut at {offset}"
                assert answer.body == whole, f"cut at {offset}"

    async def cut(exchange: Any) -> None:
        await stream(*split(whole, exchange.received.json["offset"]), between=0.001)(exchange)

    usage = {"stream_options": {"include_usage": True}} if shape in (CHAT, COMPLETIONS) else {}
    engine.script = cut
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        await asyncio.gather(*(lane(served.port, offsets[first::8]) for first in range(8)))
        assert engine.generations == len(offsets)
        assert served.clean


@pytest.mark.parametrize(
    "asked", [{}, {"stream_options": {"include_usage": False}}, {"stream_options": None}]
)
@pytest.mark.parametrize("shape", [CHAT, COMPLETIONS], ids=["chat", "completions"])
async def test_c02_usage_that_was_not_asked_for_is_counted_and_not_seen(
    tmp_path: Path, shape: Shape, asked: dict[str, Any]
) -> None:
    engine = FakeEngine(stream(*split(shape.stream, 100, 300)))
    async with engines(engine), serving(tmp_path, {"fast": engine}, policy=METERED) as served:
        answer = await ask(served.port, shape.path, shape.ask(stream=True, **asked))
        assert engine.last.json["stream_options"] == {"include_usage": True}
        assert answer.body == b"".join(e for e in events(shape.stream) if b'"usage":' not in e)
        assert answer.body.endswith(DONE)
        used = shape.stream_usage.prompt + shape.stream_usage.completion
        assert 100_000 - used <= tokens_left(served) < 100_000 - used + 30
        assert served.clean


@pytest.mark.parametrize("shape", [CHAT, COMPLETIONS], ids=["chat", "completions"])
async def test_c03_usage_that_was_asked_for_is_seen_once_before_done(tmp_path: Path, shape: Shape) -> None:
    engine = FakeEngine(stream(*split(shape.stream, 100, 300)))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        options = {"include_usage": True}
        answer = await ask(served.port, shape.path, shape.ask(stream=True, stream_options=options))
        assert answer.body == shape.stream
        seen = events(answer.body)
        assert [b'"choices":[]' in event for event in seen].count(True) == 1
        assert b'"choices":[]' in seen[-2]
        assert seen[-1] == DONE
        assert engine.last.json["stream_options"] == options


async def test_other_stream_options_are_kept_beside_the_injected_one(tmp_path: Path) -> None:
    engine = FakeEngine(stream(CHAT.stream))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        body = CHAT.ask(stream=True, stream_options={"include_obfuscation": False})
        await ask(served.port, CHAT.path, body)
        assert engine.last.json["stream_options"] == {"include_obfuscation": False, "include_usage": True}


@pytest.mark.parametrize(
    "whole",
    [
        pytest.param(shape_stream.replace(b"\n", b"\r\n"), id=f"crlf-{index}")
        for index, shape_stream in enumerate(shape.stream for shape in SHAPES)
    ]
    + [
        pytest.param(b": ping\n\n" + EVENT % b"a" + b": keep-alive\n\n" + DONE, id="comments"),
        pytest.param((EVENT % b"a").replace(b"]}\n", b'],"usage":null}\n') * 3 + DONE, id="usage null"),
        pytest.param(EVENT % b"a" + b"data: [DONE]", id="no last blank line"),
        pytest.param(EVENT % (b"x" * (3 << 20)) + EVENT % b"a" + DONE, id="an event of 3 MiB"),
        pytest.param(EVENT % "\u2028\u0085😀日本語".encode() * 50 + DONE, id="odd characters"),
        pytest.param(b"\xff\xfe not UTF-8 \x00\n\n" + DONE, id="not UTF-8"),
    ],
)
async def test_what_an_engine_streams_passes_unchanged(tmp_path: Path, whole: bytes) -> None:
    third = len(whole) // 3
    engine = FakeEngine(stream(*split(whole, third, 2 * third), between=0.005))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        answer = await ask(served.port, CHAT.path, CHAT.ask(**options))
        assert answer.complete
        assert answer.body == whole


async def test_events_are_passed_on_as_they_come(tmp_path: Path) -> None:
    engine = FakeEngine(stream(EVENT % b"a", (EVENT % b"b")[:-5], end="hang"))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.send(CHAT.path, CHAT.ask(stream=True))
        assert await wire.until(b"\n\n") == EVENT % b"a"


@pytest.mark.parametrize("end", ["reset", "close"])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_c14_a_stream_that_breaks_ends_with_one_error_event(
    tmp_path: Path, shape: Shape, end: str
) -> None:
    three = events(shape.stream)[:3]
    engine = FakeEngine(stream(*three, end=end))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        async with await Wire.open(served.port) as wire:
            wire.send(shape.path, shape.ask(stream=True))
            answer = await wire.reply()
            assert answer.status == 200
            assert answer.body.startswith(b"".join(three))
            rest = events(answer.body[len(b"".join(three)) :])
            assert len(rest) == 1
            assert "fast-0" in check_error_event(rest[0], shape)
            assert b"[DONE]" not in answer.body
            assert await wire.closed()
        assert engine.generations == 1
        await until(lambda: served.clean)


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_a_fragment_of_an_event_is_dropped_where_the_engine_breaks_off(
    tmp_path: Path, shape: Shape
) -> None:
    first, second, *_ = events(shape.stream)
    engine = FakeEngine(stream(first + second[:-7], end="reset"))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        answer = await ask(served.port, shape.path, shape.ask(stream=True))
        assert answer.body.startswith(first)
        check_error_event(answer.body[len(first) :], shape)


async def test_an_event_that_was_passed_on_in_parts_is_ended_before_the_error(tmp_path: Path) -> None:
    start = b'data: {"x":"' + b"y" * (2 << 20)
    engine = FakeEngine(stream(start, end="reset"))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        answer = await ask(served.port, CHAT.path, CHAT.ask(stream=True))
        torn, _, error = answer.body.partition(b"\n\n")
        assert start.startswith(torn)
        check_error_event(error, CHAT)


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_a_stream_that_breaks_before_its_first_event_is_a_502(tmp_path: Path, shape: Shape) -> None:
    engine = FakeEngine(stream(events(shape.stream)[0][:20], end="reset"))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        answer = await ask(served.port, shape.path, shape.ask(stream=True))
        check_error(answer, 502, shape=shape, code="engine_broke_off")
        assert engine.generations == 1


async def test_an_empty_stream_is_a_502(tmp_path: Path) -> None:
    engine = FakeEngine(stream())
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        check_error(await ask(served.port, CHAT.path, CHAT.ask(stream=True)), 502)


async def test_json_in_answer_to_a_stream_request_is_passed_on(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        answer = await ask(served.port, CHAT.path, CHAT.ask(stream=True))
        assert answer.headers["content-type"] == "application/json"
        assert answer.body == CHAT.reply


async def test_a_broken_stream_is_charged_by_the_tokens_that_came(tmp_path: Path) -> None:
    role = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    engine = FakeEngine(stream(role, *[EVENT % b"a"] * 5, end="reset"))
    async with engines(engine), serving(tmp_path, {"fast": engine}, policy=METERED) as served:
        await ask(served.port, CHAT.path, CHAT.ask(stream=True, max_tokens=5000))
        used = estimate_prompt([message["content"] for message in CHAT.body["messages"]]) + 5
        assert 100_000 - used <= tokens_left(served) < 100_000 - used + 30
        assert served.clean


async def test_a_client_that_reads_slowly_slows_the_engine(tmp_path: Path) -> None:
    sent = 0

    async def pour(exchange: Any) -> None:
        nonlocal sent
        exchange.head()
        for _ in range(1000):
            exchange.chunk(EVENT % (b"x" * 65_000))
            sent += 65_000
            await exchange.drain()

    engine = FakeEngine(pour)
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        async with await Wire.open(served.port) as wire:
            wire.pause()
            wire.send(CHAT.path, CHAT.ask(stream=True))
            await until(lambda: engine.generations == 1)
            before = -1
            while before < sent:
                before = sent
                await asyncio.sleep(0.1)
            # What the kernel's socket buffers take on both sides, and little more.
            assert sent < 30_000_000
        await until(lambda: bool(engine.closed) and served.clean)


LARGE = split(EVENT % (b"x" * 65_000) * 200 + DONE, *range(0, 13_000_000, 100_000))
SMALL = [EVENT % (b"%06d" % number * 40) for number in range(40_000)]


@pytest.mark.parametrize("parts", [LARGE, SMALL], ids=["parts of large events", "many small events"])
async def test_a_slow_client_gets_everything(tmp_path: Path, parts: list[bytes]) -> None:
    """More than sockets hold, so that writes are taken in part, or not at all."""
    engine = FakeEngine(stream(*parts))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.pause()
        wire.send(CHAT.path, CHAT.ask(stream=True))
        await asyncio.sleep(0.2)
        wire.resume()
        answer = await wire.reply()
        assert answer.complete
        assert answer.body == b"".join(parts)


async def test_a_stream_has_the_decision_in_its_headers(tmp_path: Path) -> None:
    engine = FakeEngine(stream(CHAT.stream))
    async with engines(engine), serving(tmp_path, {"fast": engine}, policy=METERED) as served:
        headers = (await ask(served.port, CHAT.path, CHAT.ask(stream=True))).headers
        assert headers["content-type"] == "text/event-stream; charset=utf-8"
        assert headers["x-dualgauge-tier"] == "fast"
        assert headers["x-dualgauge-engine"] == "fast-0"
        assert headers["x-dualgauge-precision"] == "awq"
        assert headers["x-dualgauge-rule"] == "all"
        assert headers["x-ratelimit-limit-tokens"] == "100000"
        assert headers["x-ratelimit-remaining-requests"] == "9999"
        assert headers["x-request-id"].startswith("req_")
        assert "x-dualgauge-degraded" not in headers


async def test_the_model_in_a_stream_is_the_engines_own(tmp_path: Path) -> None:
    whole = b'data: {"model":"served-name","choices":[{"delta":{"content":"a"}}]}\n\n' + DONE
    engine = FakeEngine(stream(whole))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        answer = await ask(served.port, CHAT.path, CHAT.ask(stream=True))
        assert json.loads(events(answer.body)[0][6:])["model"] == "served-name"
