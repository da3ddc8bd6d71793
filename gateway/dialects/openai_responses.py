"""POST /v1/responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from gateway.config import Bounds
from gateway.dialects.base import (
    FORMATS,
    GUIDED,
    Dialect,
    Request,
    Sampling,
    bound,
    call_text,
    forced,
    named,
    number,
    openai_error,
    parts_text,
    role_of,
    tool_texts,
)
from gateway.dialects.body import Body, Fields
from gateway.dialects.bounds import check_said
from gateway.errors import GatewayError, InvalidRequest
from gateway.relay.sse import Usage
from policies.facts import Conversation, Turn


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    input_tokens: int | None = 0
    output_tokens: int | None = 0
    input_tokens_details: _Details | None = None


class _Reply(msgspec.Struct):
    usage: _Usage | None = None


_decode_reply = msgspec.json.Decoder(_Reply).decode


class _Responses(Sampling):
    model: str | None = None
    input: Any = None
    prompt: Any = None
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    tool_choice: Any = None
    previous_response_id: str | None = None


_responses = Fields(_Responses)


class OpenAIResponses(Dialect):
    name = "openai.responses"
    said = frozenset({"input"})
    marker: ClassVar[bytes] = b"event: response.output_text.delta"
    caps = ("max_output_tokens",)

    def read(self, body: Body, bounds: Bounds) -> Request:
        fields = _responses.read(body.raw)
        model = named(fields.model)
        items, instructions = fields.input, fields.instructions
        if items is None and fields.prompt is None:
            raise InvalidRequest("input is missing", param="input")
        check_said("input", items, bounds)
        bound("max_output_tokens", fields.max_output_tokens)
        text_format = (fields.text or {}).get("format")
        kind = text_format.get("type") if isinstance(text_format, dict) else None
        return Request(
            body,
            model,
            fields.stream or False,
            lambda: _conversation(items, instructions, tool_texts(body, "tools")),
            output_tokens=fields.max_output_tokens,
            has_tools=body.offers("tools"),
            structured=kind in FORMATS or forced(fields.tool_choice) or not GUIDED.isdisjoint(body.names),
            temperature=fields.temperature,
            metadata=fields.metadata,
            previous_response_id=fields.previous_response_id,
        )

    def stream_usage(self, event: dict[str, object], before: Usage | None) -> Usage | None:
        response = event.get("response")
        usage = response.get("usage") if isinstance(response, dict) else None
        if not isinstance(usage, dict):
            return None
        details = usage.get("input_tokens_details")
        cached = number(details.get("cached_tokens")) if isinstance(details, dict) else 0
        return Usage(number(usage.get("input_tokens")), number(usage.get("output_tokens")), cached)

    def reply_usage(self, reply: bytes) -> Usage | None:
        usage = _decode_reply(reply).usage
        if usage is None:
            return None
        details = usage.input_tokens_details
        return Usage(
            number(usage.input_tokens),
            number(usage.output_tokens),
            number(details.cached_tokens) if details else 0,
        )

    def error_event(self, error: GatewayError) -> bytes:
        inner = openai_error(error)
        event = {**inner, "type": "error", "error": inner}
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(event)


def _conversation(items: object, instructions: str | None, tools: Sequence[str]) -> Conversation:
    turns: list[Turn] = [Turn("system", instructions)] if instructions else []
    if isinstance(items, str):
        return Conversation((*turns, Turn("user", items)), more=tuple(tools))
    images = [0]
    results = 0
    more = list(tools)
    for item in items if isinstance(items, list) else ():
        if not isinstance(item, dict):
            continue
        if str(item.get("type", "")).endswith("_call_output"):
            results += 1
            turns.append(Turn("tool", parts_text(item.get("output"), images)))
        elif "arguments" in item:
            more.append(call_text(item.get("name"), item["arguments"]))
        elif (role := role_of(item.get("role"))) is not None:
            turns.append(Turn(role, parts_text(item.get("content"), images)))
    return Conversation(tuple(turns), results, images[0], tuple(more))
