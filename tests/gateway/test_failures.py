"""What a client sees of an engine that fails, row by row of the contract, in every dialect; and what is
asked again."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.relay import http1
from tests.support.client import Wire, ask, until
from tests.support.engine import BlackHole, FakeEngine, Script, close, engines, hang, reply, reset, stream
from tests.support.serving import serving
from tests.support.shapes import CHAT, IDS, SHAPES, Shape, check_error, check_error_event, events

ERROR = {"error": {"message": "no such thing", "type": "BadRequestError", "param": "x", "code": 400}}


@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "json"])
@pytest.mark.parametrize("status", [400, 404, 413, 422])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_c13_an_engines_4xx_reaches_the_client(
    tmp_path: Path, shape: Shape, status: int, streamed: bool
) -> None:
    engine = FakeEngine(reply(ERROR, status))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        answer = await ask(served.port, shape.path, shape.ask(stream=streamed))
        assert check_error(answer, status, shape=shape, param="x") == "no such thing"
        assert answer.headers["x-dualgauge-engine"] == "fast-0"
        assert engine.generations == 1
        assert served.engine("fast-0").state == "ready"
        assert served.clean


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the engine answered 400"),
        (b"<html>nginx</html>", "the engine answered 400"),
        (b'{"error": "short"}', "short"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"detail": [{"loc": ["body", "x"], "msg": "missing"}]}', '[{"loc":["body","x"],"msg":"missing"}]'),
        (b'{"message": "old vLLM", "object": "error", "code": 400}', "old vLLM"),
        (b'{"type":"error","error":{"type":"x","message":"anthropic"}}', "anthropic"),
        (b'{"error": {"message": "' + b"x" * 10_000 + b'"}}', "x" * 4096),
        (b'{"error": {"message": null}}', "null"),
        (b"[" * 100_000, "the engine answered 400"),
        (b"x" * (2 << 20), "the engine answered 400"),
    ],
    ids=lambda value: str(value[:30]),
)
async def test_an_engines_words_are_kept_whatever_their_shape(
    tmp_path: Path, body: bytes, message: str
) -> None:
    engine = FakeEngine(reply(body, 400))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        assert check_error(await ask(served.port, CHAT.path, CHAT.ask()), 400) == message


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_an_engine_that_refuses_our_key_is_a_502(tmp_path: Path, shape: Shape, status: int) -> None:
    engine = FakeEngine(reply(ERROR, status))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        message = check_error(await ask(served.port, shape.path, shape.ask()), 502, shape=shape)
        assert "api_key" in message
        assert engine.generations == 1


@pytest.mark.parametrize("status", [500, 501, 502, 504, 507])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_an_engines_5xx_is_a_502_and_not_asked_again(tmp_path: Path, shape: Shape, status: int) -> None:
    engine, other = FakeEngine(reply(ERROR, status)), FakeEngine(reply(shape.reply))
    async with engines(engine, other), serving(tmp_path, {"fast": [engine, other]}) as served:
        answer = await ask(served.port, shape.path, shape.ask())
        message = check_error(answer, 502, shape=shape, code="engine_broke_off")
        assert "no such thing" in message
        assert (engine.generations, other.generations) == (1, 0)
        assert served.engine("fast-0").state == "ready"


@pytest.mark.parametrize("status", [301, 302, 304])
async def test_a_redirect_is_a_502(tmp_path: Path, status: int) -> None:
    engine = FakeEngine(reply(b"", status, location="http://203.0.113.1/"))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        check_error(await ask(served.port, CHAT.path, CHAT.ask()), 502)


@pytest.mark.parametrize(
    "body", [b"", b"null", b"  \n", b"<!doctype html><html></html>", b'"x"', b"[1]", b'{"a": '], ids=str
)
@pytest.mark.parametrize(
    "path", [*(shape.path for shape in SHAPES), "/v1/embeddings", "/tokenize", "/v1/messages/count_tokens"]
)
async def test_a_200_that_is_no_json_object_is_a_502(tmp_path: Path, path: str, body: bytes) -> None:
    engine = FakeEngine(reply(body))
    asked = {**CHAT.ask(), "prompt": "x", "input": "x"}
    shape = next((s for s in SHAPES if path.startswith(s.path)), CHAT)
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        check_error(await ask(served.port, path, asked), 502, shape=shape, code="engine_broke_off")
        assert engine.generations == 1


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_usage_of_another_shape_does_not_spoil_a_reply(tmp_path: Path, shape: Shape) -> None:
    engine = FakeEngine()
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        for usage in (None, {}, {"prompt_tokens": None, "input_tokens": None, "output_tokens": None}):
            engine.script = reply({"id": "x", "usage": usage})
            assert (await ask(served.port, shape.path, shape.ask())).status == 200


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
@pytest.mark.parametrize("end", ["reset", "close"])
async def test_a_json_reply_that_is_cut_is_a_502(tmp_path: Path, shape: Shape, end: str) -> None:
    async def cut(exchange: Any) -> None:
        exchange.head(200, "application/json", content_length=str(len(shape.reply)))
        exchange.raw(shape.reply[:-1])
        await asyncio.sleep(0.02)
        (exchange.reset if end == "reset" else exchange.close)()

    engine = FakeEngine(cut)
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        check_error(await ask(served.port, shape.path, shape.ask()), 502, shape=shape)
        assert engine.generations == 1


async def test_large_replies_pass_whole(tmp_path: Path) -> None:
    """Up to 8 MiB they are held until they are whole, beyond that they are passed on as they come."""
    engine = FakeEngine()
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        for size in (70_000, 1 << 20, (8 << 20) - 20, 9 << 20, 20 << 20):
            body = b'{"text": "' + b"x" * size + b'"}'
            engine.script = reply(body)
            answer = await ask(served.port, CHAT.path, CHAT.ask())
            assert (answer.status, answer.complete) == (200, True)
            assert answer.body == body


async def test_a_large_reply_that_is_cut_does_not_end_as_if_it_were_whole(tmp_path: Path) -> None:
    async def cut(exchange: Any) -> None:
        exchange.head(200, "application/json", content_length=str(20 << 20))
        exchange.raw(b'{"text": "' + b"x" * (10 << 20))
        await asyncio.sleep(0.2)
        exchange.reset()

    engine = FakeEngine(cut)
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        answer = await ask(served.port, CHAT.path, CHAT.ask())
        assert answer.status == 200
        assert not answer.complete
        assert b"error" not in answer.body


# what is asked again


async def test_c15_a_pooled_connection_closed_while_idle_is_replaced(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 200
        before = engine.connections
        engine.close_idle()
        assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 200
        assert engine.generations == 2
        assert engine.connections == before + 1


@pytest.mark.parametrize("end", [reset, close], ids=["reset", "close"])
async def test_c15_a_pooled_connection_that_closes_on_use_is_replaced(tmp_path: Path, end: Script) -> None:
    """The engine closed at the very moment of the request: it has not read it."""
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}, retries={"attempts": 1}) as served:
        assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 200
        engine.scripts.append(end)
        assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 200
        assert engine.generations == 3
        assert served.engine("fast-0").state == "ready"


@pytest.mark.parametrize("end", [reset, close], ids=["reset", "close"])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_an_engine_that_breaks_off_before_the_head(tmp_path: Path, shape: Shape, end: Script) -> None:
    engine = FakeEngine(end)
    async with engines(engine), serving(tmp_path, {"fast": engine}, retries={"attempts": 3}) as served:
        engine.close_idle()  # the probes' own connection
        await until(lambda: not served.gateway.upstreams["fast-0"].pool.idle)
        answer = await ask(served.port, shape.path, shape.ask())
        check_error(answer, 502, shape=shape, code="engine_broke_off")
        assert engine.generations == 3
        # It may be the request that breaks it: the only engine of a tier is left to its probes.
        assert served.engine("fast-0").state == "ready"
        assert served.clean


async def test_another_engine_is_tried_first_where_one_breaks_off(tmp_path: Path) -> None:
    bad, good = FakeEngine(reset), FakeEngine(reply(CHAT.reply))
    async with engines(bad, good), serving(tmp_path, {"fast": [bad, good]}) as served:
        answer = await ask(served.port, CHAT.path, CHAT.ask())
        assert answer.status == 200
        assert answer.headers["x-dualgauge-engine"] == "fast-1"
        assert good.generations == 1
        assert "x-dualgauge-degraded" not in answer.headers


@pytest.mark.parametrize("end", ["reset", "close"])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_a_stream_that_breaks_off_after_its_head_is_asked_of_another(
    tmp_path: Path, shape: Shape, end: str
) -> None:
    """Engines send the head of a stream before they work on it."""
    bad, good = FakeEngine(stream(end=end)), FakeEngine(stream(shape.stream))
    async with engines(bad, good), serving(tmp_path, {"fast": [bad, good]}) as served:
        answer = await ask(served.port, shape.path, shape.ask(stream=True))
        assert (answer.status, answer.complete) == (200, True)
        assert answer.headers["x-dualgauge-engine"] == "fast-1"
        assert (bad.generations, good.generations) == (1, 1)


async def test_a_reply_that_has_begun_is_not_asked_again(tmp_path: Path) -> None:
    async def half_a_head(exchange: Any) -> None:
        exchange.raw(b"HTTP/1.1 200 OK\r\ncontent-ty")
        await asyncio.sleep(0.02)
        exchange.reset()

    bad, good = FakeEngine(half_a_head), FakeEngine(reply(CHAT.reply))
    async with engines(bad, good), serving(tmp_path, {"fast": [bad, good]}) as served:
        check_error(await ask(served.port, CHAT.path, CHAT.ask()), 502)
        assert (bad.generations, good.generations) == (1, 0)


async def test_an_engine_that_refuses_connections_is_suspect_and_others_serve(tmp_path: Path) -> None:
    down, good = FakeEngine(), FakeEngine(reply(CHAT.reply))
    async with engines(down, good), serving(tmp_path, {"fast": [down, good]}) as served:
        await down.stop()
        answer = await ask(served.port, CHAT.path, CHAT.ask())
        assert answer.status == 200
        assert answer.headers["x-dualgauge-engine"] == "fast-1"
        # Asked at once whether it was a moment's trouble; one failed probe is an outage here.
        await until(lambda: served.engine("fast-0").state == "down")


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_the_only_engine_refuses_connections(tmp_path: Path, shape: Shape) -> None:
    engine = FakeEngine()
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        await engine.stop()
        check_error(await ask(served.port, shape.path, shape.ask()), 503, shape=shape, code="no_engine_ready")


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_an_overloaded_engine_hands_over_to_another(tmp_path: Path, shape: Shape, status: int) -> None:
    full, free = FakeEngine(reply(ERROR, status)), FakeEngine(reply(shape.reply))
    async with engines(full, free), serving(tmp_path, {"fast": [full, free]}) as served:
        answer = await ask(served.port, shape.path, shape.ask())
        assert answer.status == 200
        assert answer.headers["x-dualgauge-engine"] == "fast-1"
        assert served.engine("fast-0").state == "ready"
        assert b'dualgauge_retries_total{tier="fast"} 1.0' in served.metrics()


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_where_all_are_overloaded_it_is_a_503(tmp_path: Path, shape: Shape, status: int) -> None:
    full = FakeEngine(reply(ERROR, status, retry_after="7"))
    async with engines(full), serving(tmp_path, {"fast": full}) as served:
        answer = await ask(served.port, shape.path, shape.ask())
        check_error(answer, 503, shape=shape, code="engine_overloaded")
        assert answer.headers["retry-after"] == "7"
        assert full.generations == 1


@pytest.mark.parametrize("given", ["Fri, 31 Dec 1999 23:59:59 GMT", "-5", "nan", "inf", "", "0", "0.2"])
async def test_retry_after_of_any_kind(tmp_path: Path, given: str) -> None:
    full = FakeEngine(reply(ERROR, 503, retry_after=given))
    async with engines(full), serving(tmp_path, {"fast": full}) as served:
        answer = await ask(served.port, CHAT.path, CHAT.ask())
        check_error(answer, 503)
        assert 1 <= int(answer.headers["retry-after"]) <= 2


async def test_attempts_bound_the_engines_that_are_asked(tmp_path: Path) -> None:
    some = [FakeEngine(reply(ERROR, 503)) for _ in range(5)]
    async with engines(*some), serving(tmp_path, {"fast": some}, retries={"attempts": 3}) as served:
        check_error(await ask(served.port, CHAT.path, CHAT.ask()), 503)
        assert sum(engine.generations for engine in some) == 3


async def test_the_budget_bounds_retries_over_all_requests(tmp_path: Path) -> None:
    """Ten retries to begin with, then the share of requests: here one in ten."""
    full, free = FakeEngine(reply(ERROR, 503)), FakeEngine(reply(CHAT.reply))
    retries = {"attempts": 3, "budget": "10%"}
    async with engines(full, free), serving(tmp_path, {"fast": [full, free]}, retries=retries) as served:
        statuses = [(await ask(served.port, CHAT.path, CHAT.ask())).status for _ in range(60)]
        assert statuses[:10] == [200] * 10
        assert 15 <= free.generations == statuses.count(200) <= 16
        assert statuses.count(200) + statuses.count(503) == 60


# timeouts


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_a_connect_timeout(tmp_path: Path, shape: Shape) -> None:
    with BlackHole() as hole:
        limits = {"connect": "50ms"}
        async with serving(tmp_path, {"fast": hole.url}, timeouts=limits, wait=False) as served:
            served.mark("fast-0", "ready")
            answer = await ask(served.port, shape.path, shape.ask())
            message = check_error(answer, 504, shape=shape, code="engine_timeout")
            assert "timeouts.connect" in message
            assert served.clean


@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "json"])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_a_first_byte_timeout(tmp_path: Path, shape: Shape, streamed: bool) -> None:
    engine, other = FakeEngine(hang), FakeEngine(reply(shape.reply))
    limits = {"first_byte": "80ms"}
    async with (
        engines(engine, other),
        serving(tmp_path, {"fast": [engine, other]}, timeouts=limits) as served,
    ):
        answer = await ask(served.port, shape.path, shape.ask(stream=streamed))
        message = check_error(answer, 504, shape=shape, code="engine_timeout")
        assert "timeouts.first_byte" in message
        assert (engine.generations, other.generations) == (1, 0)
        await until(lambda: engine.exchanges[0].closed_at is not None)
        assert served.clean


async def test_a_head_without_a_first_token_is_a_first_byte_timeout(tmp_path: Path) -> None:
    engine = FakeEngine(stream(end="hang"))
    limits = {"first_byte": "80ms", "idle": "10ms"}
    async with engines(engine), serving(tmp_path, {"fast": engine}, timeouts=limits) as served:
        answer = await ask(served.port, CHAT.path, CHAT.ask(stream=True))
        assert "timeouts.first_byte" in check_error(answer, 504)


@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "json"])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_an_idle_timeout(tmp_path: Path, shape: Shape, streamed: bool) -> None:
    """It is short although the wait for the first byte is long."""

    async def half(exchange: Any) -> None:
        exchange.head(200, "application/json", content_length="1000")
        exchange.raw(b"{")
        await hang(exchange)

    first = events(shape.stream)[0]
    engine = FakeEngine(stream(first, end="hang") if streamed else half)
    limits = {"first_byte": "30s", "idle": "80ms"}
    async with engines(engine), serving(tmp_path, {"fast": engine}, timeouts=limits) as served:
        async with asyncio.timeout(3):
            answer = await ask(served.port, shape.path, shape.ask(stream=streamed))
        if streamed:
            assert answer.status == 200
            assert answer.body.startswith(first)
            message = check_error_event(answer.body[len(first) :], shape)
        else:
            message = check_error(answer, 504, shape=shape, code="engine_timeout")
        assert "timeouts.idle" in message
        await until(lambda: engine.exchanges[0].closed_at is not None)
        assert served.clean


@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "json"])
async def test_a_total_timeout(tmp_path: Path, streamed: bool) -> None:
    token = b'data: {"x": 1}\n\n'
    engine = FakeEngine(stream(*[token] * 100, between=0.02) if streamed else hang)
    async with engines(engine), serving(tmp_path, {"fast": engine}, timeouts={"total": "150ms"}) as served:
        answer = await ask(served.port, CHAT.path, CHAT.ask(stream=streamed))
        if streamed:
            assert answer.body.startswith(token)
            message = check_error_event(events(answer.body)[-1], CHAT)
        else:
            message = check_error(answer, 504)
        assert "timeouts.total" in message
        await until(lambda: engine.exchanges[0].closed_at is not None)
        assert served.clean


async def test_a_slow_first_token_is_not_idle(tmp_path: Path) -> None:
    engine = FakeEngine(stream(CHAT.stream, first=0.3))
    limits = {"first_byte": "5s", "idle": "50ms"}
    async with engines(engine), serving(tmp_path, {"fast": engine}, timeouts=limits) as served:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        assert (await ask(served.port, CHAT.path, CHAT.ask(**options))).body == CHAT.stream


async def test_tokens_that_keep_coming_are_not_idle(tmp_path: Path) -> None:
    engine = FakeEngine(stream(*events(CHAT.stream), between=0.1))
    limits = {"first_byte": "50ms", "idle": "400ms"}
    async with engines(engine), serving(tmp_path, {"fast": engine}, timeouts=limits) as served:
        answer = await ask(served.port, CHAT.path, CHAT.ask(stream=True))
        assert answer.complete
        assert b"[DONE]" in answer.body


async def test_a_slow_client_is_not_an_idle_engine(tmp_path: Path) -> None:
    whole = b'data: {"x": "%b"}\n\n' % (b"y" * 100_000) * 100
    engine = FakeEngine(stream(whole))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}, timeouts={"idle": "400ms"}) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.pause()
        wire.send(CHAT.path, CHAT.ask(stream=True))
        await asyncio.sleep(1)
        wire.resume()
        answer = await wire.reply()
        assert answer.complete
        assert answer.body == whole


async def test_a_client_that_never_reads_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "STALLED_SECONDS", 0.2)
    whole = b'data: {"x": "%b"}\n\n' % (b"y" * 100_000) * 300
    engine = FakeEngine(stream(whole, end="hang"))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.pause()
        wire.send(CHAT.path, CHAT.ask(stream=True))
        await until(lambda: engine.generations == 1)
        await until(lambda: served.clean, 2)


async def test_an_engine_may_have_timeouts_of_its_own(tmp_path: Path) -> None:
    engine = FakeEngine(hang)
    async with engines(engine):
        part = {"name": "e", "tier": "fast", "kind": "external", "precision": "awq", "url": engine.url}
        own = [{**part, "timeouts": {"first_byte": "50ms"}}]
        async with serving(tmp_path, {}, engines=own, timeouts={"first_byte": "30s"}) as served:
            assert "0.05 s" in check_error(await ask(served.port, CHAT.path, CHAT.ask()), 504)


@pytest.mark.parametrize(
    "noise",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000,
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n\x00",
    ],
    ids=["not HTTP", "length", "chunk", "long head", "upgrade"],
)
async def test_an_engine_that_does_not_speak_http(tmp_path: Path, noise: bytes) -> None:
    async def script(exchange: Any) -> None:
        exchange.raw(noise)
        await hang(exchange)

    engine = FakeEngine(script)
    async with engines(engine), serving(tmp_path, {"fast": engine}, timeouts={"total": "2s"}) as served:
        check_error(await ask(served.port, CHAT.path, CHAT.ask()), 502)
        await until(lambda: served.clean)


async def test_informational_replies_are_skipped(tmp_path: Path) -> None:
    async def script(exchange: Any) -> None:
        exchange.raw(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
        await reply(CHAT.reply)(exchange)

    engine = FakeEngine(script)
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        answer = await ask(served.port, CHAT.path, CHAT.ask())
        assert answer.body == CHAT.reply
        assert "link" not in answer.headers


async def test_a_reply_without_length_ends_with_its_connection(tmp_path: Path) -> None:
    async def script(exchange: Any) -> None:
        exchange.raw(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + CHAT.reply)
        exchange.close()

    engine = FakeEngine(script)
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        assert (await ask(served.port, CHAT.path, CHAT.ask())).body == CHAT.reply


async def test_bytes_after_a_reply_are_not_taken_for_the_next(tmp_path: Path) -> None:
    async def script(exchange: Any) -> None:
        await reply(CHAT.reply)(exchange)
        exchange.raw(b'HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n{"a":1}')

    engine = FakeEngine(script)
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        for _ in range(3):
            answer = await ask(served.port, CHAT.path, CHAT.ask())
            assert answer.status in (200, 502)
            assert answer.status == 502 or answer.body == CHAT.reply
            await asyncio.sleep(0.02)


async def test_a_slow_client_that_takes_something_is_not_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http1, "STALLED_SECONDS", 0.15)
    whole = b'data: {"x": "%b"}\n\n' % (b"y" * 100_000) * 150
    engine = FakeEngine(stream(whole))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.pause()
        wire.send(CHAT.path, CHAT.ask(stream=True))
        for _ in range(8):
            await asyncio.sleep(0.1)
            wire.resume()
            await wire.until(b"\n\n", wire.answer.body.count(b"\n\n") + 5)
            wire.pause()
        wire.resume()
        answer = await wire.reply()
        assert answer.complete
        assert answer.body == whole


@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "json"])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_a_fault_of_the_gateways_own_is_a_500(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    shape: Shape,
    streamed: bool,
) -> None:
    def fault(*_: object) -> None:
        raise ZeroDivisionError("a secret of the gateway")

    engine = FakeEngine(reply(shape.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        monkeypatch.setattr(served.gateway.fleet, "pick", fault)
        answer = await ask(served.port, shape.path, shape.ask(stream=streamed))
        message = check_error(answer, 500, shape=shape, code="internal_error")
        assert answer.headers["x-request-id"] in message
        assert "secret" not in message
        assert "ZeroDivisionError" in caplog.text
        assert answer.headers["x-request-id"] in caplog.text
        assert b'outcome="internal_error"' in served.metrics()
        monkeypatch.undo()
        assert served.clean
        assert (await ask(served.port, shape.path, shape.ask())).status == 200
