"""Traces: whose child is whose, what is exported, and what is in a span."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import (
    error_attributes,
    http_attributes,
    network_attributes,
    server_attributes,
    url_attributes,
    user_agent_attributes,
)
from opentelemetry.trace import SpanKind, StatusCode

from gateway.telemetry.traces import read_traceparent, read_tracestate
from tests.support.client import ask, until
from tests.support.engine import FakeEngine, engines, hang, reply, reset, stream
from tests.support.serving import serving
from tests.support.shapes import CHAT, IDS, SHAPES, Shape
from tests.support.spans import Recorder

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
SECRET = "the eagle lands at midnight"


def sent(engine: FakeEngine) -> tuple[str, str, str]:
    """(trace, parent span, flags) that the engine received."""
    version, trace, span, flags = engine.last.headers["traceparent"].split("-")
    assert version == "00"
    return trace, span, flags


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_c27_the_callers_trace_goes_on_through_the_gateway(tmp_path: Path, shape: Shape) -> None:
    recorder = Recorder.make(sample=0)
    engine = FakeEngine(reply(shape.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}, tracer=recorder.tracer) as served:
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=b,c=d"}
        await ask(served.port, shape.path, shape.ask(), headers=headers)
        server, client = recorder.server(), recorder.client()
        assert server.context is not None
        assert server.parent is not None
        assert client.context is not None
        assert client.parent is not None
        assert f"{server.context.trace_id:032x}" == TRACE
        assert f"{server.parent.span_id:016x}" == SPAN
        assert client.context.trace_id == server.context.trace_id
        assert client.parent.span_id == server.context.span_id
        assert sent(engine) == (TRACE, f"{client.context.span_id:016x}", "01")
        assert engine.last.headers["tracestate"] == "a=b,c=d"


async def test_a_request_without_a_trace_begins_one(tmp_path: Path) -> None:
    recorder = Recorder.make(sample=1)
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}, tracer=recorder.tracer) as served:
        await ask(served.port, CHAT.path, CHAT.ask())
        server, client = recorder.server(), recorder.client()
        assert server.parent is None
        assert server.context is not None
        assert client.context is not None
        assert sent(engine) == (f"{server.context.trace_id:032x}", f"{client.context.span_id:016x}", "01")


@pytest.mark.parametrize(
    ("sample", "flags", "exported", "told"),
    [
        (1.0, "00", False, "00"),
        (0.0, "01", True, "01"),
        (0.0, None, False, "00"),
        (1.0, None, True, "01"),
        (0.0, "ff", True, "01"),
    ],
)
async def test_the_callers_flag_decides_else_the_configured_share(
    tmp_path: Path, sample: float, flags: str | None, exported: bool, told: str
) -> None:
    recorder = Recorder.make(sample)
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}, tracer=recorder.tracer) as served:
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-{flags}"} if flags else {}
        await ask(served.port, CHAT.path, CHAT.ask(), headers=headers)
        assert bool(recorder.spans()) is exported
        assert sent(engine)[2] == told


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (f"00-{TRACE}-{SPAN}-01", (TRACE.encode(), SPAN.encode(), True)),
        (f"00-{TRACE}-{SPAN}-00", (TRACE.encode(), SPAN.encode(), False)),
        (f"01-{TRACE}-{SPAN}-01-more", (TRACE.encode(), SPAN.encode(), True)),
        (f"00-{TRACE}-{SPAN}-01-more", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{TRACE[:-1]}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}", None),
        ("", None),
        ("x" * 1000, None),
    ],
)
def test_traceparents(value: str, expected: Any) -> None:
    assert read_traceparent(value.encode()) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a=b", "a=b"),
        ("a=b, \tc@d=e f,,", "a=b,c@d=e f"),
        (",".join(f"a{number}=b" for number in range(32)), ...),
        (",".join(f"a{number}=b" for number in range(33)), None),
        ("a=b,a=c", None),
        ("a=b,c", None),
        ("A=b", None),
        ("1=b", None),
        ("a=b=c", None),
        ("a=\x9b31m", None),
        ("k" * 257 + "=v", None),
        ("k=" + "v" * 257, None),
        (" , ", None),
        ("", None),
    ],
)
def test_tracestates(value: str, expected: Any) -> None:
    whole = value if expected is ... else expected
    assert read_tracestate(value.encode("latin-1")) == (None if whole is None else whole.encode())


@pytest.mark.parametrize("state", [b"eagle", b"=", b"a=b,a=c", b"x=\x9b31m", b"a=b," * 40])
async def test_a_state_that_is_none_is_dropped_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, state: bytes
) -> None:
    """OpenTelemetry's parser would log it for each span, and so would an engine."""
    recorder = Recorder.make(sample=1)
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}, tracer=recorder.tracer) as served:
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": state.decode("latin-1")}
        await ask(served.port, CHAT.path, CHAT.ask(), headers=headers)
        assert recorder.server().parent is not None
        assert "tracestate" not in engine.last.headers
    assert [one.name for one in caplog.records if one.name.startswith("opentelemetry")] == []


