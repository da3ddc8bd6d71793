"""Traces that a test can read."""

from __future__ import annotations

import random
from dataclasses import dataclass

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from gateway.telemetry.traces import Tracer


@dataclass
class Recorder:
    """`tracer` is for the gateway; by default every request is sampled."""

    tracer: Tracer
    exporter: InMemorySpanExporter

    @classmethod
    def make(cls, sample: float = 1.0, *, capture: bool = False) -> Recorder:
        exporter = InMemorySpanExporter()
        return cls(Tracer(exporter, sample, random.Random(1), capture=capture), exporter)

    def spans(self) -> list[ReadableSpan]:
        """All that have ended so far."""
        self.tracer.sender.flush()
        return list(self.exporter.get_finished_spans())

    def server(self) -> ReadableSpan:
        """The only server span."""
        (span,) = [s for s in self.spans() if s.kind is SpanKind.SERVER]
        return span

    def inner(self, name: str) -> ReadableSpan:
        """The only span of this name."""
        (span,) = [s for s in self.spans() if s.name == name]
        return span

    def client(self) -> ReadableSpan:
        """The only span of an engine's call."""
        (span,) = [s for s in self.spans() if s.kind is SpanKind.CLIENT]
        return span
