"""What the console shows when asked: why a decision was made, a pasted request, the policy, tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from gateway import placement
from gateway.asked import DIALECTS, Caller, RefusedError, decoded, edits, explained, facts_of, record
from gateway.identity import ANONYMOUS, Tenant
from gateway.limits import NO_PLAN, Held
from gateway.runtime import Gateway
from gateway.snapshots import read_policy
from gateway.telemetry.recent import Seen
from policies.document import ProblemsError
from policies.plan import Plan
from policies.policy import Explanation, Policy
from policies.shipped import policy_text
from policies.units import Rate

MOST_TENANTS = 100


class Pasted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request to explain: `body` is the JSON that a client would send, as it is or as a text; `dialect` a
    key of DIALECTS, None to tell it from the body; `tenant` the name of a key, for its tags and tiers."""

    body: str | dict[str, Any]
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    dialect: str | None = None
    tenant: str | None = None


def why(seen: Seen) -> dict[str, Any]:
    """A decision as `dualgauge explain` shows it; without its rules where no console was open."""
    decision = seen.record.decision
    assert decision is not None
    if seen.explanation is not None and seen.policy is not None:
        return _explanation(seen.explanation, seen.policy)
    return {
        "tier": decision.tier,
        "rule": decision.rule,
        "reasons": decision.reasons,
        "if_busy": decision.if_busy,
        "if_unavailable": decision.contract,
        "signals": dict(decision.signals),
        "policy": {"hash": decision.policy_hash},
        "rules": None,
    }


def _explanation(explanation: Explanation, policy: Policy, prompts: str = "") -> dict[str, Any]:
    return {**record(explanation, policy, prompts), "used": sorted(explanation.used)}


async def explain(gateway: Gateway, pasted: Pasted) -> dict[str, Any]:
    """How a request would be decided now, and which engine would take it. Raises RefusedError."""
    tenant = _tenant(gateway, pasted.tenant)
    if pasted.dialect is not None and pasted.dialect not in DIALECTS:
        raise RefusedError(f"`{pasted.dialect}` is no API shape; there is: {', '.join(DIALECTS)}")
    headers = {name.strip().lower(): value.strip() for name, value in pasted.headers.items()}
    caller = Caller(headers, tenant.name, tenant.tags, pasted.dialect, gateway.wall())
    snapshot = gateway.snapshot
    candidate = snapshot.candidate
    # Beside the event loop: a prompt may be megabytes long.
    body = await asyncio.to_thread(_decoded, pasted.body)
    facts = await asyncio.to_thread(facts_of, body, caller)
    if gateway.counter is not None:
        facts.tokens = await gateway.counter.count(facts.conversation, facts.dialect, snapshot.policies)
    prompts = gateway.prompts if gateway.counter is None else gateway.counter.source
    tiers = gateway.config.tiers
    explanation = await asyncio.to_thread(explained, snapshot.policy, tiers, facts)
    told = _explanation(explanation, snapshot.policy, prompts)
    told["dialect"] = facts.dialect
    told["now"] = _now(gateway, explanation, tenant)
    told["problem"] = _problem(gateway, body, tenant)
    if candidate is not None:
        other = await asyncio.to_thread(explained, candidate.policy, tiers, facts)
        told["candidate"] = {"tier": other.decision.tier, "rule": other.decision.rule}
    return told


def _decoded(body: str | dict[str, Any]) -> dict[str, Any]:
    return decoded(body.encode()) if isinstance(body, str) else body


def _tenant(gateway: Gateway, name: str | None) -> Tenant:
    if name is None:
        return Tenant(ANONYMOUS)
    for tenant in gateway.snapshot.keyring.tenants:
        if tenant.name == name:
            return tenant
    raise RefusedError(f"there is no key `{name}`")


def _now(gateway: Gateway, explanation: Explanation, tenant: Tenant) -> dict[str, Any]:
    """The engine that would be asked first, or why there is none."""
    decision, fleet = explanation.decision, gateway.fleet
    for step in placement.steps(decision, fleet, tenant):
        engine = fleet.pick(step.tier)
        if engine is not None:
            because = "" if step.because == placement.WAITED else step.because
            return {"engine": engine.spec.name, "tier": step.tier, "because": because}
    return {"engine": None, "error": placement.nowhere(decision, fleet, tenant, None).message}


def _problem(gateway: Gateway, body: Mapping[str, Any], tenant: Tenant) -> str | None:
    """Why the gateway would not come to decide this request, as far as its model's name tells."""
    model, names = body.get("model"), gateway.names
    if model not in names:
        return f"the gateway answers 404: `model` must be one of {', '.join(names)}"
    if not tenant.may_ask(gateway.config.model, str(model)):
        return f"the gateway answers 403: this key may not use the model `{model}`"
    tier = names[str(model)]
    if tier is not None and not tenant.may_use(tier):
        return f"the gateway answers 403: this key may not use tier `{tier}`"
    return None