async def test_what_is_in_the_spans(tmp_path: Path) -> None:
    recorder = Recorder.make()
    engine = FakeEngine(stream(CHAT.stream))
    keys = "keys: [{name: ci, key: sk-secret}]"
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}, tracer=recorder.tracer, keys=keys) as served,
    ):
        headers = {"x-api-key": "sk-secret"}
        headers |= {"user-agent": "test/1"}
        body = CHAT.ask(stream=True, max_tokens=7, temperature=0.5)
        answer = await ask(served.port, CHAT.path + "?a=b", body, headers=headers)
        server, client = recorder.server(), recorder.client()
        assert (server.name, server.kind) == ("POST /v1/chat/completions", SpanKind.SERVER)
        assert (client.name, client.kind) == ("chat smollm2", SpanKind.CLIENT)
        own = {
            "dualgauge.request_id": answer.headers["x-request-id"],
            "dualgauge.tier": "fast",
            "dualgauge.engine": "fast-0",
            "dualgauge.precision": "awq",
            "dualgauge.rule": "everything else",
            "dualgauge.reason": "no rule before it held",
            "dualgauge.policy_hash": served.gateway.snapshot.policy.hash,
            "dualgauge.tenant": "ci",
            "dualgauge.outcome": "ok",
            "dualgauge.degraded": False,
        }
        assert dict(server.attributes or {}) == {
            "http.request.method": "POST",
            "http.route": "/v1/chat/completions",
            "http.response.status_code": 200,
            "url.path": "/v1/chat/completions",
            "url.scheme": "http",
            "network.protocol.version": "1.1",
            "user_agent.original": "test/1",
            **own,
        }
        waited = (client.attributes or {})["gen_ai.response.time_to_first_chunk"]
        assert isinstance(waited, float)
        assert dict(client.attributes or {}) == {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "openai",
            "gen_ai.request.model": "smollm2",
            "gen_ai.request.max_tokens": 7,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.stream": True,
            "gen_ai.response.model": "smollm2",
            "gen_ai.response.time_to_first_chunk": waited,
            "server.address": "127.0.0.1",
            "server.port": engine.port,
            "gen_ai.usage.input_tokens": 69,
            "gen_ai.usage.output_tokens": 1,
            **own,
        }
        assert server.start_time is not None
        assert client.start_time is not None
        assert server.end_time is not None
        assert client.end_time is not None
        assert server.start_time <= client.start_time <= client.end_time <= server.end_time
        assert server.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize(
    ("script", "status", "error"),
    [
        (reply(CHAT.reply), 200, False),
        (reply({}, 400), 400, False),
        (reply({}, 500), 502, True),
        (reply({}, 503), 503, True),
        (reset, 502, True),
        (hang, 504, True),
    ],
    ids=["ok", "400", "500", "503", "reset", "timeout"],
)
async def test_which_spans_are_errors(tmp_path: Path, script: Any, status: int, error: bool) -> None:
    """And those are exported whatever the share, where the trace is ours."""
    recorder = Recorder.make(sample=0)
    engine = FakeEngine(script)
    limits = {"first_byte": "50ms"}
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}, tracer=recorder.tracer, timeouts=limits) as served,
    ):
        assert (await ask(served.port, CHAT.path, CHAT.ask())).status == status
        assert bool(recorder.spans()) is error
        if error:
            server = recorder.server()
            assert server.status.status_code is StatusCode.ERROR
            assert (server.attributes or {})["http.response.status_code"] == status
            assert (server.attributes or {})["error.type"]
            assert recorder.client().status.status_code is StatusCode.ERROR


async def test_a_broken_stream_is_an_error(tmp_path: Path) -> None:
    recorder = Recorder.make()
    engine = FakeEngine(stream(b"data: {}\n\n", end="reset"))
    async with engines(engine), serving(tmp_path, {"fast": engine}, tracer=recorder.tracer) as served:
        assert (await ask(served.port, CHAT.path, CHAT.ask(stream=True))).status == 200
        server = recorder.server()
        assert server.status.status_code is StatusCode.ERROR
        assert (server.attributes or {})["error.type"] == "engine_broke_off"


async def test_health_checks_and_refused_keys_have_no_spans(tmp_path: Path) -> None:
    recorder = Recorder.make()
    keys = "keys: [{name: ci, key: sk-secret}]"
    async with serving(
        tmp_path, {"fast": "http://127.0.0.1:9"}, tracer=recorder.tracer, keys=keys, wait=False
    ) as served:
        for path in ("/healthz", "/readyz", "/v1/models", "/nope"):
            await ask(served.port, path, method="GET")
        assert recorder.spans() == []


