"""A session with OpenAI's Python SDK."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.engines_real.pair import MODEL
from tests.sdk.conftest import Recovering
from tests.sdk.front import CITY, CODE, CRITICAL, KEY, LONG, PROSE, SCHEMA, SINGLE_KEY, SMALL_KEY, Front

PROMPT = [{"role": "user", "content": PROSE}]


def client(front: Front, key: str = KEY, retries: int = 0, on: Callable[[int], None] | None = None) -> OpenAI:
    """`on` hears of the status of each reply, those that the SDK tries again included."""
    hooks = {} if on is None else {"response": [lambda reply: on(reply.status_code)]}
    http = openai.DefaultHttpxClient(event_hooks=hooks, trust_env=False)
    return OpenAI(base_url=front.url, api_key=key, max_retries=retries, http_client=http)


@pytest.fixture
def ai(front: Front) -> Iterator[OpenAI]:
    with client(front) as sdk:
        yield sdk


@pytest.fixture
def refused(lone: Front) -> Iterator[OpenAI]:
    with client(lone) as sdk:
        yield sdk


def test_it_lists_the_routed_and_the_pinned_names(refused: OpenAI) -> None:
    assert [model.id for model in refused.models.list()] == [MODEL, f"{MODEL}:fast", f"{MODEL}:exact"]
    assert refused.models.retrieve(f"{MODEL}:exact").id == f"{MODEL}:exact"


def test_a_chat_completion(ai: OpenAI) -> None:
    reply = ai.chat.completions.create(model=MODEL, messages=PROMPT, max_tokens=8)
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason in ("length", "stop")
    assert reply.usage is not None
    assert 0 < reply.usage.completion_tokens <= 8
    assert reply._request_id is not None
    assert reply.id == f"chatcmpl-{reply._request_id}"


def test_headers_of_a_raw_reply_tell_the_decision(ai: OpenAI) -> None:
    raw = ai.chat.completions.with_raw_response
    prose = raw.create(model=MODEL, messages=PROMPT, max_tokens=4)
    code = raw.create(model=MODEL, messages=[{"role": "user", "content": CODE}], max_tokens=4)
    critical = raw.create(model=MODEL, messages=PROMPT, max_tokens=4, extra_headers=CRITICAL)
    pinned = raw.create(model=f"{MODEL}:exact", messages=PROMPT, max_tokens=4)
    decided = [
        (r.headers["x-dualgauge-tier"], r.headers["x-dualgauge-rule"])
        for r in (prose, code, critical, pinned)
    ]
    assert decided == [
        ("fast", "everything else"),
        ("exact", "code"),
        ("exact", "critical stays exact"),
        ("exact", "pinned"),
    ]
    assert prose.headers["x-ratelimit-limit-requests"] == "1000"
    assert int(prose.headers["x-ratelimit-remaining-tokens"]) < 1_000_000
    assert prose.headers["x-request-id"] == prose.parse()._request_id


def test_a_stream_without_usage(ai: OpenAI) -> None:
    with ai.chat.completions.create(model=MODEL, messages=PROMPT, max_tokens=8, stream=True) as stream:
        chunks = list(stream)
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason in ("length", "stop")


def test_a_stream_with_usage(ai: OpenAI) -> None:
    chunks = list(
        ai.chat.completions.create(
            model=MODEL, messages=PROMPT, max_tokens=8, stream=True, stream_options={"include_usage": True}
        )
    )
    counted = [chunk for chunk in chunks if chunk.usage is not None]
    assert counted == chunks[-1:]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert 0 < chunks[-1].usage.completion_tokens <= 8


def test_a_streams_headers(ai: OpenAI) -> None:
    create = ai.chat.completions.with_streaming_response.create
    with create(model=f"{MODEL}:fast", messages=PROMPT, max_tokens=4, stream=True) as reply:
        assert reply.headers["x-dualgauge-engine"] == "fast-0"
        assert reply.headers["x-dualgauge-precision"] == "awq"
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert "x-request-id" in reply.headers


def test_tools_reach_the_engine(ai: OpenAI) -> None:
    reply = ai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
        tools=[{"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_tokens=64,
    )
    (call,) = reply.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")


def test_streamed_tool_calls(ai: OpenAI) -> None:
    with ai.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
        tools=[{"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}],
        tool_choice="required",
        max_tokens=64,
    ) as stream:
        stream.until_done()
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")


def test_a_json_schema_binds_the_reply(ai: OpenAI) -> None:
    reply = ai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Is water wet? Answer in JSON."}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
        },
        max_tokens=64,
        temperature=0,
    )
    assert json.loads(reply.choices[0].message.content or "")["answer"] in ("yes", "no")


class Answer(BaseModel):
    answer: Literal["yes", "no"]


def test_parse_with_a_model_of_pydantics(ai: OpenAI) -> None:
    reply = ai.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Is water wet? Answer in JSON."}],
        response_format=Answer,
        max_tokens=64,
        temperature=0,
    )
    assert isinstance(reply.choices[0].message.parsed, Answer)


def test_a_legacy_completion(ai: OpenAI) -> None:
    reply = ai.completions.create(model=MODEL, prompt="The capital of Norway is", max_tokens=4)
    assert reply.usage is not None
    assert 0 < reply.usage.completion_tokens <= 4


def test_a_response_and_its_retrieval(ai: OpenAI) -> None:
    made = ai.responses.create(model=f"{MODEL}:exact", input=PROSE, max_output_tokens=6, store=True)
    assert made.usage is not None
    assert 0 < made.usage.output_tokens <= 6
    assert ai.responses.retrieve(made.id).output_text == made.output_text


def test_a_streamed_response(ai: OpenAI) -> None:
    events = list(
        ai.responses.create(model=MODEL, input=PROSE, max_output_tokens=6, temperature=0, stream=True)
    )
    assert events[0].type == "response.created"
    assert "response.output_text.delta" in [event.type for event in events]
    assert events[-1].type in ("response.completed", "response.incomplete")


def test_an_unknown_key(lone: Front) -> None:
    with client(lone, key="sk-wrong") as sdk, pytest.raises(openai.AuthenticationError) as raised:
        sdk.chat.completions.create(model=MODEL, messages=PROMPT)
    assert raised.value.code == "invalid_api_key"
    assert raised.value.request_id is not None


def test_an_unknown_model(refused: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        refused.chat.completions.create(model="gpt-4o", messages=PROMPT)
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")


def test_a_wrong_type(refused: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        refused.chat.completions.create(model=MODEL, messages=PROMPT, extra_body={"max_tokens": "many"})
    assert raised.value.param == "max_tokens"


def test_what_the_engine_refuses(ai: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as raised:
        ai.chat.completions.create(model=MODEL, messages=PROMPT, temperature=-1)
    assert raised.value.param == "temperature"


def test_a_request_beyond_its_plan(lone: Front) -> None:
    with client(lone, key=SMALL_KEY) as sdk, pytest.raises(openai.RateLimitError) as raised:
        sdk.chat.completions.create(model=MODEL, messages=PROMPT, max_tokens=1000)
    assert raised.value.code == "request_exceeds_limit"


def test_no_engine(refused: OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as raised:
        refused.chat.completions.create(model=MODEL, messages=PROMPT, extra_headers=CRITICAL)
    assert raised.value.status_code == 503
    assert raised.value.code == "no_engine_ready"
    assert int(raised.value.response.headers["retry-after"]) > 0


def test_a_429_is_tried_again(front: Front) -> None:
    """The key's only slot is held by a stream, which ends once the second request was refused."""
    with client(front, SINGLE_KEY) as holder:
        held = holder.chat.completions.create(
            model=MODEL, messages=PROMPT, max_tokens=LONG, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(held))
        seen: list[int] = []

        def on(status: int) -> None:
            seen.append(status)
            held.close()

        with client(front, SINGLE_KEY, retries=3, on=on) as sdk:
            raw = sdk.chat.completions.with_raw_response.create(model=MODEL, messages=PROMPT, max_tokens=2)
    assert seen[0] == 429
    assert raw.status_code == 200
    assert raw.retries_taken >= 1


def test_a_503_is_tried_again(recovering: Recovering) -> None:
    """The exact engine comes up once a critical request was refused."""

    def on(status: int) -> None:
        seen.append(status)
        recovering.up()

    seen: list[int] = []
    with client(recovering.front, retries=3, on=on) as sdk:
        raw = sdk.chat.completions.with_raw_response.create(
            model=MODEL, messages=PROMPT, max_tokens=2, extra_headers=CRITICAL
        )
    assert seen[0] == 503
    assert raw.headers["x-dualgauge-tier"] == "exact"
    assert raw.retries_taken >= 1
