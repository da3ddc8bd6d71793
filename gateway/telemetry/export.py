"""Sends spans to a collector from a thread of its own.

Whoever hands over spans never waits. Where the collector is down, slow or refuses, spans are dropped and
counted, and two lines tell it: one when that begins, one when it has ended.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from gateway.config import speaks_grpc

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

logger = logging.getLogger("dualgauge.traces")

MAX_QUEUE = 2048
# Encoding a batch holds up the event loop: few at a time, unless there are so many that round trips count.
BATCH = 128
LARGE_BATCH = 256
MANY = 512
EVERY_SECONDS = 2.0
EXPORT_SECONDS = 2.0
# So that waiting for the thread and closing the exporter take two seconds together.
END_SECONDS = 1.8
# https://opentelemetry.io/docs/specs/otlp/#otlphttp-request
HTTP_PATH = "/v1/traces"
CREDENTIALS = (
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER",
)
"""Variables with which OpenTelemetry's exporter makes a session itself."""
SILENT = logging.NullHandler()


class Exporter(Protocol):
    """What a `Sender` asks of OpenTelemetry's exporters."""

    def export(self, spans: Sequence[ReadableSpan], /) -> SpanExportResult: ...
    def shutdown(self) -> None: ...


class Sender:
    """`where` names the collector in the log. `dropped` counts spans that were lost, `sent` those that were
    taken."""

    def __init__(self, exporter: Exporter, where: str) -> None:
        self._exporter = exporter
        self._where = where
        self._queue: deque[ReadableSpan] = deque()
        self._overflown = 0
        self._refused = 0
        self.sent = 0
        self._failing = False
        self._full = False
        self._ending = False
        self._wake = threading.Event()
        self._sending = threading.Lock()
        self._reasons = _Reasons()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        return self._overflown + self._refused

    def put(self, spans: Sequence[ReadableSpan]) -> None:
        """The spans of one request: all of them, or none where the queue is full."""
        queue = self._queue
        if self._ending or len(queue) + len(spans) > MAX_QUEUE:
            self._overflown += len(spans)
            if not self._full and not self._ending:
                self._full = True
                logger.warning("%s takes spans more slowly than they come: some are dropped", self._where)
            return
        queue.extend(spans)
        if len(queue) >= BATCH:
            self._wake.set()

    def flush(self) -> None:
        """Send what is there, on the calling thread."""
        while self._queue:
            self._send()

    def close(self) -> None:
        """Send what is left, for two seconds at most."""
        self._ending = True
        self._wake.set()
        self._thread.join(END_SECONDS)
        self._overflown += len(self._queue)
        self._queue.clear()
        self._exporter.shutdown()
        self._reasons.close()

    # the thread's side

    def _run(self) -> None:
        while not self._ending:
            self._wake.wait(EVERY_SECONDS)
            self._wake.clear()
            self.flush()

    def _send(self) -> None:
        with self._sending:
            batch = list(self._take())
            if batch:
                self._told(batch, self._export(batch))

    def _take(self) -> Iterator[ReadableSpan]:
        # While the collector fails, what is sent is lost: a few find out whether it is back.
        large = len(self._queue) >= MANY and not self._failing
        for _ in range(LARGE_BATCH if large else BATCH):
            try:
                yield self._queue.popleft()
            except IndexError:
                return

    def _export(self, batch: Sequence[ReadableSpan]) -> str | None:
        """None, or why they were not taken."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._reasons.last = ""
        try:
            if self._exporter.export(batch) is SpanExportResult.SUCCESS:
                return None
        except Exception as error:  # noqa: BLE001 - whatever an exporter meets costs spans, and nothing else
            return f"{type(error).__name__}: {error}"
        return self._reasons.last or "it did not take them"

    def _told(self, batch: Sequence[ReadableSpan], problem: str | None) -> None:
        if problem is not None:
            self._refused += len(batch)
            if not self._failing and not self._ending:
                self._failing = True
                logger.warning("traces cannot be sent to %s, spans are dropped: %s", self._where, problem)
            return
        self.sent += len(batch)
        if self._failing:
            self._failing = False
            logger.warning("traces are sent to %s again, %d spans were dropped", self._where, self.dropped)
        if self._full and len(self._queue) < MANY:
            self._full = False


class _Reasons(logging.Handler):
    """Keeps what exporters say of their failures out of the log, which would have several lines a second."""

    def __init__(self) -> None:
        super().__init__()
        self.last = ""
        self._of = logging.getLogger("opentelemetry.exporter")
        self._of.addHandler(self)
        self._of.propagate = False
        # What is said after the end, when nobody listens, would go to standard error.
        self._of.addHandler(SILENT)

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()

    def close(self) -> None:
        self._of.removeHandler(self)
        super().close()


class Later:
    """An exporter that is made where the first spans are sent, on the thread that sends them: what it brings
    along takes a tenth of a start, and more memory than all spans."""

    def __init__(self, make: Callable[[], SpanExporter]) -> None:
        self._make = make
        self._made: SpanExporter | None = None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._made is None:
            self._made = self._make()
        return self._made.export(spans)

    def shutdown(self) -> None:
        if self._made is not None:
            self._made.shutdown()


def otlp_exporter(url: str) -> SpanExporter:
    """An exporter to `http(s)://host:port[/path]`, OTLP over HTTP, or to `grpc(s)://host:port` (or any port
    4317), OTLP over gRPC. Headers, certificates and compression come from OpenTelemetry's own environment
    variables (`OTEL_EXPORTER_OTLP_HEADERS`)."""
    parts = urlsplit(url)
    if speaks_grpc(url):
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

        plain = parts.scheme in ("grpc", "http")
        return OverGrpc(
            endpoint=f"{'http' if plain else 'https'}://{parts.netloc}",
            insecure=plain,
            timeout=EXPORT_SECONDS,
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

    from gateway.telemetry.answers import Session

    whole = url if parts.path.endswith(HTTP_PATH) else url.rstrip("/") + HTTP_PATH
    # An operator's own session knows how to sign in to a collector.
    own = any(os.environ.get(name) for name in CREDENTIALS)
    return OverHttp(endpoint=whole, timeout=EXPORT_SECONDS, session=None if own else Session(EXPORT_SECONDS))


def shown(url: str) -> str:
    """A collector's url without a user's name or password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
