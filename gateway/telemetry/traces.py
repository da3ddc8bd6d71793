"""OpenTelemetry traces: ids at the start, spans at the end.

Ids are drawn when a request arrives, so that the engine's span can hang below ours; spans are built only for
requests that are exported, when they end. An unsampled request costs three random numbers. A dead or slow
collector costs dropped spans, and nothing else.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gateway.telemetry.record import Record, TraceIds

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

# https://www.w3.org/TR/trace-context/#traceparent-header
TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
INVALID_VERSION = b"ff"
SAMPLED = 1
EXPORT_SECONDS = 2.0
SERVER_ERROR = 500


def read_traceparent(value: bytes) -> tuple[int, int, bool] | None:
    """(trace id, span id, sampled) of a caller's header, None where it is not valid."""
    match = TRACEPARENT.fullmatch(value)
    if match is None or match[1] == INVALID_VERSION or (match[1] == b"00" and match[5]):
        return None
    trace, span = int(match[2], 16), int(match[3], 16)
    if not trace or not span:
        return None
    return trace, span, bool(int(match[4], 16) & SAMPLED)


class Tracer:
    """`exporter` is OpenTelemetry's; `rand` gives uniform numbers in [0, 1) and random bits."""

    def __init__(self, exporter: SpanExporter, sample: float, rand: random.Random) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._processor = BatchSpanProcessor(exporter, schedule_delay_millis=1000)
        self._resource = Resource.create({"service.name": "dualgauge"})
        self._scope = InstrumentationScope("dualgauge")
        self._sample = sample
        self._rand = rand

    def begin(self, headers: list[tuple[bytes, bytes]]) -> TraceIds:
        """Ids of a new request: the caller's trace continued where it sent one, and its flag obeyed."""
        parent = state = None
        for name, value in headers:
            if name == b"traceparent":
                parent = read_traceparent(value)
            elif name == b"tracestate":
                state = value
        rand = self._rand
        if parent is not None:
            return TraceIds(parent[0], _bits(rand, 64), _bits(rand, 64), parent[1], parent[2], state)
        sampled = rand.random() < self._sample
        return TraceIds(_bits(rand, 128), _bits(rand, 64), _bits(rand, 64), None, sampled)

    def finish(self, record: Record) -> None:
        """Export the spans of a sampled request, and of every failed or degraded one whose trace is ours."""
        ids = record.trace
        if ids is None:
            return
        failed = record.outcome not in ("ok", "cancelled", "client_error", "limited")
        if not ids.sampled and not (ids.parent_span is None and (failed or record.degraded)):
            return
        for span in self._spans(record, ids):
            self._processor.on_end(span)

    def _spans(self, record: Record, ids: TraceIds) -> list[ReadableSpan]:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        def context(span: int, *, remote: bool = False) -> SpanContext:
            return SpanContext(ids.trace, span, remote, TraceFlags(SAMPLED))

        def at(moment: float) -> int:
            return record.started_ns + round((moment - record.started) * 1e9)

        failed = record.status >= SERVER_ERROR or record.outcome in (
            "engine_error",
            "timeout",
            "internal_error",
        )
        status = Status(StatusCode.ERROR, record.error_code or None) if failed else Status(StatusCode.UNSET)
        parent = context(ids.parent_span, remote=True) if ids.parent_span is not None else None
        own = _own_attributes(record)
        http: dict[str, Any] = {
            "http.request.method": record.method,
            "http.route": record.route,
            "http.response.status_code": record.status,
            **own,
        }
        if record.outcome not in ("ok", "cancelled"):
            http["error.type"] = record.error_code or str(record.status)
        make: Callable[..., ReadableSpan] = ReadableSpan
        spans = [
            make(
                f"{record.method} {record.route}",
                context=context(ids.server_span),
                parent=parent,
                resource=self._resource,
                attributes=http,
                kind=SpanKind.SERVER,
                status=status,
                start_time=record.started_ns,
                end_time=at(record.ended),
                instrumentation_scope=self._scope,
            )
        ]
        if record.asked is not None:
            spans.append(
                make(
                    f"chat {record.model}",
                    context=context(ids.client_span),
                    parent=context(ids.server_span),
                    resource=self._resource,
                    attributes={**_genai_attributes(record), **own},
                    kind=SpanKind.CLIENT,
                    status=status,
                    start_time=at(record.asked),
                    end_time=at(record.ended),
                    instrumentation_scope=self._scope,
                )
            )
        return spans

    def close(self) -> None:
        """Send what is left, for two seconds at most."""
        self._processor._batch_processor.shutdown(timeout_millis=round(EXPORT_SECONDS * 1000))


def _bits(rand: random.Random, count: int) -> int:
    return rand.getrandbits(count) or 1


def traceparent(ids: TraceIds) -> bytes:
    """The header for an engine: its span becomes a child of our client span."""
    return b"00-%032x-%016x-%02x" % (ids.trace, ids.client_span, SAMPLED if ids.sampled else 0)


def _own_attributes(record: Record) -> dict[str, Any]:
    values = {
        "dualgauge.tier": record.tier,
        "dualgauge.engine": record.engine,
        "dualgauge.precision": record.precision,
        "dualgauge.rule": record.rule,
        "dualgauge.reason": "; ".join(filter(None, (record.reason, record.moved_because))),
        "dualgauge.policy_hash": record.policy_hash,
        "dualgauge.tenant": record.tenant,
        "dualgauge.edits": record.edits,
    }
    return {**{k: v for k, v in values.items() if v}, "dualgauge.degraded": record.degraded}


def _genai_attributes(record: Record) -> dict[str, Any]:
    # https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
    values: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": record.model,
    }
    if record.usage is not None:
        values["gen_ai.usage.input_tokens"] = record.usage.prompt
        values["gen_ai.usage.output_tokens"] = record.usage.completion
    return values


def otlp_tracer(endpoint: str, sample: float, rand: random.Random) -> Tracer:
    """Traces to an OTLP/HTTP collector at `http://host:port`."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    url = endpoint if endpoint.endswith("/v1/traces") else endpoint.rstrip("/") + "/v1/traces"
    return Tracer(OTLPSpanExporter(endpoint=url, timeout=EXPORT_SECONDS), sample, rand)
