"""OpenTelemetry traces: ids at the start, spans at the end.

Ids are drawn when a request arrives, so that the engine's span can hang below ours; spans are built only for
requests that are exported, when they end. An unsampled request costs one random number and one line. A dead
or slow collector costs dropped spans, and nothing else.
"""

from __future__ import annotations

import logging
import random
import re
import threading
from collections.abc import Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING

from gateway.relay.client import Client
from gateway.telemetry.export import Exporter, Later, Sender, otlp_exporter, shown
from gateway.telemetry.record import GOOD, Record, TraceIds

if TYPE_CHECKING:
    from gateway.telemetry.spans import Asked, Builder

logger = logging.getLogger("dualgauge.traces")

# https://www.w3.org/TR/trace-context/#traceparent-header
TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
INVALID_VERSION = b"ff"
NO_TRACE, NO_SPAN = b"0" * 32, b"0" * 16
SAMPLED = 1
# https://www.w3.org/TR/trace-context/#tracestate-header
STATE_KEY = rb"[a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13}"
STATE_VALUE = rb"[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
STATE_MEMBER = re.compile(rb"(%b)=%b" % (STATE_KEY, STATE_VALUE))
MOST_MEMBERS = 32
SETTLED_SECONDS = 0.5


def read_traceparent(value: bytes) -> tuple[bytes, bytes, bool] | None:
    """(trace id, span id, sampled) of a caller's header, None where it is not valid."""
    match = TRACEPARENT.fullmatch(value)
    if match is None or match[1] == INVALID_VERSION or (match[1] == b"00" and match[5]):
        return None
    trace, span = match[2], match[3]
    if trace == NO_TRACE or span == NO_SPAN:
        return None
    return trace, span, bool(int(match[4], 16) & SAMPLED)


def read_tracestate(value: bytes) -> bytes | None:
    """A caller's header as it goes on, None where it is not valid: whoever gets such a one would log it."""
    members = [member for part in value.split(b",") if (member := part.strip(b" \t"))]
    found = [STATE_MEMBER.fullmatch(member) for member in members[: MOST_MEMBERS + 1]]
    keys = {match[1] for match in found if match is not None}
    if not members or len(members) > MOST_MEMBERS or len(keys) < len(members):
        return None
    return b",".join(members)


class Tracer:
    """`exporter` is OpenTelemetry's, `where` its collector as the log names it. `sample` (0..1) is the share
    of requests traced where the caller says nothing, `rand` draws ids. With `capture`, spans hold prompts and
    replies."""

    def __init__(
        self,
        exporter: Exporter,
        sample: float,
        rand: random.Random,
        *,
        capture: bool = False,
        where: str = "the collector",
    ) -> None:
        self.sender = Sender(exporter, where)
        self.capture = capture
        self._sample = sample
        self._rand = rand
        # OpenTelemetry's SDK takes a twentieth of a start: it is loaded on another thread, once that is over.
        self._loading = threading.Timer(SETTLED_SECONDS, lambda: self._builder)
        self._loading.daemon = True
        self._loading.start()

    @cached_property
    def _builder(self) -> Builder:
        from gateway.telemetry.spans import Builder

        return Builder(self._rand, capture=self.capture)

    def begin(self, headers: Mapping[bytes, bytes], own: bytes) -> TraceIds:
        """Ids of a new request: the caller's trace continued where it sent one, and its flag obeyed. `own` is
        32 random hexadecimal digits: the trace's id, where it begins here, and half of it the span's."""
        sent = headers.get(b"traceparent")
        parent = None if sent is None else read_traceparent(sent)
        if parent is not None:
            state = headers.get(b"tracestate")
            kept = None if state is None else read_tracestate(state)
            return TraceIds(parent[0], own[16:], parent[1], parent[2], kept)
        return TraceIds(own, own[16:], None, self._rand.random() < self._sample)

    def finish(self, record: Record, client: Client, asked: Asked | None) -> None:
        """Export the spans of a sampled request, and of every one that failed or was degraded."""
        ids = record.trace
        if ids is None or not (ids.sampled or record.degraded or record.outcome not in GOOD):
            return
        try:
            spans = self._builder.spans(record, ids, client, asked)
        except Exception:
            # Whatever a client has sent: its request has ended well, and must go on to end so.
            logger.exception("request %s has no spans", record.request_id)
            return
        self.sender.put(spans)

    def close(self) -> None:
        """Send what is left, for two seconds at most."""
        self._loading.cancel()
        self.sender.close()


def traceparent(ids: TraceIds) -> bytes:
    """The header line for an engine: its span becomes a child of our client span."""
    flags = b"01" if ids.sampled else b"00"
    return b"traceparent: 00-%b-%b-%b\r\n" % (ids.trace, ids.client_span, flags)


def otlp_tracer(endpoint: str, sample: float, rand: random.Random, *, capture: bool = False) -> Tracer:
    """Traces to an OTLP collector; see `otlp_exporter` for its url."""
    exporter = Later(partial(otlp_exporter, endpoint))
    return Tracer(exporter, sample, rand, capture=capture, where=shown(endpoint))
