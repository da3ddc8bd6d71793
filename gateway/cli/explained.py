"""How explanations are shown on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

import click

from policies.decision import Contract
from policies.policy import Explanation, Policy


def lines(explanation: Explanation, policy: Policy, prompts: str = "") -> Iterator[str]:
    decision = explanation.decision
    yield f"{click.style(decision.tier, bold=True)}, by the rule `{decision.rule}`"
    for reason in decision.reasons:
        yield f"  {reason}"
    yield f"  if unavailable: {_contract(decision.contract)}"
    if decision.if_busy is not None:
        busy = decision.if_busy
        long = "" if busy.wait is None else f" or a wait of {busy.wait:g} s"
        yield f"  if busy ({busy.waiting} waiting or {busy.kv:.0%} of the KV cache{long}): {busy.use}"
    if decision.edits.max_tokens is not None:
        yield f"  caps the output at {decision.edits.max_tokens} tokens"
    if decision.edits.temperature is not None:
        yield f"  sets the temperature to {decision.edits.temperature:g}"
    if decision.priority:
        yield f"  priority: {decision.priority}"
    if decision.trace:
        yield "  always traced"
    yield ""
    yield "signals"
    width = max(map(len, explanation.signals))
    for name, value in explanation.signals.items():
        shown = "not given" if value is None else _shown(value)
        unread = "" if name in explanation.used else click.style("  (no rule reads it)", dim=True)
        how = f"  ({prompts})" if prompts and name == "prompt_tokens" else ""
        yield f"  {name:<{width}} {shown}{how}{unread}"
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
