"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from gateway.dialects.base import (
    Dialect,
    Request,
    clean,
    number,
    read_messages,
    read_model,
)
from gateway.dialects.body import ANY, FLAG, LIST, NUMBER, OBJECT, WHOLE, Body
from gateway.errors import InvalidRequest
from gateway.relay.sse import Usage
from policies.facts import Conversation, Turn

GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None


class _Reply(msgspec.Struct):
    usage: _Usage | None = None


_decode_reply = msgspec.json.Decoder(_Reply).decode


def openai_usage(value: object) -> Usage | None:
    if not isinstance(value, dict):
        return None
    details = value.get("prompt_tokens_details")
    cached = number(details.get("cached_tokens")) if isinstance(details, dict) else 0
    return Usage(number(value.get("prompt_tokens")), number(value.get("completion_tokens")), cached)


def ask_for_usage(request: Request) -> None:
    """Have the engine count a stream, whether or not the client wants to see it."""
    if request.stream and not request.wants_usage:
        options = request.body.get("stream_options", OBJECT) or {}
        request.body.set("stream_options", {**options, "include_usage": True})
        request.usage_injected = True


def read_stream(body: Body) -> tuple[bool, bool]:
    """Whether the client streams, and whether it asked for usage; `stream_options` alone is dropped."""
    stream = body.get("stream", FLAG) or False
    if not stream:
        body.drop("stream_options")
        return False, True
    options = body.get("stream_options", OBJECT) or {}
    include = options.get("include_usage")
    if include is not None and not isinstance(include, bool):
        raise InvalidRequest(
            "stream_options.include_usage must be true or false", param="stream_options.include_usage"
        )
    return True, bool(include)


def read_numbers(body: Body) -> tuple[int, int | None]:
    """`n`, and the output tokens asked for in all."""
    n = body.get("n", WHOLE)
    if n is not None and n < 1:
        raise InvalidRequest("n must be at least 1", param="n")
    caps = [
        cap for name in ("max_tokens", "max_completion_tokens") if (cap := body.get(name, WHOLE)) is not None
    ]
    if any(cap < 0 for cap in caps):
        raise InvalidRequest("max_tokens must not be negative", param="max_tokens")
    return n or 1, max(caps) * (n or 1) if caps else None


class OpenAIChat(Dialect):
    name = "openai.chat"
    overhead: ClassVar[int] = 1
    caps = ("max_tokens", "max_completion_tokens")

    def parse(self, body: Body) -> Request:
        model = read_model(body)
        clean(body)
        stream, wants_usage = read_stream(body)
        n, output_tokens = read_numbers(body)
        if "messages" not in body:
            raise InvalidRequest("messages is missing", param="messages")
        messages = body.get("messages", LIST)
        return Request(
            body,
            model,
            stream,
            lambda: read_messages(messages),
            output_tokens=output_tokens,
            n=n,
            has_tools="tools" in body or "functions" in body,
            structured=_structured(body),
            temperature=body.get("temperature", NUMBER),
            metadata=_metadata(body),
            wants_usage=wants_usage,
        )

    def prepare(self, request: Request, served_model: str) -> bytes:
        ask_for_usage(request)
        return super().prepare(request, served_model)

    def stream_usage(self, event: dict[str, object], before: Usage | None) -> Usage | None:
        return openai_usage(event.get("usage"))

    def reply_usage(self, reply: bytes) -> Usage | None:
        usage = _decode_reply(reply).usage
        if usage is None:
            return None
        details = usage.prompt_tokens_details
        return Usage(
            usage.prompt_tokens, usage.completion_tokens or 0, (details.cached_tokens or 0) if details else 0
        )


class OpenAICompletions(OpenAIChat):
    name = "openai.completions"
    overhead: ClassVar[int] = 0

    def parse(self, body: Body) -> Request:
        model = read_model(body)
        clean(body)
        stream, wants_usage = read_stream(body)
        n, output_tokens = read_numbers(body)
        if "prompt" not in body and "prompt_embeds" not in body:
            raise InvalidRequest("prompt is missing", param="prompt")
        prompt = body.get("prompt", ANY)
        return Request(
            body,
            model,
            stream,
            lambda: prompt_conversation(prompt),
            output_tokens=output_tokens,
            n=n,
            structured=_structured(body),
            temperature=body.get("temperature", NUMBER),
            metadata=_metadata(body),
            wants_usage=wants_usage,
        )


def prompt_conversation(prompt: object) -> Conversation:
    prompts = prompt if isinstance(prompt, list) else [prompt]
    # Token ids have no text to read: such a prompt counts as an empty turn.
    return Conversation(tuple(Turn("user", p) for p in prompts if isinstance(p, str)))


def _structured(body: Body) -> bool:
    if "response_format" in body:
        kind = body.get("response_format", OBJECT)
        if kind is not None and kind.get("type") in ("json_object", "json_schema"):
            return True
    if any(name in body for name in GUIDED):
        return True
    choice = body.get("tool_choice", ANY) if "tool_choice" in body else None
    return choice == "required" or isinstance(choice, dict)


def _metadata(body: Body) -> dict[str, object] | None:
    if "metadata" not in body:
        return None
    return body.get("metadata", OBJECT)
