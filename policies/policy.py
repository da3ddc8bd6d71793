"""A policy: an immutable snapshot that decides. Deterministic, no I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from policies.decision import NO_EDITS, Busy, Contract, Decision, Edits, SignalValue
from policies.document import Diagnostic
from policies.facts import Facts
from policies.plan import Plan
from policies.signals import SIGNALS, Memo, Signal

OTHERWISE = "no rule before it held"
ALWAYS = "it has no `when`"
NEAR = 2.5
"""An estimated length may be wrong by this factor: more than it is for texts that were ever measured."""
NO_PATTERNS: Mapping[str, Signal] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Condition:
    """A compiled condition: `test` decides, `text` says what it asks, `parts` are what it is made of.

    `signal` is the name of the signal that it tests, `asked` the bound of a test by order, and `denied` what
    is said where it does not hold.
    """

    kind: Literal["all", "any", "not", "class", "signal", "field"]
    text: str
    test: Callable[[Facts, Memo], bool]
    parts: tuple[Condition, ...] = ()
    signal: str = ""
    asked: str = ""
    denied: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """`when` None always holds."""

    name: str
    when: Condition | None
    send: str
    contract: Contract
    busy: Busy | None = None
    priority: int = 0
    trace: bool = False
    edits: Edits = NO_EDITS


@dataclass(frozen=True, slots=True)
class RuleOutcome:
    """A rule beside a request: `reached` is false after the rule that decided."""

    name: str
    send: str
    held: bool
    reached: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """A decision with every signal (None: the request does not say) and every rule."""

    decision: Decision
    signals: Mapping[str, SignalValue | None]
    used: frozenset[str]
    rules: tuple[RuleOutcome, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """`hash` names the content. Its rules read `signals`, `patterns` (by their names), `fields` and the time.

    `fields` are headers and metadata entries, as (`header` or `metadata`, name), each with the values that it
    is compared with, without case; none where it need only be there. `shadow` names a candidate that decides
    beside this policy, `rollout` (0..1) is its share. `token_bounds` are what
    `prompt_tokens` is compared with, in order.
    """

    file: str
    hash: str
    rules: tuple[Rule, ...]
    plans: Mapping[str, Plan]
    affinity: str | None
    warnings: tuple[Diagnostic, ...]
    signals: frozenset[str]
    fields: Mapping[tuple[str, str], frozenset[str]]
    patterns: Mapping[str, Signal] = field(default_factory=lambda: NO_PATTERNS)
    token_bounds: tuple[float, ...] = ()
    shadow: str | None = None
    rollout: float = 0.0

    @property
    def classes(self) -> Mapping[str, Condition]:
        """The classes that rules use, by name."""
        found: dict[str, Condition] = {}
        waiting = [rule.when for rule in self.rules if rule.when is not None]
        while waiting:
            condition = waiting.pop()
            if condition.kind != "class" or condition.text not in found:
                waiting += condition.parts
                if condition.kind == "class":
                    found[condition.text] = condition
        return found

    def is_near(self, tokens: int) -> bool:
        """Whether an estimated length of the prompt is so near to a bound that counting may decide."""
        return any(bound / NEAR <= tokens <= bound * NEAR for bound in self.token_bounds)

    @property
    def least_near(self) -> float:
        """The shortest prompt for which `is_near` may be true."""
        return self.token_bounds[0] / NEAR if self.token_bounds else float("inf")

    @property
    def needs_conversation(self) -> bool:
        """Whether deciding may read the text of a request."""
        return bool(self.patterns) or any(SIGNALS[name].reads_text for name in self.signals)

    @property
    def tiers(self) -> frozenset[str]:
        """Every tier that a rule sends to or falls back to."""
        named = ((rule.send, rule.contract.use, rule.busy.use if rule.busy else None) for rule in self.rules)
        return frozenset(tier for tiers in named for tier in tiers if tier is not None)

    def rule_for(self, facts: Facts, memo: Memo) -> Rule:
        """The first rule that holds; the last one always holds.

        Signals that `memo` has already are not measured again; what is measured is left in it.
        """
        for rule in self.rules:
            when = rule.when
            if when is None or when.test(facts, memo):
                return rule
        raise AssertionError("the last rule of a policy has no condition")

    def decide(self, facts: Facts, memo: Memo | None = None) -> Decision:
        """The decision of the first rule that holds. `memo` is as for `rule_for`."""
        if memo is None:
            memo = {}
        return self._decision(self.rule_for(facts, memo), facts, memo)

    def explain(self, facts: Facts, memo: Memo | None = None) -> Explanation:
        """Every signal measured, every rule looked at. `memo` is as for `rule_for`."""
        memo = {} if memo is None else memo
        decision = self.decide(facts, dict(memo))
        signals = {
            name: memo[name] if name in memo else signal.read(facts, memo)
            for name, signal in (*SIGNALS.items(), *self.patterns.items())
        }
        memo.update(signals)
        outcomes: list[RuleOutcome] = []
        decided: Rule | None = None
        for rule in self.rules:
            held = rule.when is None or rule.when.test(facts, memo)
            if rule.when is None:
                reasons: tuple[str, ...] = (OTHERWISE if decided is None else ALWAYS,)
            else:
                reasons = tuple(_reasons(rule.when, held, facts, memo))
            outcomes.append(RuleOutcome(rule.name, rule.send, held, decided is None, reasons))
            if held and decided is None:
                decided = rule
        used = self.signals | self.patterns.keys()
        return Explanation(decision, MappingProxyType(signals), used, tuple(outcomes))

    def _decision(self, rule: Rule, facts: Facts, memo: Memo) -> Decision:
        reasons = (OTHERWISE,) if rule.when is None else tuple(_reasons(rule.when, True, facts, memo))
        return Decision(
            rule.send,
            rule.name,
            rule.contract,
            self.hash,
            rule.busy,
            reasons,
            MappingProxyType(memo.copy()),
            rule.priority,
            rule.trace,
            rule.edits,
        )


def _reasons(condition: Condition, held: bool, facts: Facts, memo: Memo) -> Iterator[str]:
    """Why a condition holds, or why it does not: the tests that settled it, with what was measured."""
    if condition.kind == "class":
        inner = ", ".join(_reasons(condition.parts[0], held, facts, memo))
        yield f"{condition.text}: {inner}" if held else f"not {condition.text}: {inner}"
    elif condition.kind == "not":
        yield from _reasons(condition.parts[0], not held, facts, memo)
    elif condition.kind in ("all", "any"):
        # `all` that holds and `any` that does not are settled by every part, the others by the first.
        settled_by_one = (condition.kind == "any") == held
        for part in condition.parts:
            if part.test(facts, memo) == held:
                yield from _reasons(part, held, facts, memo)
                if settled_by_one:
                    return
    elif condition.kind == "signal":
        yield _measured(condition, held, memo)
    else:
        yield condition.text if held else condition.denied


def _measured(condition: Condition, held: bool, memo: Memo) -> str:
    value = memo[condition.signal]
    if value is None:
        return f"{condition.signal} is not given, asked: {condition.text}"
    if isinstance(value, bool):
        return f"{condition.signal} is {'true' if value else 'false'}"
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    if condition.asked:
        return f"{condition.signal} {shown}{'' if held else ', not'} {condition.asked}"
    return f"{condition.signal} is {shown}{'' if held else condition.denied}"
