"""POST /v1/embeddings."""

from __future__ import annotations

from gateway.dialects.base import Request, clean, read_model
from gateway.dialects.body import ANY, Body
from gateway.dialects.openai_chat import OpenAIChat, prompt_conversation
from gateway.errors import InvalidRequest


class OpenAIEmbeddings(OpenAIChat):
    name = "openai.embeddings"

    def parse(self, body: Body) -> Request:
        model = read_model(body)
        clean(body)
        if "input" not in body and "messages" not in body:
            raise InvalidRequest("input is missing", param="input")
        texts = body.get("input", ANY)
        return Request(body, model, False, lambda: prompt_conversation(texts), output_tokens=0)
