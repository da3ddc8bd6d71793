"""Requests that are looked at, not served: how a policy decides them, and that as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec

from policies.decision import Edits, pinned
from policies.facts import Facts
from policies.policy import Explanation, Policy
from policies.signals import Memo

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

    dialect = caller.dialect or _dialect_of(body, caller.headers)
    try:
        return facts_from_body(
            DIALECTS[dialect], body, caller.headers, tenant=caller.tenant, tags=caller.tags, time=caller.time
        )
    except GatewayError as error:
        raise RefusedError(error.message) from None


def _dialect_of(body: Mapping[str, Any], headers: Mapping[str, str]) -> str:
    if "prompt" in body:
        return "completions"
    if "input" in body:
        return "responses"
    # Chat has system prompts among its messages, and its SDKs name no version.
    return "messages" if "system" in body or "anthropic-version" in headers else "chat"


def explained(policy: Policy, tiers: tuple[str, ...], facts: Facts, memo: Memo | None = None) -> Explanation:
    """As the policy has it, but a model name that pins its tier decides before any rule. What `memo` has is
    not measured again."""
    explanation = policy.explain(facts, memo)
    _, colon, tier = facts.model.rpartition(":")
    if not colon or tier not in tiers:
        return explanation
    rules = tuple(replace(rule, reached=False) for rule in explanation.rules)
    return Explanation(pinned(tier, policy.hash), explanation.signals, explanation.used, rules)


def signals(explanation: Explanation) -> dict[str, Any]:
    """Signals with a value, scores to four digits."""
    return {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in explanation.signals.items()
        if value is not None
    }


def edits(made: Edits) -> dict[str, Any]:
    """What a rule changes in a request."""
    return {name: value for name, value in asdict(made).items() if value is not None}


def record(explanation: Explanation, policy: Policy, prompts: str = "") -> dict[str, Any]:
    """`prompts` says how the length of the prompt was measured, where that is known."""
    decision = explanation.decision
    return {
        "tier": decision.tier,
        "rule": decision.rule,
        "reasons": decision.reasons,
        "if_busy": decision.if_busy,
        "if_unavailable": decision.contract,
        "priority": decision.priority,
        "trace": decision.trace,
        "edits": edits(decision.edits),
        "policy": {"file": policy.file, "hash": policy.hash},
        "signals": signals(explanation),
        **({"prompt_tokens": prompts} if prompts else {}),
        "rules": explanation.rules,
    }
