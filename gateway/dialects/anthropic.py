"""POST /v1/messages and /v1/messages/count_tokens, in Anthropic's shapes."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from gateway.config import Bounds
from gateway.dialects.base import (
    Dialect,
    Request,
    bound,
    named,
    number,
    parts_text,
    read_messages,
    tool_texts,
)
from gateway.dialects.body import Body, Fields
from gateway.dialects.bounds import check_said
from gateway.errors import (
    ANTHROPIC_OVERLOADED,
    ANTHROPIC_TYPES,
    GatewayError,
    InvalidRequest,
    NothingReady,
    Overloaded,
)
from gateway.relay.sse import Usage


class _Usage(msgspec.Struct):
    input_tokens: int | None = 0
    output_tokens: int | None = 0
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Reply(msgspec.Struct):
    usage: _Usage | None = None


_decode_reply = msgspec.json.Decoder(_Reply).decode


class _Messages(msgspec.Struct):
    model: str | None = None
    messages: list[Any] | None = None
    system: Any = None
    stream: bool | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


_messages = Fields(_Messages)


class AnthropicMessages(Dialect):
    name = "anthropic.messages"
    said = frozenset({"messages", "system"})
    marker: ClassVar[bytes] = b"event: content_block_delta"
    forwarded = (b"anthropic-version", b"anthropic-beta")
    priority_header = True

    def read(self, body: Body, bounds: Bounds) -> Request:
        fields = _messages.read(body.raw)
        model = named(fields.model)
        messages, system = fields.messages, fields.system
        if messages is None:
            raise InvalidRequest("messages is missing", param="messages")
        if not isinstance(system, str | list | None):
            raise InvalidRequest("system must be a string or a list of blocks", param="system")
        check_said("messages", messages, bounds)
        check_said("system", system, bounds)
        bound("max_tokens", fields.max_tokens)
        choice = fields.tool_choice
        return Request(
            body,
            model,
            fields.stream or False,
            lambda: read_messages(messages, parts_text(system, [0]), tool_texts(body, "tools")),
            output_tokens=fields.max_tokens,
            has_tools=body.offers("tools"),
            structured=(choice is not None and choice.get("type") in ("tool", "any"))
            or "output_format" in body
            or (fields.output_config or {}).get("format") is not None,
            temperature=fields.temperature,
            metadata=fields.metadata,
        )

    def stream_usage(self, event: dict[str, object], before: Usage | None) -> Usage | None:
        # message_start carries the prompt's count, message_delta the completion's so far.
        message = event.get("message")
        usage = message.get("usage") if isinstance(message, dict) else event.get("usage")
        if not isinstance(usage, dict):
            return None
        before = before or Usage()
        cached = number(usage.get("cache_read_input_tokens"))
        prompt = number(usage.get("input_tokens")) + cached + number(usage.get("cache_creation_input_tokens"))
        return Usage(
            prompt or before.prompt,
            number(usage.get("output_tokens")) or before.completion,
            cached or before.cached,
        )

    def reply_usage(self, reply: bytes) -> Usage | None:
        usage = _decode_reply(reply).usage
        if usage is None:
            return None
        cached = number(usage.cache_read_input_tokens)
        prompt = number(usage.input_tokens) + cached + number(usage.cache_creation_input_tokens)
        return Usage(prompt, number(usage.output_tokens), cached)

    def error_body(self, error: GatewayError, request_id: str) -> tuple[int, bytes]:
        busy = isinstance(error, NothingReady | Overloaded)
        status = ANTHROPIC_OVERLOADED if busy else error.http_status
        return status, msgspec.json.encode({**_shape(error), "request_id": request_id})

    def error_event(self, error: GatewayError) -> bytes:
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(_shape(error))


def _shape(error: GatewayError) -> dict[str, object]:
    return {
        "type": "error",
        "error": {"type": ANTHROPIC_TYPES.get(error.http_status, "api_error"), "message": error.message},
    }
