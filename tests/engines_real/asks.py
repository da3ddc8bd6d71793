"""Requests in each dialect, and what every reply to them must hold, whatever the model says."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.engines_real.pair import MODEL

PROSE = "Tell me about the rivers of the north."
CODE = "Write a Python function that merges two sorted lists, with a unit test for the empty case."
CRITICAL = {"x-criticality": "high"}
TOKENS = 6
CHOICE: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
"""So that a reply is not empty, as far as a dialect lets an engine be told that."""
LONG = 3000
"""Far more tokens than an engine makes while a test looks on: such a reply ends when its reader leaves."""

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Shape:
    """One dialect. `body` asks for `TOKENS` tokens at most; `text` and `counted` (prompt and completion
    tokens) read a whole reply, `deltas` the events of a stream."""

    path: str
    body: Callable[[str], Json]
    text: Callable[[Json], str]
    counted: Callable[[Json], tuple[int, int]]
    deltas: Callable[[Sequence[Json]], Sequence[str]]


def messages(text: str) -> list[Json]:
    return [{"role": "user", "content": text}]


def openai_count(reply: Json) -> tuple[int, int]:
    return reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]


def other_count(reply: Json) -> tuple[int, int]:
    return reply["usage"]["input_tokens"], reply["usage"]["output_tokens"]


SHAPES: Mapping[str, Shape] = {
    "chat": Shape(
        "/v1/chat/completions",
        lambda text: {"messages": messages(text), "max_tokens": TOKENS, **CHOICE},
        lambda reply: reply["choices"][0]["message"]["content"],
        openai_count,
        lambda events: [event["choices"][0]["delta"].get("content") or "" for event in events],
    ),
    "completions": Shape(
        "/v1/completions",
        lambda text: {"prompt": text, "max_tokens": TOKENS, **CHOICE},
        lambda reply: reply["choices"][0]["text"],
        openai_count,
        lambda events: [event["choices"][0]["text"] for event in events],
    ),
    "responses": Shape(
        "/v1/responses",
        lambda text: {"input": text, "max_output_tokens": TOKENS, **CHOICE},
        lambda reply: reply["output"][0]["content"][0]["text"],
        other_count,
        lambda events: [e["delta"] for e in events if e["type"] == "response.output_text.delta"],
    ),
    "messages": Shape(
        "/v1/messages",
        lambda text: {"messages": messages(text), "max_tokens": TOKENS, **CHOICE},
        lambda reply: reply["content"][0]["text"],
        other_count,
        lambda events: [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"],
    ),
}


def events(stream: str) -> tuple[list[Json], bool]:
    """The JSON of a stream's events, and whether `[DONE]` closed it."""
    data = [line.removeprefix("data:").strip() for line in stream.splitlines() if line.startswith("data:")]
    return [json.loads(item) for item in data if item != "[DONE]"], data[-1:] == ["[DONE]"]


def chat(text: str = PROSE, model: str = MODEL, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": messages(text), "max_tokens": TOKENS, **more}