async def test_nothing_private_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither prompt, reply nor key is in a trace, a metric or a log, whatever happens."""
    recorder = Recorder.make()
    keys = "keys: [{name: ci, key: sk-secret}]"
    text = {"choices": [{"message": {"content": SECRET}}]}
    scripts = [
        reply(text),
        reply(text, 400),
        reply(text, 500),
        reply(SECRET.encode()),
        stream(b'data: {"x": "%b"}\n\n' % SECRET.encode(), end="reset"),
        reset,
    ]
    engine = FakeEngine(reply(text))
    with caplog.at_level(logging.DEBUG):
        async with (
            engines(engine),
            serving(tmp_path, {"fast": engine}, tracer=recorder.tracer, keys=keys) as served,
        ):
            for script in scripts:
                engine.scripts.append(script)
                body = CHAT.ask(messages=[{"role": "user", "content": SECRET}], stream=True)
                for key in ("sk-secret", "sk-wrong"):
                    await ask(served.port, CHAT.path, body, headers={"authorization": f"Bearer {key}"})
            await until(lambda: served.clean)
            told = [
                caplog.text,
                served.metrics().decode(),
                *(str(span.to_json()) for span in recorder.spans()),
            ]
    assert recorder.spans()
    for words in told:
        assert SECRET not in words
        assert "sk-secret" not in words
        assert "sk-wrong" not in words


async def test_a_rule_may_ask_for_a_trace(tmp_path: Path) -> None:
    recorder = Recorder.make(sample=0)
    text = "version: 1\nrules: [{name: all, send: fast, if_unavailable: fail, trace: always}]"
    engine = FakeEngine(reply(CHAT.reply))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}, tracer=recorder.tracer, policy=text) as served,
    ):
        await ask(served.port, CHAT.path, CHAT.ask())
        assert recorder.spans()
        assert sent(engine)[2] == "01"


async def test_a_failure_is_exported_whatever_the_caller_says(tmp_path: Path) -> None:
    recorder = Recorder.make(sample=0)
    engine = FakeEngine(reply({}, 500))
    async with engines(engine), serving(tmp_path, {"fast": engine}, tracer=recorder.tracer) as served:
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-00"}
        assert (await ask(served.port, CHAT.path, CHAT.ask(), headers=headers)).status == 502
        assert sent(engine)[2] == "00"
        assert recorder.server().parent is not None


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_the_operation_is_the_dialects(tmp_path: Path, shape: Shape) -> None:
    recorder = Recorder.make()
    engine = FakeEngine(reply(shape.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}, tracer=recorder.tracer) as served:
        await ask(served.port, shape.path, shape.ask())
        operation = {"openai.completions": "text_completion", "openai.embeddings": "embeddings"}.get(
            shape.dialect.name, "chat"
        )
        assert recorder.client().name == f"{operation} smollm2"
        assert (recorder.client().attributes or {})["gen_ai.operation.name"] == operation


async def test_the_provider_is_what_an_engines_metrics_tell(tmp_path: Path) -> None:
    recorder = Recorder.make()
    engine = FakeEngine(reply(CHAT.reply))
    engine.metrics = b"llamacpp:requests_processing 0\n"
    async with engines(engine), serving(tmp_path, {"fast": engine}, tracer=recorder.tracer) as served:
        await until(lambda: served.engine("fast-0").sampled_at is not None)
        await ask(served.port, CHAT.path, CHAT.ask())
        assert (recorder.client().attributes or {})["gen_ai.provider.name"] == "llama.cpp"


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_a_span_tells_the_decision(tmp_path: Path) -> None:
    recorder = Recorder.make()
    text = """
version: 1
classes: {long: {signal: prompt_tokens, at_least: 1}}
rules:
  - {name: long ones, when: long, send: fast, if_unavailable: {wait: 20s}}
  - {name: others, send: fast, if_unavailable: fail}
