"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import Callable
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
    forced,
    named,
    number,
    read_messages,
    read_plain,
    tool_texts,
)
from gateway.dialects.body import OBJECT, Body, Fields
from gateway.dialects.bounds import TOOLS, check_prompts, check_said
from gateway.errors import InvalidRequest
from gateway.relay.sse import Usage
from policies.facts import Conversation, Turn


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = 0
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


class _Common(Sampling):
    """What chat and completions share; absent and null are the same."""

    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    length_penalty: float | None = None
    min_tokens: int | None = None
    metadata: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    tool_choice: Any = None
    function_call: Any = None


class _Chat(_Common):
    messages: list[Any] | None = None


class _Completions(_Common):
    prompt: Any = None


_common = Fields(_Common)
_chat = Fields(_Chat)
_completions = Fields(_Completions)


def _request(body: Body, fields: _Common, read: Callable[[], Conversation], prompts: int = 1) -> Request:
    model = named(fields.model)
    stream = fields.stream or False
    wants_usage = True
    if stream:
        include = (fields.stream_options or {}).get("include_usage")
        if include is not None and not isinstance(include, bool):
            param = "stream_options.include_usage"
            raise InvalidRequest(f"{param} must be true or false", param=param)
        wants_usage = bool(include)
    elif fields.stream_options is not None:
        body.drop("stream_options")
    n = 1 if fields.n is None else fields.n
    if n < 1:
        raise InvalidRequest("n must be at least 1", param="n")
    answers = max(n, fields.best_of or n) * prompts
    first, second = fields.max_tokens, fields.max_completion_tokens
    bound("max_tokens", first)
    bound("max_completion_tokens", second)
    cap = first if second is None else second if first is None else max(first, second)
    return Request(
        body,
        model,
        stream,
        read,
        output_tokens=None if cap is None else cap * answers,
        n=n,
        answers=answers,
        has_tools=any(map(body.offers, TOOLS)),
        structured=_structured(body, fields),
        temperature=fields.temperature,
        metadata=fields.metadata,
        wants_usage=wants_usage,
    )


def _structured(body: Body, fields: _Common) -> bool:
    format_ = fields.response_format
    if format_ is not None and format_.get("type") in FORMATS:
        return True
    return forced(fields.tool_choice) or forced(fields.function_call) or not GUIDED.isdisjoint(body.names)


class OpenAIChat(Dialect):
    name = "openai.chat"
    overhead: ClassVar[int] = 1
    caps: ClassVar[tuple[str, ...]] = ("max_tokens", "max_completion_tokens")

    def read(self, body: Body, bounds: Bounds) -> Request:
        # What reads the conversation must not name the request, which holds it: a cycle a request is what the
        # collector stops all for.
        turns = body.fits("messages", read_plain)
        if turns is not None:

            def plain() -> Conversation:
                results = sum([turn.role == "tool" for turn in turns])
                return Conversation(tuple(turns), results, 0, tuple(tool_texts(body, *TOOLS)))

            return _request(body, _common.read(body.raw), plain)
        fields = _chat.read(body.raw)
        messages = fields.messages
        if messages is None:
            raise InvalidRequest("messages is missing", param="messages")
        check_said("messages", messages, bounds)

        def conversation() -> Conversation:
            return read_messages(messages, None, tool_texts(body, *TOOLS))

        return _request(body, fields, conversation)

    def prepare(self, request: Request, served_model: str, priority: int = 0) -> bytes:
        if request.stream and not request.wants_usage and not request.usage_injected:
            # Have the engine count the stream, whether or not the client wants to see it.
            options = request.body.get("stream_options", OBJECT) or {}
            request.body.set("stream_options", {**options, "include_usage": True})
            request.usage_injected = True
        return Dialect.prepare(self, request, served_model, priority)

    def stream_usage(self, event: dict[str, object], before: Usage | None) -> Usage | None:
        return openai_usage(event.get("usage"))

    def reply_usage(self, reply: bytes) -> Usage | None:
        usage = _decode_reply(reply).usage
        if usage is None:
            return None
        details = usage.prompt_tokens_details
        return Usage(
            number(usage.prompt_tokens),
            number(usage.completion_tokens),
            number(details.cached_tokens) if details else 0,
        )


class OpenAICompletions(OpenAIChat):
    name = "openai.completions"
    said = frozenset({"prompt"})
    overhead: ClassVar[int] = 0

    def read(self, body: Body, bounds: Bounds) -> Request:
        fields = _completions.read(body.raw)
        prompt = fields.prompt
        if prompt is None:
            raise InvalidRequest("prompt is missing", param="prompt")
        check_prompts("prompt", prompt, bounds.prompts, "prompts")
        several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        prompts = len(prompt) if several else 1
        return _request(body, fields, lambda: prompt_conversation(prompt), prompts)


def prompt_conversation(prompt: object) -> Conversation:
    """A completion's prompt, or an embedding's input: each string is a turn of the user's. Token ids have no
    text to read, and count as no turn."""
    prompts = prompt if isinstance(prompt, list) else [prompt]
    ids = sum(len(p) if isinstance(p, list) else isinstance(p, int) for p in prompts)
    return Conversation(tuple(Turn("user", p) for p in prompts if isinstance(p, str)), token_ids=ids)
