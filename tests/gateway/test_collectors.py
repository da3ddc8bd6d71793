"""Spans on their way to a collector: both protocols, and every way in which one fails."""

import contextlib
import importlib.util
import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.config import parse, speaks_grpc
from gateway.telemetry import export
from gateway.telemetry.export import MAX_QUEUE, Later, Sender, otlp_exporter, shown
from gateway.telemetry.traces import Tracer
from policies.document import ProblemsError
from tests.support.client import ask, until
from tests.support.collector import Received, over_grpc, over_http
from tests.support.engine import FakeEngine, engines, hang, reply
from tests.support.serving import deployment, serving
from tests.support.shapes import CHAT

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
Listening = Callable[[], AbstractAsyncContextManager[Received]]


@pytest.mark.parametrize("listening", [over_http, over_grpc])
async def test_c27_over_otlp(tmp_path: Path, listening: Listening) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), listening() as collector:
        telemetry = {"otlp": collector.url, "sample": 0}
        async with serving(tmp_path, {"fast": engine}, telemetry=telemetry) as served:
            headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=b"}
            assert (await ask(served.port, CHAT.path, CHAT.ask(), headers=headers)).status == 200
        # What is left is sent when the gateway ends.
        spans = {span.name: span for span in collector.spans()}
        server, client = spans["POST /v1/chat/completions"], spans["chat smollm2"]
        assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
        assert server.parent_span_id.hex() == SPAN
        assert server.trace_state == "a=b"
        assert client.parent_span_id == spans["decide"].parent_span_id == server.span_id
        assert engine.last.headers["traceparent"] == f"00-{TRACE}-{client.span_id.hex()}-01"
        (resource,) = collector.requests[0].resource_spans
        names = {a.key: a.value.string_value for a in resource.resource.attributes}
        assert names["service.name"] == "dualgauge"
        assert names["service.version"]


@pytest.mark.parametrize(
    ("url", "grpc"),
    [
        ("http://h:4318", False),
        ("https://h", False),
        ("http://h:4317/v1/traces", False),
        ("http://h:4317", True),
        ("https://h:4317/", True),
        ("grpc://h:1", True),
        ("grpcs://h", True),
    ],
)
def test_which_protocol_a_url_means(url: str, grpc: bool) -> None:
    assert speaks_grpc(url) is grpc


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://h:4318", "http://h:4318/v1/traces"),
        ("http://h:4318/", "http://h:4318/v1/traces"),
        ("http://h/base/v1/traces", "http://h/base/v1/traces"),
        ("grpc://h:1", "h:1"),
        ("http://h:4317", "h:4317"),
    ],
)
def test_where_spans_are_sent_to(url: str, endpoint: str) -> None:
    exporter: Any = otlp_exporter(url)
    assert exporter._endpoint == endpoint
    exporter.shutdown()


def test_an_exporter_is_made_where_spans_are_first_sent() -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(InMemorySpanExporter())
        return made[0]

    later = Later(make)
    assert not made
    later.export([])
    later.export([])
    later.shutdown()
    assert len(made) == 1


def test_an_exporter_that_was_never_needed_is_not_made() -> None:
    def make() -> Any:
        raise AssertionError("nothing was sent")

    Later(make).shutdown()


def test_a_password_of_a_collector_is_not_shown() -> None:
    assert shown("http://me:secret@h:4318/x") == "http://h:4318/x"


