"""The surface: every (method, path) that is served, and the dialect that speaks there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from gateway.config import Bounds
from gateway.dialects.anthropic import AnthropicMessages
from gateway.dialects.base import Dialect, Request
from gateway.dialects.body import Body
from gateway.dialects.openai_chat import OpenAIChat, OpenAICompletions
from gateway.dialects.openai_embeddings import OpenAIEmbeddings
from gateway.dialects.openai_responses import OpenAIResponses
from gateway.dialects.tokens import Tokens
from policies.facts import Facts

Kind = Literal["generate", "count", "stored", "models", "health", "ready"]

CHAT = OpenAIChat()
COMPLETIONS = OpenAICompletions()
RESPONSES = OpenAIResponses()
EMBEDDINGS = OpenAIEmbeddings()
MESSAGES = AnthropicMessages()
TOKENS = Tokens()
DIALECTS: Mapping[str, Dialect] = {d.name: d for d in (CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS, MESSAGES)}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`generate` is routed by the policy and limited; `count` is free and asks any engine of the model;
    `stored` names a reply that one engine holds; the others the gateway answers itself. Engines of the kinds
    `unserved` do not have it, or not in this shape."""

    kind: Kind
    dialect: Dialect
    unserved: frozenset[str] = frozenset()


_HOSTED = frozenset({"hosted"})
ENDPOINTS: Mapping[tuple[str, str], Endpoint] = {
    ("POST", "/v1/chat/completions"): Endpoint("generate", CHAT),
    ("POST", "/v1/completions"): Endpoint("generate", COMPLETIONS),
    ("POST", "/v1/responses"): Endpoint("generate", RESPONSES),
    ("POST", "/v1/embeddings"): Endpoint("generate", EMBEDDINGS),
    ("POST", "/v1/messages"): Endpoint("generate", MESSAGES),
    ("POST", "/v1/messages/count_tokens"): Endpoint("count", MESSAGES, _HOSTED),
    ("POST", "/tokenize"): Endpoint("count", TOKENS, _HOSTED | {"llama.cpp"}),
    ("POST", "/detokenize"): Endpoint("count", TOKENS, _HOSTED | {"llama.cpp"}),
    ("GET", "/v1/responses/{id}"): Endpoint("stored", RESPONSES),
    ("POST", "/v1/responses/{id}/cancel"): Endpoint("stored", RESPONSES),
    ("GET", "/v1/models"): Endpoint("models", CHAT),
    ("GET", "/v1/models/{id}"): Endpoint("models", CHAT),
    ("GET", "/healthz"): Endpoint("health", CHAT),
    ("GET", "/readyz"): Endpoint("ready", CHAT),
}


def make_facts(
    dialect: str,
    request: Request,
    headers: Mapping[str, str],
    tenant: str = "anonymous",
    tags: frozenset[str] = frozenset(),
    time: float | None = None,
) -> Facts:
    """What a policy may know of a request; `time` is when it came, in Unix seconds."""
    return Facts(
        dialect=dialect,
        model=request.model,
        read=request.conversation,
        headers=headers,
        metadata=request.metadata,
        tenant=tenant,
        tags=tags,
        stream=request.stream,
        has_tools=request.has_tools,
        structured=request.structured,
        output_tokens=request.output_tokens,
        temperature=request.temperature,
        time=time,
        tokens=request.prompt_tokens,
    )


def facts_from_body(
    dialect: str,
    body: Mapping[str, object],
    headers: Mapping[str, str],
    tenant: str = "anonymous",
    tags: frozenset[str] = frozenset(),
    time: float | None = None,
) -> Facts:
    """Facts of a request that never came over the wire, for explaining and replaying.

    Raises KeyError for an unknown dialect, InvalidRequest for a body that the gateway would refuse.
    """
    bounds, raw = Bounds(), msgspec.json.encode({"model": "any", **body})
    request = DIALECTS[dialect].parse(Body(raw, bounds.nodes), bounds)
    return make_facts(dialect, request, headers, tenant, tags, time)
