"""POST /tokenize and /detokenize: vLLM's own shapes, errors in OpenAI's."""

from __future__ import annotations

import msgspec

from gateway.dialects.base import Dialect, Request, clean, named
from gateway.dialects.body import Body, Fields
from gateway.relay.sse import Usage
from policies.facts import Conversation

NO_CONVERSATION = Conversation(())


class _Tokens(msgspec.Struct):
    model: str | None = None


_tokens = Fields(_Tokens)
_decode_reply = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Tokens(Dialect):
    name = "vllm.tokens"

    def parse(self, body: Body) -> Request:
        clean(body)
        return Request(
            body, named(_tokens.read(body.raw).model), False, lambda: NO_CONVERSATION, output_tokens=0
        )

    def stream_usage(self, event: dict[str, object], before: Usage | None) -> Usage | None:
        return None

    def reply_usage(self, reply: bytes) -> Usage | None:
        _decode_reply(reply)
        return None
