"""Every signal is measured alike in every dialect: one request, told in each of their shapes."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.dialects import facts_from_body
from policies.signals import SIGNALS
from tests.support.shapes import ANTHROPIC, CHAT, COMPLETIONS, IDS, RESPONSES, SHAPES, Shape

ASKED = "Schreib bitte eine Funktion in Python, die eine Liste umdreht und nicht kopiert."
RULES = "Answer in German."
ARGUMENTS = '{"path": "a.py"}'
PNG = "data:image/png;base64,iVBORw0KGgo="
PLAIN: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": ASKED}]},
    "completions": {"prompt": ASKED},
    "responses": {"input": ASKED},
    "messages": {"messages": [{"role": "user", "content": ASKED}], "max_tokens": 64},
}
AGENT: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [
            {"role": "system", "content": RULES},
            {"role": "user", "content": "Look at a.py."},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "read", "arguments": ARGUMENTS}}
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "x = 1"},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": ASKED},
                    {"type": "image_url", "image_url": {"url": PNG}},
                ],
            },
        ]
    },
    "responses": {
        "instructions": RULES,
        "input": [
            {"role": "user", "content": "Look at a.py."},
            {"type": "function_call", "call_id": "1", "name": "read", "arguments": ARGUMENTS},
            {"type": "function_call_output", "call_id": "1", "output": "x = 1"},
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": ASKED},
                    {"type": "input_image", "image_url": PNG},
                ],
            },
        ],
    },
    "messages": {
        "system": RULES,
        "max_tokens": 64,
        "messages": [
            {"role": "user", "content": "Look at a.py."},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "1", "name": "read", "input": {"path": "a.py"}}],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": "x = 1"},
                    {"type": "text", "text": ASKED},
                    {
                        "type": "image",
                        "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
                    },
                ],
            },
        ],
    },
}
TALKING = (CHAT, RESPONSES, ANTHROPIC)
TALKING_IDS = ("chat", "responses", "messages")


def measured(shape: Shape, body: dict[str, Any], *names: str) -> dict[str, Any]:
    facts = facts_from_body(shape.dialect.name, body, {}, "ci", frozenset({"x"}), time=1.0)
    memo: dict[str, Any] = {}
    return {name: SIGNALS[name].read(facts, memo) for name in names or SIGNALS}


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_one_question_has_the_same_signals(shape: Shape) -> None:
    found = measured(shape, PLAIN[shape.name])
    reference = measured(CHAT, PLAIN["chat"])
    assert found.pop("dialect") == shape.dialect.name
    assert {name for name, value in found.items() if value != reference[name]} <= {"output_tokens"}
    assert found["code"] >= 0.5
    assert (found["language"], found["script"], found["turns"]) == ("de", "latin", 1)
    assert (found["has_tools"], found["structured"], found["stream"]) == (False, False, False)
    assert (found["tool_results"], found["images"]) == (0, 0)


@pytest.mark.parametrize("shape", TALKING, ids=TALKING_IDS)
def test_an_agents_conversation_has_the_same_signals(shape: Shape) -> None:
    found = measured(shape, AGENT[shape.name])
    reference = measured(CHAT, AGENT["chat"])
    # Arguments of calls are JSON in two dialects, a value in the third: blanks may differ.
    assert abs(found["prompt_tokens"] - reference["prompt_tokens"]) <= 12
    ignored = {"dialect", "output_tokens", "prompt_tokens", "sample_request"}
    assert {n for n, v in found.items() if v != reference[n]} <= ignored
    assert (found["turns"], found["tool_results"], found["images"]) == (2, 1, 1)


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_what_is_asked_of_the_reply(shape: Shape) -> None:
    body = {**PLAIN[shape.name], shape.cap: 77, "temperature": 0.5, "stream": True}
    names = ("output_tokens", "temperature", "stream")
    assert measured(shape, body, *names) == {"output_tokens": 77, "temperature": 0.5, "stream": True}


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "read", "parameters": SCHEMA}
STRUCTURED: list[tuple[Shape, dict[str, Any], bool]] = [
    (CHAT, {"response_format": {"type": "json_object"}}, True),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        True,
    ),
    (CHAT, {"response_format": {"type": "text"}}, False),
    (CHAT, {"guided_choice": ["a", "b"]}, True),
    (CHAT, {"structured_outputs": {"regex": "a+"}}, True),
    (CHAT, {"tool_choice": "required"}, True),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "read"}}}, True),
    (CHAT, {"tool_choice": "auto"}, False),
    (CHAT, {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}, False),
    (
        CHAT,
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}},
        True,
    ),
    (CHAT, {"function_call": {"name": "read"}}, True),
    (CHAT, {"function_call": "auto"}, False),
    (COMPLETIONS, {"response_format": {"type": "json_object"}}, True),
    (COMPLETIONS, {"guided_regex": "a+"}, True),
    (COMPLETIONS, {}, False),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}, True),
    (RESPONSES, {"text": {"format": {"type": "text"}}}, False),
    (RESPONSES, {"structured_outputs": {"regex": "a+"}}, True),
    (RESPONSES, {"tool_choice": "required"}, True),
    (RESPONSES, {"tool_choice": {"type": "function", "name": "read"}}, True),
    (RESPONSES, {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, False),
    (ANTHROPIC, {"tool_choice": {"type": "any"}}, True),
    (ANTHROPIC, {"tool_choice": {"type": "tool", "name": "read"}}, True),
    (ANTHROPIC, {"tool_choice": {"type": "auto"}}, False),
    (ANTHROPIC, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, True),
    (ANTHROPIC, {"output_config": {"effort": "low"}}, False),
]


@pytest.mark.parametrize(("shape", "fields", "structured"), STRUCTURED)
def test_structured(shape: Shape, fields: dict[str, Any], structured: bool) -> None:
    assert measured(shape, {**PLAIN[shape.name], **fields}, "structured") == {"structured": structured}


@pytest.mark.parametrize("shape", TALKING, ids=TALKING_IDS)
def test_definitions_of_tools_count_as_prompt(shape: Shape) -> None:
    long = {"type": "object", "properties": {f"field_{n}": {"type": "string"} for n in range(200)}}
    tools: dict[str, Any] = {
        "chat": {"type": "function", "function": {"name": "f", "parameters": long}},
        "responses": {"type": "function", "name": "f", "parameters": long},
        "messages": {"name": "f", "input_schema": long},
    }
    plain = measured(shape, PLAIN[shape.name], "prompt_tokens")["prompt_tokens"]
    found = measured(shape, {**PLAIN[shape.name], "tools": [tools[shape.name]]}, "prompt_tokens", "has_tools")
    assert found["prompt_tokens"] > plain + 1000
    assert found["has_tools"] is True


@pytest.mark.parametrize("prompt", [[1, 2, 3, 4], [[1, 2], [3, 4]]])
def test_token_ids_count_as_they_are(prompt: list[Any]) -> None:
    found = measured(COMPLETIONS, {"prompt": prompt}, "prompt_tokens", "turns")
    assert found == {"prompt_tokens": 4, "turns": 0}
