"""POST /tokenize and /detokenize: vLLM's own shapes, errors in OpenAI's."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.config import Bounds
from gateway.dialects.base import Dialect, Request, named
from gateway.dialects.body import Body, Fields
from gateway.dialects.bounds import check_prompts, check_said
from gateway.relay.sse import Usage
from policies.facts import Conversation

NO_CONVERSATION = Conversation(())


class _Tokens(msgspec.Struct):
    model: str | None = None
    messages: list[Any] | None = None
    tokens: list[Any] | None = None


_tokens = Fields(_Tokens)
_decode_reply = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Tokens(Dialect):
    name = "vllm.tokens"
    said = frozenset({"messages", "tokens"})

    def read(self, body: Body, bounds: Bounds) -> Request:
        fields = _tokens.read(body.raw)
        check_said("messages", fields.messages, bounds)
        check_prompts("tokens", fields.tokens or [], bounds.prompts, "prompts")
        return Request(body, named(fields.model), False, lambda: NO_CONVERSATION, output_tokens=0)

    def stream_usage(self, event: dict[str, object], before: Usage | None) -> Usage | None:
        return None

    def reply_usage(self, reply: bytes) -> Usage | None:
        _decode_reply(reply)
        return None
