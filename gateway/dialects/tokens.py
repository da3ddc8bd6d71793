"""POST /tokenize and /detokenize: vLLM's own shapes, errors in OpenAI's."""

from __future__ import annotations

from gateway.dialects.base import Dialect, Request, clean, read_model
from gateway.dialects.body import Body
from gateway.relay.sse import Usage
from policies.facts import Conversation

NO_CONVERSATION = Conversation(())


class Tokens(Dialect):
    name = "vllm.tokens"

    def parse(self, body: Body) -> Request:
        model = read_model(body)
        clean(body)
        return Request(body, model, False, lambda: NO_CONVERSATION, output_tokens=0)

    def stream_usage(self, event: dict[str, object], before: Usage | None) -> Usage | None:
        return None

    def reply_usage(self, reply: bytes) -> Usage | None:
        return None
