"""OTLP receivers that a test can read: over HTTP and over gRPC, on real sockets."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.engine import Exchange, FakeEngine, engines, reply

PROTOBUF = "application/x-protobuf"


@dataclass
class Received:
    """What came, and where a gateway sends it to."""

    url: str = ""
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)

    def spans(self) -> list[Span]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@contextlib.asynccontextmanager
async def over_http() -> AsyncIterator[Received]:
    received = Received()
    taken = reply(ExportTraceServiceResponse().SerializeToString(), content_type=PROTOBUF)

    async def script(exchange: Exchange) -> None:
        request = exchange.received
        assert (request.path, request.headers["content-type"]) == ("/v1/traces", PROTOBUF)
        received.requests.append(ExportTraceServiceRequest.FromString(request.body))
        await taken(exchange)

    collector = FakeEngine(script)
    async with engines(collector):
        received.url = collector.url
        yield received


@contextlib.asynccontextmanager
async def over_grpc() -> AsyncIterator[Received]:
    with grpc_collector() as received:
        yield received


@contextlib.contextmanager
def grpc_collector() -> Iterator[Received]:
    received = Received()

    class Service(TraceServiceServicer):  # type: ignore[misc]
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
            received.requests.append(request)
            return ExportTraceServiceResponse()

    with ThreadPoolExecutor(2) as workers:
        server = grpc.server(workers)
        add_TraceServiceServicer_to_server(Service(), server)
        received.url = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield received
        finally:
            server.stop(0).wait()
