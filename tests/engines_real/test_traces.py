"""One trace from a caller to the engine: what vLLM tells of a request hangs below the gateway's call."""

from __future__ import annotations

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.engines_real.asks import PROSE, chat
from tests.engines_real.pair import bring_up, free_port, until
from tests.support.collector import Received, grpc_collector

pytestmark = pytest.mark.engines

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
DEPLOYMENT = """
model: smollm2
tiers: [fast]
policy: policy.yaml
admin: 127.0.0.1:{admin}
telemetry: {{otlp: "{url}", sample: 0}}
engines:
  - name: fast-0
    tier: fast
    kind: vllm
    port: {port}
    model: demo/smollm2-135m-awq
    precision: awq
    args: [--enforce-eager, --max-model-len, "1024", --otlp-traces-endpoint, "{endpoint}"]
"""
POLICY = "version: 1\nrules: [{name: all, send: fast, if_unavailable: fail}]\n"


SERVER, CALL, INSIDE = "POST /v1/chat/completions", "chat smollm2", "llm_request"


def traced(collector: Received) -> dict[str, Span]:
    """The spans of the caller's trace that arrived so far."""
    return {span.name: span for span in collector.spans() if span.trace_id.hex() == TRACE}


def test_the_engines_span_hangs_below_the_gateways(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("traced")
    (folder / "policy.yaml").write_text(POLICY, encoding="utf-8")
    with grpc_collector() as collector:
        endpoint = collector.url.removeprefix("grpc://")
        deployment = DEPLOYMENT.format(
            url=collector.url, endpoint=f"http://{endpoint}", admin=free_port(), port=free_port()
        )
        with bring_up(folder, deployment) as up, up.client() as client:
            body = chat(PROSE)
            sampled = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
            client.post("/v1/chat/completions", json=body).raise_for_status()
            client.post("/v1/chat/completions", json=body, headers=sampled).raise_for_status()
            until("all spans arrive", lambda: traced(collector).keys() >= {SERVER, CALL, INSIDE}, 30)
        spans = traced(collector)
        server, call, inside = spans[SERVER], spans[CALL], spans[INSIDE]
        assert server.parent_span_id.hex() == CALLER
        assert call.parent_span_id == server.span_id
        assert inside.parent_span_id == call.span_id
        # The request that was not sampled has none; those without a parent are requests of `up`.
        below = [span for span in collector.spans() if span.name == INSIDE and span.parent_span_id]
        assert below == [inside]
