"""Requests that are given to a command, not sent: how a policy would decide them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from policies.decision import pinned
from policies.facts import Facts
from policies.policy import Explanation, Policy

_NAMES = ("chat", "completions", "responses", "embeddings", "messages")
DIALECTS: Mapping[str, str] = {
    **{name: f"openai.{name}" for name in _NAMES[:-1]},
    "messages": "anthropic.messages",
}


class RefusedError(Exception):
    """A request that the gateway would not take; the text says why."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, in which dialect (a key of DIALECTS; None: told from the body), and when, in Unix seconds."""

    headers: Mapping[str, str] = field(default_factory=dict)
    tenant: str = "anonymous"
    tags: frozenset[str] = frozenset()
    dialect: str | None = None
    time: float | None = None


def decoded(raw: bytes) -> dict[str, Any]:
    """A request body. Raises RefusedError."""
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RefusedError(f"not a JSON object: {error}") from None


def facts_of(body: Mapping[str, Any], caller: Caller) -> Facts:
    """What a policy would know of this request. Raises RefusedError where the gateway would not take it."""
    from gateway.dialects import facts_from_body
    from gateway.errors import GatewayError

    dialect = caller.dialect
    if dialect is None:
        dialect = "completions" if "prompt" in body else "responses" if "input" in body else "chat"
    try:
        return facts_from_body(
            DIALECTS[dialect], body, caller.headers, tenant=caller.tenant, tags=caller.tags, time=caller.time
        )
    except GatewayError as error:
        raise RefusedError(error.message) from None


def explained(policy: Policy, tiers: tuple[str, ...], facts: Facts) -> Explanation:
    """As the policy has it, but a model name that pins its tier decides before any rule."""
    explanation = policy.explain(facts)
    _, colon, tier = facts.model.rpartition(":")
    if not colon or tier not in tiers:
        return explanation
    rules = tuple(replace(rule, reached=False) for rule in explanation.rules)
    return Explanation(pinned(tier, policy.hash), explanation.signals, explanation.used, rules)