"""
    engine = FakeEngine(reply(CHAT.reply))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}, tracer=recorder.tracer, policy=text) as served,
    ):
        await ask(served.port, CHAT.path, CHAT.ask())
        decide, server = recorder.inner("decide"), recorder.server()
        assert decide.parent == server.context
        told = attributes(decide)
        measured = told.pop("dualgauge.signal.prompt_tokens")
        assert measured >= 1
        assert told == {
            "dualgauge.tier": "fast",
            "dualgauge.rule": "long ones",
            "dualgauge.contract": "wait 20s",
            "dualgauge.policy_hash": served.gateway.snapshot.policy.hash,
            "dualgauge.reason": f"long: prompt_tokens {measured} >= 1",
        }


async def test_the_spans_of_a_request_follow_each_other(tmp_path: Path) -> None:
    recorder = Recorder.make()
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}, tracer=recorder.tracer) as served:
        await ask(served.port, CHAT.path, CHAT.ask())
        server, decide, reserve, client = recorder.spans()
        assert [s.name for s in (decide, reserve)] == ["decide", "reserve"]
        moments = [
            server.start_time,
            *(t for span in (decide, reserve, client) for t in (span.start_time, span.end_time)),
        ]
        assert moments == sorted(moments, key=lambda t: t or 0)
        assert client.end_time == server.end_time
        assert len({span.context.span_id for span in recorder.spans() if span.context}) == 4


async def test_a_refused_reservation_says_which_limit_it_was(tmp_path: Path) -> None:
    recorder = Recorder.make()
    text = """
version: 1
rules: [{name: all, send: fast, if_unavailable: fail}]
plans: {default: {tokens: 1/min}}
"""
    async with serving(
        tmp_path, {"fast": "http://127.0.0.1:9"}, tracer=recorder.tracer, policy=text, wait=False
    ) as served:
        assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 429
        assert attributes(recorder.inner("reserve")) == {"dualgauge.limit": "tokens"}
        assert [s.kind for s in recorder.spans()].count(SpanKind.CLIENT) == 0


async def test_a_wait_has_a_span(tmp_path: Path) -> None:
    recorder = Recorder.make()
    text = "version: 1\nrules: [{name: all, send: fast, if_unavailable: {wait: 20s}}]"
    engine = FakeEngine(reply(CHAT.reply))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}, tracer=recorder.tracer, policy=text) as served,
    ):
        served.mark("fast-0", "down")
        asking = asyncio.create_task(ask(served.port, CHAT.path, CHAT.ask()))
        await until(lambda: served.gateway.store.in_use() == 1)
        served.mark("fast-0", "ready")
        assert (await asking).status == 200
        wait, client = recorder.inner("wait"), recorder.client()
        assert attributes(wait) == {"dualgauge.tier": "fast"}
        assert (wait.end_time or 0) <= (client.start_time or 0)


async def test_a_retry_is_an_event_of_the_engines_span(tmp_path: Path) -> None:
    recorder = Recorder.make()
    first, second = FakeEngine(reset), FakeEngine(reply(CHAT.reply))
    async with (
        engines(first, second),
        serving(tmp_path, {"fast": [first, second]}, tracer=recorder.tracer) as served,
    ):
        assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 200
        (event,) = recorder.client().events
        assert event.name == "dualgauge.retry"
        assert (event.attributes or {})["dualgauge.engine"] == "fast-0"
        assert attributes(recorder.client())["dualgauge.engine"] == "fast-1"


async def test_where_no_engine_was_reached_its_attempts_are_told_by_the_server_span(tmp_path: Path) -> None:
    recorder = Recorder.make()
    async with serving(
        tmp_path, {"fast": "http://127.0.0.1:9"}, tracer=recorder.tracer, wait=False
    ) as served:
        served.mark("fast-0", "ready")
        assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 503
        assert [event.name for event in recorder.server().events] == ["dualgauge.retry"]


async def test_the_first_token_is_an_event(tmp_path: Path) -> None:
    recorder = Recorder.make()
    engine = FakeEngine(stream(CHAT.stream))
    async with engines(engine), serving(tmp_path, {"fast": engine}, tracer=recorder.tracer) as served:
        await ask(served.port, CHAT.path, CHAT.ask(stream=True))
        (event,) = recorder.client().events
        assert event.name == "dualgauge.first_token"


async def test_every_name_is_ours_or_of_the_semantic_conventions(tmp_path: Path) -> None:
    recorder = Recorder.make(capture=True)
    engine = FakeEngine(stream(CHAT.stream))
    engine.scripts.append(reply({}, 500))
    async with engines(engine), serving(tmp_path, {"fast": engine}, tracer=recorder.tracer) as served:
        for _ in range(2):
            body = CHAT.ask(stream=True, n=2, temperature=1, max_tokens=3)
            await ask(served.port, CHAT.path, body, headers={"user-agent": "x"})
        modules = (
            gen_ai_attributes,
            error_attributes,
            http_attributes,
            network_attributes,
            server_attributes,
            url_attributes,
            user_agent_attributes,
        )
        known = {value for module in modules for value in vars(module).values() if isinstance(value, str)}
        used = {name for span in recorder.spans() for name in attributes(span)}
        assert "gen_ai.input.messages" in used
        assert "error.type" in used
        assert {name for name in used if not name.startswith("dualgauge.")} <= known
