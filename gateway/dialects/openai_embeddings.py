"""POST /v1/embeddings."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from gateway.config import Bounds
from gateway.dialects.base import Request, named, read_messages
from gateway.dialects.body import Body, Fields
from gateway.dialects.bounds import check_prompts, check_said
from gateway.dialects.openai_chat import OpenAIChat, prompt_conversation
from gateway.errors import InvalidRequest


class _Embeddings(msgspec.Struct):
    model: str | None = None
    input: Any = None
    messages: list[Any] | None = None
    metadata: dict[str, Any] | None = None


_embeddings = Fields(_Embeddings)


class OpenAIEmbeddings(OpenAIChat):
    name = "openai.embeddings"
    said = frozenset({"input", "messages"})
    caps: ClassVar[tuple[str, ...]] = ()
    tempered = False

    def read(self, body: Body, bounds: Bounds) -> Request:
        fields = _embeddings.read(body.raw)
        model = named(fields.model)
        texts, messages = fields.input, fields.messages
        if texts is None and messages is None:
            raise InvalidRequest("input is missing", param="input")
        check_said("messages", messages, bounds)
        if texts is not None:
            check_prompts("input", texts, bounds.inputs, "inputs")
        return Request(
            body,
            model,
            False,
            lambda: read_messages(messages) if texts is None else prompt_conversation(texts),
            output_tokens=0,
            metadata=fields.metadata,
        )