def policy(gateway: Gateway) -> dict[str, Any]:
    """The policy in force, and what its file holds now, with what is wrong with it. Reads and compiles the
    file: call it on another thread."""
    force = gateway.snapshot.policy
    candidate = gateway.snapshot.candidate
    text, problems, on_disk = "", list(force.warnings), force.hash
    try:
        text = policy_text(gateway.config.policy)[0]
        read = read_policy(gateway.config.policy, gateway.config, str(gateway.config.path))
        problems, on_disk = list(read.warnings), read.hash
    except ProblemsError as error:
        problems, on_disk = list(error.diagnostics), ""
    return {
        "file": force.file,
        "hash": force.hash,
        "on_disk": on_disk,
        "text": text,
        "diagnostics": [asdict(problem) for problem in problems],
        "affinity": force.affinity,
        "rules": [
            {
                "name": rule.name,
                "when": None if rule.when is None else rule.when.text,
                "send": rule.send,
                "if_unavailable": rule.contract,
                "if_busy": rule.busy,
                "priority": rule.priority,
                "trace": rule.trace,
                "edits": edits(rule.edits),
            }
            for rule in force.rules
        ],
        "classes": {name: condition.parts[0].text for name, condition in force.classes.items()},
        "plans": {name: _plan(plan) for name, plan in force.plans.items()},
        "candidate": None
        if candidate is None
        else {
            "file": candidate.policy.file,
            "hash": candidate.policy.hash,
            "diagnostics": [asdict(problem) for problem in candidate.policy.warnings],
        },
    }


def _plan(plan: Plan) -> list[dict[str, Any]]:
    """The limits of a plan; `field` is the name of their bucket."""
    rates: list[tuple[str, Sequence[Rate]]] = [("requests", plan.requests), ("tokens", plan.tokens)]
    rates += [(f"{tier}_tokens", some) for tier, some in plan.tier_tokens.items()]
    limits: list[dict[str, Any]] = [
        {
            "field": f"{kind}.{index}" if index else kind,
            "kind": kind.replace("_", " "),
            "amount": rate.amount,
            "seconds": rate.seconds,
        }
        for kind, some in rates
        for index, rate in enumerate(some)
    ]
    if plan.concurrent is not None:
        limits.append({"field": "concurrent", "kind": "at once", "amount": plan.concurrent, "seconds": None})
    return limits


async def tenants(
    gateway: Gateway, served: Mapping[str, tuple[float, float]] | None = None
) -> dict[str, Any]:
    """Tenants beside their plans, those with the most requests first; what is left of each limit now, None
    where the store of limits does not tell. `served`: requests and tokens of each, where they are not this
    process's alone."""
    totals = gateway.metrics.tenant_totals() if served is None else served
    plans = gateway.snapshot.policy.plans
    known = {tenant.name: tenant for tenant in gateway.snapshot.keyring.tenants}
    ordered = sorted(known.values(), key=lambda one: (-totals.get(one.name, (0.0, 0.0))[0], one.name))
    shown = ordered[:MOST_TENANTS]
    organisations = {one.organisation: one.shared for one in shown if one.organisation}
    holders = [_held(f"o:{name}", f"o:{name}", plans.get(plan)) for name, plan in organisations.items()]
    for one in shown:
        root = f"o:{one.organisation}" if one.organisation else f"t:{one.name}"
        holders.append(_held(root, f"t:{one.name}", plans.get(one.plan)))
    left = await gateway.store.levels(holders)
    now = gateway.wall()
    return {
        "tenants": [
            {
                "name": one.name,
                "plan": one.plan,
                "organisation": one.organisation,
                "tags": sorted(one.tags),
                "tiers": None if one.tiers is None else sorted(one.tiers),
                "valid": not one.disabled and now < one.expires,
                "requests": int(totals.get(one.name, (0.0, 0.0))[0]),
                "tokens": int(totals.get(one.name, (0.0, 0.0))[1]),
                "limits": _limits(plans.get(one.plan, NO_PLAN), left.get(f"t:{one.name}")),
            }
            for one in shown
        ],
        "organisations": [
            {"name": name, "plan": plan, "limits": _limits(plans.get(plan, NO_PLAN), left.get(f"o:{name}"))}
            for name, plan in sorted(organisations.items())
        ],
        "more": len(ordered) - len(shown),
    }


def _held(root: str, name: str, plan: Plan | None) -> Held:
    fields = (limit["field"] for limit in _plan(plan or NO_PLAN) if limit["seconds"] is not None)
    return Held(root, name, tuple(fields))


def _limits(plan: Plan, left: Mapping[str, float] | None) -> list[dict[str, Any]]:
    """Each limit of a plan with what is `used` of it; a bucket that nobody has touched is full."""
    limits = _plan(plan)
    for limit in limits:
        if left is None:
            limit["used"] = None
        elif limit["field"] == "concurrent":
            limit["used"] = int(left.get("concurrent", 0))
        else:
            limit["used"] = round(limit["amount"] - left.get(limit["field"], limit["amount"]), 1)
    return limits
