"""What a policy and the limits learn of a request: the same, whatever dialect it is written in."""

import gc
import json
from typing import Any

import pytest

from gateway.config import Bounds
from gateway.dialects import DIALECTS, facts_from_body, make_facts
from gateway.dialects.base import Request
from gateway.dialects.body import Body
from gateway.errors import (
    BodyTooLarge,
    EngineBroke,
    EngineRefused,
    EngineTimeout,
    GatewayError,
    InternalFault,
    InvalidKey,
    InvalidRequest,
    LimitExceeded,
    ModelNotFound,
    NothingReady,
    RouteNotFound,
    TierNotAllowed,
    WrongMediaType,
)
from gateway.relay.sse import Usage
from policies.facts import Conversation, Turn
from tests.support.client import Reply
from tests.support.shapes import (
    ANTHROPIC,
    CHAT,
    COMPLETIONS,
    IDS,
    RESPONSES,
    SHAPES,
    Shape,
    check_error,
    check_error_event,
)

WORDS = "Where is the report?"
TOOLS = {
    "chat": {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
    "responses": {"tools": [{"type": "function", "name": "f", "parameters": {}}]},
    "messages": {"tools": [{"name": "f", "input_schema": {}}]},
}


def parse(shape: Shape, **fields: Any) -> Request:
    return shape.dialect.parse(Body(json.dumps(shape.ask(**fields)).encode()), Bounds())


def read(shape: Shape, **fields: Any) -> Conversation:
    return parse(shape, **fields).conversation()


CONVERSATIONS = {
    "chat": {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": WORDS}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "on the shelf"},
            {"role": "user", "content": "thanks"},
        ]
    },
    "responses": {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": WORDS}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "on the shelf"},
            {"type": "message", "role": "user", "content": "thanks"},
        ],
    },
    "messages": {
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": WORDS},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": "on the shelf"},
                    {"type": "text", "text": "thanks"},
                ],
            },
        ],
    },
}


@pytest.mark.parametrize("shape", [CHAT, RESPONSES, ANTHROPIC], ids=["chat", "responses", "messages"])
def test_a_conversation_with_a_tool_reads_alike(shape: Shape) -> None:
    conversation = read(shape, **CONVERSATIONS[shape.name])
    said = [turn for turn in conversation.turns if turn.text]
    assert said == [
        Turn("system", "Be brief."),
        Turn("user", WORDS),
        Turn("tool", "on the shelf"),
        Turn("user", "thanks"),
    ]
    assert conversation.tool_results == 1


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_a_request_leaves_nothing_to_the_cycle_collector(shape: Shape) -> None:
    """What it has to collect, it stops the event loop for."""
    parse(shape).conversation()
    gc.collect()
    gc.disable()
    try:
        parse(shape).conversation()
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_one_question_reads_alike(shape: Shape) -> None:
    asked: dict[str, dict[str, Any]] = {
        "chat": {"messages": [{"role": "user", "content": WORDS}]},
        "completions": {"prompt": WORDS},
        "responses": {"input": WORDS},
        "messages": {"messages": [{"role": "user", "content": WORDS}]},
    }
    assert read(shape, **asked[shape.name]) == Conversation((Turn("user", WORDS),))


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_facts_are_alike(shape: Shape) -> None:
    request = parse(shape, **{shape.cap: 77}, stream=True, temperature=0.5, metadata={"critical": "true"})
    facts = make_facts(shape.dialect.name, request, {"x-a": "b"}, "ci", frozenset({"t"}))
    assert facts.dialect == shape.dialect.name
    assert facts.model == "smollm2"
    assert facts.output_tokens == 77
    assert facts.stream is True
    assert facts.temperature == 0.5
    assert facts.metadata == {"critical": "true"}
    assert facts.headers == {"x-a": "b"}
    assert (facts.tenant, facts.tags) == ("ci", {"t"})
    assert facts.has_tools is False
    assert facts.structured is False
    assert len(facts.turns) == 1


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_facts_of_a_request_that_says_little(shape: Shape) -> None:
    body = {name: value for name, value in shape.body.items() if name != "max_tokens"}
    facts = facts_from_body(shape.dialect.name, body, {})
    assert facts.output_tokens is None
    assert facts.stream is False
    assert facts.temperature is None
    assert facts.metadata == {}


@pytest.mark.parametrize("shape", [CHAT, RESPONSES, ANTHROPIC], ids=["chat", "responses", "messages"])
def test_tools(shape: Shape) -> None:
    assert parse(shape, **TOOLS[shape.name]).has_tools
    assert not parse(shape, tools=None).has_tools
    assert not parse(shape, tools=[]).has_tools


@pytest.mark.parametrize(
    ("shape", "fields", "structured"),
    [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {}}}, True),
        (CHAT, {"response_format": {"type": "json_object"}}, True),
        (CHAT, {"response_format": {"type": "text"}}, False),
        (CHAT, {"guided_json": {}}, True),
        (CHAT, {"structured_outputs": {"regex": "a+"}}, True),
        (CHAT, {"tool_choice": "required"}, True),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, True),
        (CHAT, {"tool_choice": "auto"}, False),
        (COMPLETIONS, {"guided_regex": "a"}, True),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": {}}}}, True),
        (RESPONSES, {"text": {"format": {"type": "text"}}}, False),
        (RESPONSES, {"text": {"verbosity": "low"}}, False),
        (RESPONSES, {"tool_choice": "required"}, True),
        (ANTHROPIC, {"tool_choice": {"type": "any"}}, True),
        (ANTHROPIC, {"tool_choice": {"type": "auto"}}, False),
    ],
    ids=str,
)
def test_structured(shape: Shape, fields: dict[str, Any], structured: bool) -> None:
    assert parse(shape, **fields).structured is structured


