"""Traces: whose child is whose, what is exported, and what is in a span."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.trace import SpanKind, StatusCode

from gateway.telemetry.traces import read_traceparent
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


async def test_c27_over_otlp(tmp_path: Path) -> None:
    engine, collector = (
        FakeEngine(reply(CHAT.reply)),
        FakeEngine(reply(b"", content_type="application/x-protobuf")),
    )
    async with engines(engine, collector):
        telemetry = {"otlp": collector.url, "sample": 0}
        async with serving(tmp_path, {"fast": engine}, telemetry=telemetry) as served:
            headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
            assert (await ask(served.port, CHAT.path, CHAT.ask(), headers=headers)).status == 200
        # What is left is sent when the gateway ends.
        assert collector.last.path == "/v1/traces"
        assert collector.last.headers["content-type"] == "application/x-protobuf"
        (resource,) = ExportTraceServiceRequest.FromString(collector.last.body).resource_spans
        names = {a.key: a.value.string_value for a in resource.resource.attributes}
        assert names["service.name"] == "dualgauge"
        (scope,) = resource.scope_spans
        spans = {span.name: span for span in scope.spans}
        server, client = spans["POST /v1/chat/completions"], spans["chat smollm2"]
        assert server.trace_id.hex() == client.trace_id.hex() == TRACE
        assert server.parent_span_id.hex() == SPAN
        assert client.parent_span_id == server.span_id
        assert sent(engine)[1] == client.span_id.hex()


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
        (1.0, "00", 0, "00"),
        (0.0, "01", 2, "01"),
        (0.0, None, 0, "00"),
        (1.0, None, 2, "01"),
        (0.0, "ff", 2, "01"),
    ],
)
async def test_the_callers_flag_decides_else_the_configured_share(
    tmp_path: Path, sample: float, flags: str | None, exported: int, told: str
) -> None:
    recorder = Recorder.make(sample)
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}, tracer=recorder.tracer) as served:
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-{flags}"} if flags else {}
        await ask(served.port, CHAT.path, CHAT.ask(), headers=headers)
        assert len(recorder.spans()) == exported
        assert sent(engine)[2] == told


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (f"00-{TRACE}-{SPAN}-01", (int(TRACE, 16), int(SPAN, 16), True)),
        (f"00-{TRACE}-{SPAN}-00", (int(TRACE, 16), int(SPAN, 16), False)),
        (f"01-{TRACE}-{SPAN}-01-more", (int(TRACE, 16), int(SPAN, 16), True)),
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


async def test_what_is_in_the_spans(tmp_path: Path) -> None:
    recorder = Recorder.make()
    engine = FakeEngine(stream(CHAT.stream))
    keys = "keys: [{name: ci, key: sk-secret}]"
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}, tracer=recorder.tracer, keys=keys) as served,
    ):
        headers = {"x-api-key": "sk-secret"}
        await ask(served.port, CHAT.path + "?a=b", CHAT.ask(stream=True), headers=headers)
        server, client = recorder.server(), recorder.client()
        assert (server.name, server.kind) == ("POST /v1/chat/completions", SpanKind.SERVER)
        assert (client.name, client.kind) == ("chat smollm2", SpanKind.CLIENT)
        own = {
            "dualgauge.tier": "fast",
            "dualgauge.engine": "fast-0",
            "dualgauge.precision": "awq",
            "dualgauge.rule": "everything else",
            "dualgauge.reason": "no rule before it held",
            "dualgauge.policy_hash": served.gateway.snapshot.policy.hash,
            "dualgauge.tenant": "ci",
            "dualgauge.degraded": False,
        }
        assert dict(server.attributes or {}) == {
            "http.request.method": "POST",
            "http.route": "/v1/chat/completions",
            "http.response.status_code": 200,
            **own,
        }
        assert dict(client.attributes or {}) == {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "vllm",
            "gen_ai.request.model": "smollm2",
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


async def test_a_dead_collector_costs_no_request_and_a_short_end(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine):
        telemetry = {"otlp": "http://127.0.0.1:9", "sample": 1.0}
        loop = asyncio.get_running_loop()
        async with serving(tmp_path, {"fast": engine}, telemetry=telemetry) as served:
            for _ in range(20):
                assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 200
            ending = loop.time()
        assert loop.time() - ending < 5


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
                served.gateway.metrics.text().decode(),
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
        assert len(recorder.spans()) == 2
        assert sent(engine)[2] == "01"