@pytest.fixture
def root() -> Iterator[list[logging.LogRecord]]:
    """What reaches the root logger; pytest's own fixture listens to loggers that do not propagate, too."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    yield records
    logging.getLogger().removeHandler(handler)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "grpc://127.0.0.1:9"])
async def test_a_dead_collector_costs_spans_and_one_line(
    tmp_path: Path, root: list[logging.LogRecord], url: str
) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine):
        telemetry = {"otlp": url, "sample": 1.0}
        async with serving(tmp_path, {"fast": engine}, telemetry=telemetry) as served:
            tracer = served.gateway.tracer
            assert tracer is not None
            for wanted in (4, 8):
                assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 200
                await until(partial(dropped, tracer, wanted), 10)
    (line,) = [r for r in root if r.name != "dualgauge.gateway" and r.levelno >= logging.WARNING]
    assert line.getMessage().startswith(f"traces cannot be sent to {url}, spans are dropped: ")


def dropped(tracer: Tracer, wanted: int) -> bool:
    return tracer.sender.dropped == wanted


async def test_a_collector_that_never_answers_does_not_hold_up_the_end(tmp_path: Path) -> None:
    engine, collector = FakeEngine(reply(CHAT.reply)), FakeEngine(hang)
    async with engines(engine, collector):
        telemetry = {"otlp": collector.url, "sample": 1.0}
        async with serving(tmp_path, {"fast": engine}, telemetry=telemetry) as served:
            assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 200
            await until(lambda: collector.generations == 1)


def span() -> ReadableSpan:
    """One that can be sent."""
    ended = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(ended))
    provider.get_tracer("test").start_span("x").end()
    return ended.get_finished_spans()[0]


class Answers(BaseHTTPRequestHandler):
    """A collector whose answer is `heads`, and then `again` without an end."""

    heads = again = b""
    pause = 0.0

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.wfile.write(b"HTTP/1.1 " + self.heads)
        with contextlib.suppress(OSError):
            while self.again:
                self.wfile.write(self.again)
                time.sleep(self.pause)


@pytest.mark.parametrize(
    ("heads", "again", "pause", "why"),
    [
        (
            b"308 Permanent Redirect\r\nlocation: https://h/v1/traces\r\ncontent-length: 0\r\n\r\n",
            b"",
            0.0,
            "it redirects to https://h/v1/traces, name that in `telemetry.otlp`",
        ),
        (b"304 Not Modified\r\n\r\n", b"", 0.0, "it redirects to nowhere"),
        (b"200 OK\r\n\r\n", b"x" * 1000, 0.0, "its answer does not end"),
        (b"200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"1\r\nx\r\n", 0.1, "its answer does not end"),
        (b"200 OK\r\ncontent-length: 1000\r\n\r\n", b"x", 0.1, "its answer does not end"),
        (b"200 OK\r\ncontent-length: 2\r\n\r\nhi", b"", 0.0, None),
    ],
)
def test_an_answer_that_is_none_costs_spans(
    monkeypatch: pytest.MonkeyPatch,
    root: list[logging.LogRecord],
    heads: bytes,
    again: bytes,
    pause: float,
    why: str | None,
) -> None:
    monkeypatch.setattr(export, "EXPORT_SECONDS", 0.5)
    kind = type("Some", (Answers,), {"heads": heads, "again": again, "pause": pause})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sender = Sender(otlp_exporter(f"http://127.0.0.1:{server.server_port}"), "it")
        began = time.monotonic()
        sender.put([span()])
        sender.flush()
        sender.close()
        server.shutdown()
    assert time.monotonic() - began < 5
    assert (sender.sent, sender.dropped) == ((1, 0) if why is None else (0, 1))
    told = [r.getMessage() for r in root]
    assert len(told) == (why is not None)
    assert why is None or why in told[0]


class Exporter(SpanExporter):
    """Takes spans while `open` is set, a batch at a time; fails with `problem`, where there is one."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.problem: Exception | None = None
        self.taken = 0
        self.ended = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.open.wait(10)
        if self.problem is not None:
            raise self.problem
        self.taken += len(spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.ended = True


def test_a_slow_collector_costs_what_does_not_fit_into_the_queue(root: list[logging.LogRecord]) -> None:
    exporter = Exporter()
    exporter.open.clear()
    sender = Sender(exporter, "it")
    spans = [ReadableSpan("x")] * 5
    for _ in range(MAX_QUEUE):
        sender.put(spans)
    assert len(sender._queue) <= MAX_QUEUE
    exporter.open.set()
    sender.close()
    assert sender.dropped > 0
    assert sender.sent + sender.dropped == 5 * MAX_QUEUE
    assert exporter.taken == sender.sent
    assert exporter.ended
    assert [r.getMessage() for r in root] == ["it takes spans more slowly than they come: some are dropped"]


def test_a_collector_that_is_back_is_told_once(root: list[logging.LogRecord]) -> None:
    exporter = Exporter()
    sender = Sender(exporter, "it")
    for problem in (OSError("no"), OSError("no"), None, None):
        exporter.problem = problem
        sender.put([ReadableSpan("x")])
        sender.flush()
    sender.close()
    assert [r.getMessage() for r in root] == [
        "traces cannot be sent to it, spans are dropped: OSError: no",
        "traces are sent to it again, 2 spans were dropped",
    ]
    assert (sender.sent, sender.dropped) == (2, 2)


def test_what_comes_after_the_end_is_dropped() -> None:
    exporter = Exporter()
    tracer = Tracer(exporter, 1.0, random.Random(1))
    tracer.close()
    tracer.sender.put([ReadableSpan("x")])
    assert (exporter.taken, tracer.sender.dropped) == (0, 1)


def test_grpc_without_its_package_is_told_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    text = json.dumps(deployment({"fast": "http://127.0.0.1:9"}, telemetry={"otlp": "grpc://127.0.0.1:4317"}))
    with pytest.raises(ProblemsError, match=r"pip install 'dualgauge\[grpc\]'"):
        parse(text, tmp_path / "dualgauge.yaml", {})
