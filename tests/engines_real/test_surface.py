"""Every route that an engine answers, on both engines."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx2
import pytest

from tests.engines_real.asks import PROSE, SHAPES, TOKENS, chat, events
from tests.engines_real.pair import MODEL, Pair

pytestmark = pytest.mark.engines
TIERS = ("fast", "exact")
PRECISIONS = {"fast": "awq", "exact": "bf16"}


@pytest.fixture(scope="module")
def client(pair: Pair) -> Iterator[httpx2.Client]:
    with pair.client() as client:
        yield client


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("name", SHAPES)
def test_a_reply(client: httpx2.Client, tier: str, name: str) -> None:
    shape = SHAPES[name]
    reply = client.post(shape.path, json={"model": f"{MODEL}:{tier}", **shape.body(PROSE)})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-dualgauge-engine"] == f"{tier}-0"
    assert reply.headers["x-dualgauge-precision"] == PRECISIONS[tier]
    assert shape.text(reply.json())
    prompt, completion = shape.counted(reply.json())
    assert prompt > 0
    assert 0 < completion <= TOKENS


@pytest.mark.parametrize("name", SHAPES)
def test_a_stream(client: httpx2.Client, tier: str, name: str) -> None:
    shape = SHAPES[name]
    reply = client.post(shape.path, json={"model": f"{MODEL}:{tier}", "stream": True, **shape.body(PROSE)})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["x-dualgauge-tier"] == tier
    sent, done = events(reply.text)
    assert "".join(shape.deltas(sent))
    assert done == (name in ("chat", "completions"))


def test_pinned_names_are_listed(client: httpx2.Client) -> None:
    listed = [model["id"] for model in client.get("/v1/models").json()["data"]]
    assert listed == [MODEL, f"{MODEL}:fast", f"{MODEL}:exact"]


def test_tokens_there_and_back(client: httpx2.Client, tier: str) -> None:
    model = f"{MODEL}:{tier}"
    there = client.post("/tokenize", json={"model": model, "prompt": PROSE, "add_special_tokens": False})
    assert there.json()["count"] == len(there.json()["tokens"]) > 0
    back = client.post("/detokenize", json={"model": model, "tokens": there.json()["tokens"]})
    assert back.json()["prompt"] == PROSE
    assert back.headers["x-dualgauge-tier"] == tier


def test_counted_tokens_are_those_of_the_reply(client: httpx2.Client, tier: str) -> None:
    body = {"model": f"{MODEL}:{tier}", **SHAPES["messages"].body(PROSE)}
    counted = client.post("/v1/messages/count_tokens", json=body)
    reply = client.post("/v1/messages", json=body)
    assert counted.json()["input_tokens"] == reply.json()["usage"]["input_tokens"]


def test_a_stored_response_is_asked_of_the_engine_that_made_it(client: httpx2.Client, tier: str) -> None:
    body = {"model": f"{MODEL}:{tier}", **SHAPES["responses"].body(PROSE), "store": True}
    made = client.post("/v1/responses", json=body)
    found = client.get(f"/v1/responses/{made.json()['id']}")
    assert found.status_code == 200, found.text
    assert found.headers["x-dualgauge-engine"] == f"{tier}-0"
    assert found.json()["output"] == made.json()["output"]


def test_a_background_response_is_cancelled(client: httpx2.Client, tier: str) -> None:
    body = {"model": f"{MODEL}:{tier}", "input": PROSE, "max_output_tokens": 300, "background": True}
    made = client.post("/v1/responses", json={**body, "store": True})
    assert made.status_code == 200, made.text
    cancelled = client.post(f"/v1/responses/{made.json()['id']}/cancel")
    assert cancelled.status_code == 200, cancelled.text
    assert cancelled.json()["status"] == "cancelled"


def test_the_engines_have_no_embeddings(client: httpx2.Client, tier: str) -> None:
    reply = client.post("/v1/embeddings", json={"model": f"{MODEL}:{tier}", "input": PROSE})
    assert reply.status_code == 404
    assert reply.json()["error"]["message"]
    assert reply.headers["x-dualgauge-tier"] == tier


def test_a_json_schema_binds_the_reply(client: httpx2.Client, tier: str) -> None:
    schema = {
        "type": "object",
        "properties": {"answer": {"enum": ["yes", "no"]}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    asked = chat("Is water wet?", f"{MODEL}:{tier}", response_format=form, max_tokens=64, temperature=0)
    reply = client.post("/v1/chat/completions", json=asked)
    assert json.loads(reply.json()["choices"][0]["message"]["content"])["answer"] in ("yes", "no")


def test_tools_reach_the_engine(client: httpx2.Client, tier: str) -> None:
    city = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": city, "strict": True}}
    choice = {"type": "function", "function": {"name": "weather"}}
    asked = chat("The weather?", f"{MODEL}:{tier}", tools=[tool], tool_choice=choice, max_tokens=64)
    reply = client.post("/v1/chat/completions", json=asked)
    (call,) = reply.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")


def test_what_the_engine_refuses_is_told_in_its_words(client: httpx2.Client, tier: str) -> None:
    reply = client.post("/v1/chat/completions", json=chat(model=f"{MODEL}:{tier}", temperature=-1))
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "temperature"
    assert "non-negative" in reply.json()["error"]["message"]


def test_a_request_id_reaches_the_engine(client: httpx2.Client, tier: str) -> None:
    """vLLM makes the reply's id from the request id that it was sent."""
    reply = client.post("/v1/chat/completions", json=chat(model=f"{MODEL}:{tier}"))
    assert reply.json()["id"] == f"chatcmpl-{reply.headers['x-request-id']}"
