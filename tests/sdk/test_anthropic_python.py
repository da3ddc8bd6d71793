"""A session with Anthropic's Python SDK."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import anthropic
import pytest
from anthropic import Anthropic

from tests.engines_real.pair import MODEL
from tests.sdk.conftest import Recovering
from tests.sdk.front import CITY, CODE, CRITICAL, KEY, LONG, PROSE, SINGLE_KEY, SMALL_KEY, Front

PROMPT = [{"role": "user", "content": PROSE}]
SYSTEM = [{"type": "text", "text": "Answer in one word."}, {"type": "text", "text": "Be kind."}]
COLD = {"temperature": 0}
WEATHER = {"name": "weather", "description": "The weather in a city", "input_schema": CITY, "strict": True}


def client(
    front: Front, key: str = KEY, retries: int = 0, on: Callable[[int], None] | None = None
) -> Anthropic:
    """`on` hears of the status of each reply, those that the SDK tries again included."""
    hooks = {} if on is None else {"response": [lambda reply: on(reply.status_code)]}
    http = anthropic.DefaultHttpxClient(event_hooks=hooks, trust_env=False)
    return Anthropic(base_url=front.base, api_key=key, max_retries=retries, http_client=http)


@pytest.fixture
def claude(front: Front) -> Iterator[Anthropic]:
    with client(front) as sdk:
        yield sdk


@pytest.fixture
def refused(lone: Front) -> Iterator[Anthropic]:
    with client(lone) as sdk:
        yield sdk


def test_a_message(claude: Anthropic) -> None:
    reply = claude.messages.create(model=MODEL, max_tokens=8, messages=PROMPT, system=SYSTEM)
    assert reply.role == "assistant"
    assert reply.stop_reason in ("max_tokens", "end_turn")
    assert reply.usage.input_tokens > 0
    assert 0 < reply.usage.output_tokens <= 8


def test_a_system_prompt_of_blocks_reaches_the_engine(claude: Anthropic) -> None:
    without = claude.messages.count_tokens(model=MODEL, messages=PROMPT)
    given = claude.messages.count_tokens(model=MODEL, messages=PROMPT, system=SYSTEM * 20)
    assert given.input_tokens > without.input_tokens > 0


def test_counted_tokens_are_those_that_are_billed(claude: Anthropic) -> None:
    counted = claude.messages.count_tokens(model=MODEL, messages=PROMPT)
    reply = claude.messages.create(model=MODEL, max_tokens=1, messages=PROMPT)
    assert reply.usage.input_tokens == counted.input_tokens


def test_headers_of_a_raw_reply_tell_the_decision(claude: Anthropic) -> None:
    raw = claude.messages.with_raw_response
    prose = raw.create(model=MODEL, max_tokens=2, messages=PROMPT)
    code = raw.create(model=MODEL, max_tokens=2, messages=[{"role": "user", "content": CODE}])
    critical = raw.create(model=MODEL, max_tokens=2, messages=PROMPT, extra_headers=CRITICAL)
    assert [r.headers["x-dualgauge-tier"] for r in (prose, code, critical)] == ["fast", "exact", "exact"]
    assert prose.headers["x-request-id"].startswith("req_")
    assert prose.headers["x-ratelimit-limit-requests"] == "1000"


def test_a_stream(claude: Anthropic) -> None:
    with claude.messages.stream(model=MODEL, max_tokens=8, messages=PROMPT, extra_body=COLD) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_message()
    assert events[0] == "message_start"
    assert events[-1] == "message_stop"
    assert "content_block_delta" in events
    assert 0 < final.usage.output_tokens <= 8
    assert final.usage.input_tokens > 0


def test_raw_events_of_a_stream(claude: Anthropic) -> None:
    with claude.messages.create(model=MODEL, max_tokens=4, messages=PROMPT, stream=True) as stream:
        assert stream.response.headers["x-dualgauge-tier"] == "fast"
        assert [event.type for event in stream][-2:] == ["message_delta", "message_stop"]


def test_tools_reach_the_engine(claude: Anthropic) -> None:
    reply = claude.messages.create(
        model=MODEL,
        max_tokens=64,
        messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
        tools=[WEATHER],
        tool_choice={"type": "tool", "name": "weather"},
    )
    (block,) = [block for block in reply.content if block.type == "tool_use"]
    assert block.name == "weather"
    assert block.input["city"] in ("Oslo", "Rome")


def test_the_beta_client(claude: Anthropic) -> None:
    """Claude Code's calls: a query string, and a header that names betas."""
    reply = claude.beta.messages.create(
        model=MODEL, max_tokens=2, messages=PROMPT, betas=["context-management-2025-06-27"]
    )
    assert reply.usage.output_tokens > 0


def test_an_unknown_key(lone: Front) -> None:
    with client(lone, key="sk-wrong") as sdk, pytest.raises(anthropic.AuthenticationError) as raised:
        sdk.messages.create(model=MODEL, max_tokens=1, messages=PROMPT)
    assert raised.value.type == "authentication_error"
    assert raised.value.response.headers["x-request-id"].startswith("req_")


def test_an_unknown_model(refused: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as raised:
        refused.messages.create(model="no-such-model", max_tokens=1, messages=PROMPT)
    assert raised.value.type == "not_found_error"


def test_a_wrong_type(refused: Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens") as raised:
        refused.messages.create(model=MODEL, max_tokens=1, messages=PROMPT, extra_body={"max_tokens": "many"})
    assert raised.value.type == "invalid_request_error"


def test_what_the_engine_refuses(claude: Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature") as raised:
        claude.messages.create(model=MODEL, max_tokens=1, messages=PROMPT, extra_body={"temperature": -1})
    assert raised.value.type == "invalid_request_error"


def test_a_request_beyond_its_plan(lone: Front) -> None:
    with client(lone, key=SMALL_KEY) as sdk, pytest.raises(anthropic.RateLimitError) as raised:
        sdk.messages.create(model=MODEL, max_tokens=1000, messages=PROMPT)
    assert raised.value.type == "rate_limit_error"


def test_no_engine(refused: Anthropic) -> None:
    with pytest.raises(anthropic.OverloadedError) as raised:
        refused.messages.create(model=MODEL, max_tokens=1, messages=PROMPT, extra_headers=CRITICAL)
    assert raised.value.status_code == 529
    assert raised.value.type == "overloaded_error"


def test_a_429_is_tried_again(front: Front) -> None:
    """The key's only slot is held by a stream, which ends once the second request was refused."""
    with client(front, SINGLE_KEY) as holder:
        held = holder.messages.create(
            model=MODEL, max_tokens=LONG, messages=PROMPT, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(held))
        seen: list[int] = []

        def on(status: int) -> None:
            seen.append(status)
            held.close()

        with client(front, SINGLE_KEY, retries=3, on=on) as sdk:
            reply = sdk.messages.with_raw_response.create(model=MODEL, max_tokens=2, messages=PROMPT)
    assert seen[0] == 429
    assert reply.status_code == 200
    assert reply.retries_taken >= 1


def test_a_529_is_tried_again(recovering: Recovering) -> None:
    """The exact engine comes up once a critical request was refused."""
    seen: list[int] = []

    def on(status: int) -> None:
        seen.append(status)
        recovering.up()

    with client(recovering.front, retries=3, on=on) as sdk:
        reply = sdk.messages.with_raw_response.create(
            model=MODEL, max_tokens=2, messages=PROMPT, extra_headers=CRITICAL
        )
    assert seen[0] == 529
    assert reply.headers["x-dualgauge-tier"] == "exact"
    assert reply.retries_taken >= 1
