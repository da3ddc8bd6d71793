"""Plans: what a tenant may use. They are written in the policy and read by the gateway's limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from policies import units
from policies.document import Diagnostic, Document, Path, Position, unknown
from policies.units import Rate

DEFAULT_OUTPUT = 1024
MAX_WEIGHT = 1000.0
MODEL_KEYS = ("requests", "tokens", "concurrent")
PLAN_KEYS = (*MODEL_KEYS, "output", "wait", "weights", "cached", "models")


def _nothing() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Plan:
    """What a tenant may use; what is empty or None has no limit. Of several rates, all hold.

    `tokens` counts prompt and completion over all tiers, a token of a tier as `weights` says (1 where it says
    nothing); `tier_tokens` counts those of one tier (`exact_tokens` in the file), unweighted. A prompt token
    from the prefix cache counts `cached` (0..1) of another. `concurrent` counts requests in flight, and one
    more waits for up to `wait` seconds. `output` is how many completion tokens are reserved for a request
    that asks for no bound. `models` are limits of single model names, which hold beside the plan's; `at` is
    where such a one stands in the policy.
    """

    name: str
    requests: tuple[Rate, ...] = ()
    tokens: tuple[Rate, ...] = ()
    tier_tokens: Mapping[str, tuple[Rate, ...]] = field(default_factory=_nothing)
    concurrent: int | None = None
    output: int = DEFAULT_OUTPUT
    wait: float = 0.0
    weights: Mapping[str, float] = field(default_factory=_nothing)
    cached: float = 1.0
    models: Mapping[str, Plan] = field(default_factory=_nothing)
    at: Position = (1, 1)

    @property
    def counts_tokens(self) -> bool:
        """Whether any of its limits depends on how long a request is."""
        return bool(self.tokens or self.tier_tokens) or any(m.counts_tokens for m in self.models.values())


def plan_keys(tiers: Sequence[str], keys: Sequence[str] = PLAN_KEYS) -> tuple[str, ...]:
    """The keys that a plan may have."""
    return (*keys[:2], *(f"{tier}_tokens" for tier in tiers), *keys[2:])


def read_plans(document: Document, tiers: Sequence[str], problems: list[Diagnostic]) -> dict[str, Plan]:
    """The plans of a policy by name; what is wrong with them is added to `problems`."""
    value = document.value["plans"]
    if not isinstance(value, dict):
        problems.append(document.problem(("plans",), "`plans` is a mapping from names to limits"))
        return {}
    reader = _Reader(document, tiers, problems)
    return {name: reader.plan(name, item) for name, item in value.items()}


class _Reader:
    def __init__(self, document: Document, tiers: Sequence[str], problems: list[Diagnostic]) -> None:
        self._document = document
        self._tiers = tiers
        self._problems = problems

    def _problem(self, path: Path, message: str, *, key: bool = False) -> None:
        self._problems.append(self._document.problem(path, message, key=key))

    def plan(self, name: str, value: Any) -> Plan:
        path: Path = ("plans", name)
        if not self._keys(path, value, PLAN_KEYS):
            return Plan(name)
        output = self._one(path, value, "output", _at_least_one)
        wait = self._one(path, value, "wait", units.duration)
        if wait is not None and value.get("concurrent") is None:
            self._problem((*path, "wait"), "`wait` is for `concurrent`: give that too", key=True)
        cached = self._one(path, value, "cached", units.share)
        weights = self._mapping(path, value, "weights", "{exact: 4}")
        models = self._mapping(path, value, "models", "{smollm2: {requests: 10/min}}")
        return Plan(
            name,
            **self._limits(path, value),
            output=DEFAULT_OUTPUT if output is None else output,
            wait=0.0 if wait is None else wait,
            weights=MappingProxyType({tier: self._weight(path, weights, tier) for tier in weights}),
            cached=1.0 if cached is None else cached,
            models=MappingProxyType({model: self._model(path, name, models, model) for model in models}),
        )

    def _model(self, path: Path, plan: str, models: Mapping[str, Any], model: str) -> Plan:
        here = (*path, "models", model)
        name, at = f"{plan}, {model}", self._document.position(here, key=True)
        if not self._keys(here, models[model], MODEL_KEYS):
            return Plan(name, at=at)
        return Plan(name, **self._limits(here, models[model]), at=at)

    def _keys(self, path: Path, value: Any, keys: Sequence[str]) -> bool:
        """Whether it is a mapping; keys that it may not have are told."""
        if not isinstance(value, dict):
            what = "a plan is a mapping: {requests: 600/min, tokens: 200k/min}"
            self._problem(path, what)
            return False
        known = plan_keys(self._tiers, keys)
        for key in value:
            if key not in known:
                tier = key.removesuffix("_tokens")
                is_tier = tier != key
                message = unknown("tier", tier, self._tiers) if is_tier else unknown("key", key, known)
                self._problem((*path, key), message, key=True)
        return True

    def _limits(self, path: Path, value: Mapping[str, Any]) -> dict[str, Any]:
        by_tier = {tier: self._rates(path, value, f"{tier}_tokens") for tier in self._tiers}
        return {
            "requests": self._rates(path, value, "requests"),
            "tokens": self._rates(path, value, "tokens"),
            "tier_tokens": MappingProxyType({tier: rates for tier, rates in by_tier.items() if rates}),
            "concurrent": self._one(path, value, "concurrent", _at_least_one),
        }

    def _one(
        self, path: Path, value: Mapping[str, Any], key: str, parse: Callable[[object], Any]
    ) -> Any | None:
        return None if value.get(key) is None else self._parse((*path, key), value[key], parse)

    def _parse(self, path: Path, value: object, parse: Callable[[object], Any]) -> Any | None:
        try:
            return parse(value)
        except ValueError as error:
            self._problem(path, str(error))
            return None

    def _rates(self, path: Path, value: Mapping[str, Any], key: str) -> tuple[Rate, ...]:
        """One rate or several, from the shortest window to the longest."""
        given = value.get(key)
        if given is None:
            return ()
        if isinstance(given, list):
            if not given:
                self._problem((*path, key), "the list is empty: leave it out for no limit")
            rates = [self._parse((*path, key, i), item, units.rate) for i, item in enumerate(given)]
        else:
            rates = [self._parse((*path, key), given, units.rate)]
        read = sorted((rate for rate in rates if rate is not None), key=lambda rate: rate.seconds)
        if len({rate.seconds for rate in read}) < len(read):
            self._problem((*path, key), "the same window twice: keep the lower one")
        return tuple(read)

    def _mapping(self, path: Path, value: Mapping[str, Any], key: str, example: str) -> Mapping[str, Any]:
        given = value.get(key)
        if given is None:
            return {}
        if not isinstance(given, dict):
            self._problem((*path, key), f"`{key}` is a mapping: {example}")
            return {}
        return given

    def _weight(self, path: Path, weights: Mapping[str, Any], tier: str) -> float:
        here = (*path, "weights", tier)
        if tier not in self._tiers:
            self._problem(here, unknown("tier", tier, self._tiers), key=True)
        number = weights[tier]
        if isinstance(number, int | float) and not isinstance(number, bool) and 0 < number <= MAX_WEIGHT:
            return float(number)
        self._problem(here, f"a weight is a number above 0, {MAX_WEIGHT:g} at most: {{exact: 4}}")
        return 1.0


def _at_least_one(value: object) -> int:
    number = units.count(value)
    if number < 1:
        raise ValueError("expected 1 or more")
    return number