@pytest.mark.parametrize(
    ("shape", "fields", "tokens"),
    [
        (CHAT, {"max_tokens": 10}, 10),
        (CHAT, {"max_completion_tokens": 10}, 10),
        (CHAT, {"max_tokens": 1, "max_completion_tokens": 10_000}, 10_000),
        (CHAT, {"max_tokens": 10, "n": 3}, 30),
        (CHAT, {"max_tokens": 0}, 0),
        (CHAT, {"n": 3}, None),
        (COMPLETIONS, {"max_tokens": 10, "n": 2}, 20),
        (RESPONSES, {"max_output_tokens": 10}, 10),
        (ANTHROPIC, {"max_tokens": 10}, 10),
    ],
    ids=str,
)
def test_the_output_that_is_asked_for(shape: Shape, fields: dict[str, Any], tokens: int | None) -> None:
    assert parse(shape, **fields).output_tokens == tokens


@pytest.mark.parametrize(
    ("shape", "fields"),
    [
        (
            CHAT,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
                ]
            },
        ),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
        ),
        (ANTHROPIC, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
    ],
    ids=["chat", "responses", "messages"],
)
def test_images_are_counted(shape: Shape, fields: dict[str, Any]) -> None:
    assert read(shape, **fields).images == 1


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [None, 5, "x", [], {}],
        [{"role": "alien", "content": "x"}],
        [{"role": ["user"], "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [None, 5, {"type": None}, {"text": 5}, {"type": ["image"]}]}],
        [{"role": "user", "content": [{"type": "tool_result", "content": {"a": 1}}]}],
    ],
    ids=str,
)
def test_odd_messages_are_the_engines_to_refuse(messages: Any) -> None:
    """Reading them never fails: the engine's own answer says what is wrong."""
    for shape in (CHAT, ANTHROPIC):
        assert isinstance(read(shape, messages=messages), Conversation)
    assert isinstance(read(RESPONSES, input=messages), Conversation)


def test_prompts_of_token_ids_have_no_text() -> None:
    assert read(COMPLETIONS, prompt=[1, 2, 3]).turns == ()
    assert read(COMPLETIONS, prompt=["a", "b"]).turns == (Turn("user", "a"), Turn("user", "b"))


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_a_request_prepared_for_one_engine_can_be_prepared_for_the_next(shape: Shape) -> None:
    request = parse(shape, stream=True)
    for name in ("smollm2", "other", "smollm2"):
        sent = json.loads(shape.dialect.prepare(request, name))
        assert sent.pop("model") == name
        sent.pop("stream_options", None)
        assert sent == {**shape.body, "stream": True}


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_usage_of_a_recorded_reply(shape: Shape) -> None:
    assert shape.dialect.reply_usage(shape.reply) == shape.reply_usage


@pytest.mark.parametrize(
    ("shape", "usage", "expected"),
    [
        (
            CHAT,
            {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}},
            Usage(9, 2, 4),
        ),
        (CHAT, {"prompt_tokens": 9, "completion_tokens": None, "prompt_tokens_details": None}, Usage(9)),
        (
            RESPONSES,
            {"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}},
            Usage(9, 2, 4),
        ),
        (
            ANTHROPIC,
            {
                "input_tokens": 5,
                "output_tokens": 2,
                "cache_read_input_tokens": 3,
                "cache_creation_input_tokens": 1,
            },
            Usage(9, 2, 3),
        ),
    ],
    ids=["chat", "chat, nulls", "responses", "messages"],
)
def test_cached_tokens_are_part_of_the_prompt(shape: Shape, usage: Any, expected: Usage) -> None:
    assert shape.dialect.reply_usage(json.dumps({"usage": usage}).encode()) == expected


ERRORS: list[tuple[GatewayError, int]] = [
    (RouteNotFound("a"), 404),
    (InvalidKey("a"), 401),
    (BodyTooLarge("a"), 413),
    (WrongMediaType("a"), 415),
    (InvalidRequest("a", param="n"), 400),
    (TierNotAllowed("a"), 403),
    (ModelNotFound("a"), 404),
    (LimitExceeded("a"), 429),
    (InternalFault("a"), 500),
    (EngineBroke("a"), 502),
    (NothingReady("a"), 503),
    (EngineTimeout("a"), 504),
    (EngineRefused("a", 422, kind=None, param="x", code=None), 422),
]


@pytest.mark.parametrize(("error", "status"), ERRORS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda dialect: dialect.name)
def test_every_error_has_its_shape_in_every_dialect(dialect: Any, error: GatewayError, status: int) -> None:
    shape = next((s for s in SHAPES if s.dialect is dialect), CHAT)
    given, body = dialect.error_body(error, "req_1")
    headers = {"content-type": "application/json", "x-request-id": "req_1", "retry-after": "1"}
    assert check_error(Reply(given, headers, bytearray(body), True), status, shape=shape) == "a"
    assert check_error_event(dialect.error_event(error), shape) == "a"


def test_errors_have_openais_types() -> None:
    types = {status: json.loads(CHAT.dialect.error_body(e, "")[1])["error"]["type"] for e, status in ERRORS}
    assert types == {
        400: "invalid_request_error",
        401: "invalid_request_error",
        403: "permission_error",
        404: "invalid_request_error",
        413: "invalid_request_error",
        415: "invalid_request_error",
        422: "invalid_request_error",
        429: "rate_limit_error",
        500: "server_error",
        502: "server_error",
        503: "server_error",
        504: "server_error",
    }
