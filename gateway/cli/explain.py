"""`dualgauge explain`: how requests would be decided, without an engine or a running gateway."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import IO, Any

import click
import msgspec

from gateway.cli.chosen import compiled, deployed, tiers_of
from policies.decision import Contract, pinned
from policies.facts import Facts
from policies.policy import Explanation, Policy

_NAMES = ("chat", "completions", "responses", "embeddings", "messages")
_DIALECTS = {
    **{name: f"openai.{name}" for name in _NAMES[:-1]},
    "messages": "anthropic.messages",
}


class _RefusedError(Exception):
    """A request that the gateway would not take; the text says why."""


def _headers(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for value in values:
        name, colon, text = value.partition(":")
        if not colon or not name.strip():
            raise click.BadParameter(f"`{value}`: write it as `x-criticality: high`")
        headers[name.strip().lower()] = text.strip()
    return headers


@click.command("explain")
@click.argument("file", required=False)
@click.option("--text", help="Explain this user message instead of a request body.")
@click.option(
    "--jsonl", metavar="FILE", help="One request body a line (`-`: stdin), one JSON object a line out."
)
@click.option(
    "--policy", metavar="POLICY", help="A path or a shipped name. [default: that of ./dualgauge.yaml]"
)
@click.option("--header", "headers", multiple=True, callback=_headers, help="A header, as `name: value`.")
@click.option("--dialect", type=click.Choice(_NAMES), help="The API shape. [default: told from the body]")
@click.option("--tenant", default="anonymous", show_default=True, help="The public name of the caller's key.")
@click.option("--tag", "tags", multiple=True, help="A tag of the caller's key.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def explain_command(
    file: str | None,
    text: str | None,
    jsonl: str | None,
    policy: str | None,
    headers: dict[str, str],
    dialect: str | None,
    tenant: str,
    tags: tuple[str, ...],
    as_json: bool,
) -> None:
    """Show how a request would be decided: its signals, each rule held or not, and why.

    FILE holds a request body as JSON; `-` reads it from stdin.
    """
    if sum(source is not None for source in (file, text, jsonl)) != 1:
        raise click.UsageError("give one of FILE, --text and --jsonl")
    rules, tiers = _policy(policy)

    def explain(raw: bytes) -> Explanation:
        return _explain(rules, tiers, _facts(raw, dialect, headers, tenant, frozenset(tags)))

    if jsonl is not None:
        with _opened(jsonl) as lines:
            sys.exit(_explain_lines(lines, explain))
    if text is not None:
        raw = msgspec.json.encode({"messages": [{"role": "user", "content": text}]})
    else:
        with _opened(str(file)) as stream:
            raw = stream.read()
    try:
        explanation = explain(raw)
    except _RefusedError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(_record(explanation, rules)), indent=2))
    else:
        for line in _lines(explanation, rules):
            click.echo(line)


def _opened(file: str) -> IO[Any]:
    try:
        return click.open_file(file, "rb")
    except OSError as error:
        raise click.ClickException(f"cannot read {file}: {error.strerror}") from None


def _policy(policy: str | None) -> tuple[Policy, tuple[str, ...]]:
    """The policy asked for, else that of the deployment here, else the shipped default."""
    deployment = deployed() if policy is None else None
    tiers = tiers_of(deployment)
    if policy is None and deployment is not None:
        policy = deployment.policy
    return compiled(policy or "default", tiers), tiers


def _facts(
    raw: bytes, dialect: str | None, headers: Mapping[str, str], tenant: str, tags: frozenset[str]
) -> Facts:
    from gateway.dialects import facts_from_body
    from gateway.errors import GatewayError

    try:
        body = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _RefusedError(f"not a JSON object: {error}") from None
    if dialect is None:
        dialect = "completions" if "prompt" in body else "responses" if "input" in body else "chat"
    try:
        return facts_from_body(_DIALECTS[dialect], body, headers, tenant=tenant, tags=tags)
    except GatewayError as error:
        raise _RefusedError(error.message) from None


def _explain(policy: Policy, tiers: tuple[str, ...], facts: Facts) -> Explanation:
    """As the policy has it, but a model name that pins its tier decides before any rule."""
    explanation = policy.explain(facts)
    _, colon, tier = facts.model.rpartition(":")
    if not colon or tier not in tiers:
        return explanation
    rules = tuple(replace(rule, reached=False) for rule in explanation.rules)
    return Explanation(pinned(tier, policy.hash), explanation.signals, explanation.used, rules)


def _explain_lines(lines: Iterable[bytes], explain: Callable[[bytes], Explanation]) -> int:
    """One record a line, in order; a line that cannot be explained has `error` instead. The exit status."""
    status = 0
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        record: dict[str, Any]
        try:
            explanation = explain(raw)
            decision = explanation.decision
            record = {
                "tier": decision.tier,
                "rule": decision.rule,
                "signals": _signals(explanation),
                "reasons": decision.reasons,
            }
        except _RefusedError as error:
            record, status = {"line": number, "error": str(error)}, 1
        click.echo(msgspec.json.encode(record))
    return status


def _signals(explanation: Explanation) -> dict[str, Any]:
    """Signals with a value, scores to four digits."""
    return {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in explanation.signals.items()
        if value is not None
    }


def _record(explanation: Explanation, policy: Policy) -> dict[str, Any]:
    decision = explanation.decision
    return {
        "tier": decision.tier,
        "rule": decision.rule,
        "reasons": decision.reasons,
        "if_busy": decision.if_busy,
        "if_unavailable": decision.contract,
        "policy": {"file": policy.file, "hash": policy.hash},
        "signals": _signals(explanation),
        "rules": explanation.rules,
    }


def _lines(explanation: Explanation, policy: Policy) -> Iterator[str]:
    decision = explanation.decision
    yield f"{click.style(decision.tier, bold=True)}, by the rule `{decision.rule}`"
    for reason in decision.reasons:
        yield f"  {reason}"
    yield f"  if unavailable: {_contract(decision.contract)}"
    if decision.if_busy is not None:
        busy = decision.if_busy
        yield f"  if busy ({busy.waiting} waiting or {busy.kv:.0%} of the KV cache): {busy.use}"
    yield ""
    yield "signals"
    for name, value in explanation.signals.items():
        shown = "not given" if value is None else _shown(value)
        unread = "" if name in explanation.used else click.style("  (no rule reads it)", dim=True)
        yield f"  {name:<14} {shown}{unread}"
    yield ""
    yield f"rules of {policy.file} ({policy.hash})"
    for rule in explanation.rules:
        mark = "*" if rule.held and rule.reached else "+" if rule.held else "-"
        late = "" if rule.reached else click.style("  (decided before)", dim=True)
        yield f"  {mark} {rule.name} -> {rule.send}{late}"
        for reason in rule.reasons:
            yield f"      {reason}"
    yield click.style("* decides   + holds too   - does not hold", dim=True)


def _contract(contract: Contract) -> str:
    if contract.kind == "use":
        return f"use {contract.use}"
    if contract.kind == "wait":
        return f"wait {contract.wait:g}s, then {contract.then}"
    return contract.kind


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
