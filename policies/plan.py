"""Plans: what a tenant may use. They are written in the policy and read by the gateway's limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from policies import units
from policies.document import Diagnostic, Document, Path, unknown
from policies.units import Rate

DEFAULT_OUTPUT = 1024
NO_RATES: Mapping[str, Rate] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Plan:
    """What a tenant may use; None means no limit.

    `tokens` counts prompt and completion over all tiers, `tier_tokens` those of one tier (`exact_tokens` in
    the file), `concurrent` the requests in flight. `output` is how many completion tokens are reserved for a
    request that asks for no bound.
    """

    name: str
    requests: Rate | None = None
    tokens: Rate | None = None
    tier_tokens: Mapping[str, Rate] = field(default_factory=lambda: NO_RATES)
    concurrent: int | None = None
    output: int = DEFAULT_OUTPUT


def plan_keys(tiers: Sequence[str]) -> tuple[str, ...]:
    """The keys that a plan may have."""
    return ("requests", "tokens", *(f"{tier}_tokens" for tier in tiers), "concurrent", "output")


def read_plans(document: Document, tiers: Sequence[str], problems: list[Diagnostic]) -> dict[str, Plan]:
    """The plans of a policy by name; what is wrong with them is added to `problems`."""
    value = document.value["plans"]
    if not isinstance(value, dict):
        problems.append(document.problem(("plans",), "`plans` is a mapping from names to limits"))
        return {}
    return {name: _plan(document, name, item, tiers, problems) for name, item in value.items()}


def _plan(
    document: Document, name: str, value: Any, tiers: Sequence[str], problems: list[Diagnostic]
) -> Plan:
    path: Path = ("plans", name)
    if not isinstance(value, dict):
        problems.append(document.problem(path, "a plan is a mapping: {requests: 600/min, tokens: 200k/min}"))
        return Plan(name)
    known = plan_keys(tiers)
    for key in value:
        if key in known:
            continue
        tier = key.removesuffix("_tokens")
        message = unknown("tier", tier, tiers) if tier != key else unknown("key", key, known)
        problems.append(document.problem((*path, key), message, key=True))

    def read(key: str, parse: Callable[[object], Any]) -> Any:
        if value.get(key) is None:
            return None
        try:
            return parse(value[key])
        except ValueError as error:
            problems.append(document.problem((*path, key), str(error)))
            return None

    rates = {tier: read(f"{tier}_tokens", units.rate) for tier in tiers}
    output = read("output", _at_least_one)
    return Plan(
        name,
        requests=read("requests", units.rate),
        tokens=read("tokens", units.rate),
        tier_tokens=MappingProxyType({tier: rate for tier, rate in rates.items() if rate is not None}),
        concurrent=read("concurrent", _at_least_one),
        output=DEFAULT_OUTPUT if output is None else output,
    )


def _at_least_one(value: object) -> int:
    number = units.count(value)
    if number < 1:
        raise ValueError("expected 1 or more")
    return number
