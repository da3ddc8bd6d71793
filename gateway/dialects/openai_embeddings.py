"""POST /v1/embeddings."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from gateway.dialects.base import Request, clean, named, read_messages
from gateway.dialects.body import Body, Fields
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
    caps: ClassVar[tuple[str, ...]] = ()
    tempered = False

    def parse(self, body: Body) -> Request:
        fields = _embeddings.read(body.raw)
        clean(body)
        model = named(fields.model)
        texts, messages = fields.input, fields.messages
        if texts is None and messages is None:
            raise InvalidRequest("input is missing", param="input")
        return Request(
            body,
            model,
            False,
            lambda: read_messages(messages) if texts is None else prompt_conversation(texts),
            output_tokens=0,
            metadata=fields.metadata,
        )
