"""Which engine answers what, by the gateway's headers and by the engines' own counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import httpx2
import pytest

from tests.engines_real.asks import CODE, CRITICAL, PROSE, SHAPES, chat
from tests.engines_real.pair import MODEL, Pair, until

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def client(pair: Pair) -> Iterator[httpx2.Client]:
    with pair.client() as client:
        yield client


def counts(pair: Pair, tier: str) -> tuple[float, ...]:
    """Requests finished and prompt tokens read, by the engine's own count."""
    return pair.metrics(tier, "vllm:request_success_total", "vllm:prompt_tokens_total")


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
@pytest.mark.parametrize(
    ("text", "headers", "tier", "rule"),
    [
        (PROSE, {}, "fast", "everything else"),
        (CODE, {}, "exact", "code"),
        (PROSE, CRITICAL, "exact", "critical stays exact"),
    ],
    ids=["prose", "code", "critical"],
)
def test_content_and_headers_decide(
    pair: Pair,
    client: httpx2.Client,
    name: str,
    stream: bool,
    text: str,
    headers: Mapping[str, str],
    tier: str,
    rule: str,
) -> None:
    shape = SHAPES[name]
    other = "exact" if tier == "fast" else "fast"
    before, elsewhere = counts(pair, tier), counts(pair, other)
    body = {"model": MODEL, "stream": stream, **shape.body(text)}
    reply = client.post(shape.path, json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-dualgauge-tier"] == tier
    assert reply.headers["x-dualgauge-rule"] == rule
    assert "x-dualgauge-degraded" not in reply.headers
    until("the engine counts the request", lambda: counts(pair, tier)[0] == before[0] + 1, 10)
    assert counts(pair, other) == elsewhere
    if not stream:
        assert counts(pair, tier)[1] == before[1] + shape.counted(reply.json())[0]


def test_a_field_of_metadata_makes_a_request_critical(client: httpx2.Client) -> None:
    reply = client.post("/v1/chat/completions", json=chat(metadata={"critical": "true"}))
    assert reply.headers["x-dualgauge-rule"] == "critical stays exact"


def test_a_pinned_name_wins_over_the_rules(client: httpx2.Client) -> None:
    code = client.post("/v1/chat/completions", json=chat(CODE, f"{MODEL}:fast"))
    assert (code.headers["x-dualgauge-tier"], code.headers["x-dualgauge-rule"]) == ("fast", "pinned")
    prose = client.post("/v1/chat/completions", json=chat(PROSE, f"{MODEL}:exact"))
    assert (prose.headers["x-dualgauge-tier"], prose.headers["x-dualgauge-rule"]) == ("exact", "pinned")


def test_the_replys_model_is_the_engines_own_name(client: httpx2.Client) -> None:
    reply = client.post("/v1/chat/completions", json=chat(model=f"{MODEL}:exact"))
    assert reply.json()["model"] == MODEL
