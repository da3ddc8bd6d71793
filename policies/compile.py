"""From the text of a policy to a `Policy`: names are resolved, conditions become closures."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from policies import checks
from policies.decision import NO_EDITS, Edits
from policies.document import ProblemsError, content_hash, load
from policies.expressions import (
    COMPARISONS,
    PAIRS,
    AllOf,
    AnyOf,
    ClassName,
    Expression,
    FieldTest,
    Not,
    PatternTest,
    SignalTest,
    folded,
    text_of,
)
from policies.facts import Facts
from policies.patterns import PLACES, pattern_signal
from policies.policy import Condition, Policy, Rule
from policies.signals import SIGNALS, Memo, Signal
from policies.signals.prompt import PROMPT_SIGNAL
from policies.syntax import read
from policies.times import Window, inside

TIERS = ("fast", "exact")

_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "at_least": operator.ge,
    "above": operator.gt,
    "at_most": operator.le,
    "below": operator.lt,
    "equals": operator.eq,
    "in": lambda value, values: value in values,
}


def compile_policy(
    text: str, file: str, *, tiers: Sequence[str] = TIERS, served: Collection[str] | None = None
) -> Policy:
    """The policy that a YAML text says, immutable and ready to decide.

    `tiers` are the deployment's, from the least to the most precise, and `served` those that have an engine,
    where that is known. Raises ProblemsError with every error; what is only suspicious ends up in the
    policy's `warnings`.
    """
    document = load(text, file)
    syntax, problems = read(document, tiers)
    problems += checks.check(document, syntax, served, whole=not problems)
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        raise ProblemsError(problems)
    policy_hash = content_hash(text)
    compiler = _Compiler(syntax.classes, Counter(name for _, name in syntax.references))
    rules = tuple(
        Rule(
            name=rule.name,
            when=None if rule.when is None else compiler.condition(rule.when),
            send=rule.send,
            contract=rule.contract,
            busy=rule.busy,
            priority=rule.priority,
            trace=rule.trace,
            edits=_edits(rule.max_tokens, rule.temperature),
        )
        for rule in syntax.rules
    )
    return Policy(
        file=file,
        hash=policy_hash,
        rules=rules,
        plans=syntax.plans,
        affinity=syntax.affinity,
        warnings=tuple(sorted(problems)),
        signals=frozenset(compiler.signals),
        fields=MappingProxyType(compiler.fields),
        patterns=MappingProxyType(compiler.patterns),
        token_bounds=tuple(sorted(compiler.token_bounds)),
        shadow=syntax.shadow,
        rollout=syntax.rollout,
    )


def _edits(max_tokens: int | None, temperature: float | None) -> Edits:
    return NO_EDITS if max_tokens is None and temperature is None else Edits(max_tokens, temperature)


class _Compiler:
    def __init__(self, classes: Mapping[str, Expression], uses: Mapping[str, int]) -> None:
        self._classes = classes
        self._uses = uses
        self._conditions: dict[str, Condition] = {}
        self.signals: set[str] = set()
        self.fields: dict[tuple[str, str], frozenset[str]] = {}
        self.patterns: dict[str, Signal] = {}
        self.token_bounds: set[float] = set()

    def condition(self, expression: Expression) -> Condition:
        match expression:
            case AllOf(parts):
                return _all([self.condition(part) for part in parts])
            case AnyOf(parts):
                return _any([self.condition(part) for part in parts])
            case Not(part):
                return _not(self.condition(part))
            case ClassName(name):
                if name not in self._conditions:
                    inner = self.condition(self._classes[name])
                    self._conditions[name] = _class(name, inner, once=self._uses[name] == 1)
                return self._conditions[name]
            case SignalTest():
                self.signals.add(expression.signal)
                if expression.signal == PROMPT_SIGNAL.name:
                    operand = expression.operand
                    bounds = operand if isinstance(operand, frozenset) else (operand,)
                    self.token_bounds.update(float(bound) for bound in bounds)
                return _signal(expression)
            case FieldTest():
                if expression.kind in PAIRS:
                    at = (expression.kind, expression.key)
                    self.fields[at] = self.fields.get(at, frozenset()) | (expression.values or frozenset())
                return _field(expression)
            case PatternTest(place, pattern):
                signal = pattern_signal(place, pattern)
                self.patterns[signal.name] = signal
                return _pattern(signal, PLACES[place], pattern)
            case Window():
                return _window(expression)


def _all(parts: list[Condition]) -> Condition:
    tests = tuple(part.test for part in parts)

    def test(facts: Facts, memo: Memo) -> bool:
        for one in tests:  # noqa: SIM110 - a generator would cost more than the tests
            if not one(facts, memo):
                return False
        return True

    return Condition("all", " and ".join(_bracketed(part) for part in parts), test, tuple(parts))


def _any(parts: list[Condition]) -> Condition:
    tests = tuple(part.test for part in parts)

    def test(facts: Facts, memo: Memo) -> bool:
        for one in tests:  # noqa: SIM110
            if one(facts, memo):
                return True
        return False

    return Condition("any", " or ".join(_bracketed(part) for part in parts), test, tuple(parts))


def _bracketed(part: Condition) -> str:
    return f"({part.text})" if part.kind in ("all", "any") and len(part.parts) > 1 else part.text


def _not(part: Condition) -> Condition:
    inner = part.test
    return Condition("not", f"not {_bracketed(part)}", lambda facts, memo: not inner(facts, memo), (part,))


def _class(name: str, part: Condition, *, once: bool) -> Condition:
    """A class that is used more than `once` is looked at once a request all the same."""
    inner, key = part.test, f".class {name}"

    def test(facts: Facts, memo: Memo) -> bool:
        held = memo.get(key)
        if held is None:
            held = memo[key] = inner(facts, memo)
        return bool(held)

    return Condition("class", name, inner if once else test, (part,))


def _signal(expression: SignalTest) -> Condition:
    name, operand = expression.signal, expression.operand
    signal, compare = SIGNALS[name], _COMPARE[expression.op]
    measure = signal.read
    wanted = f"{COMPARISONS[expression.op]} {_listed(operand)}".strip()
    asked, denied = wanted, ""
    if expression.op in ("equals", "in"):
        text, asked, denied = f"{name} is {wanted}", "", f", not {wanted}"
    else:
        text = f"{name} {wanted}"

    def test(facts: Facts, memo: Memo) -> bool:
        value = memo.get(name)
        if value is None and name not in memo:
            value = memo[name] = measure(facts, memo)
        return value is not None and compare(value, operand)

    return Condition("signal", text, test, signal=name, asked=asked, denied=denied)


def _pattern(signal: Signal, place: str, pattern: str) -> Condition:
    name, measure = signal.name, signal.read

    def test(facts: Facts, memo: Memo) -> bool:
        held = memo.get(name)
        if held is None:
            held = memo[name] = measure(facts, memo)
        return bool(held)

    return Condition("field", f"{place} matches {pattern}", test, denied=f"{place} does not match {pattern}")


def _window(window: Window) -> Condition:
    within = inside(window)

    def test(facts: Facts, _memo: Memo) -> bool:
        return facts.time is not None and within(facts.time)

    return Condition("field", f"the time is within {window}", test, denied=f"the time is not within {window}")


def _field(expression: FieldTest) -> Condition:
    kind, key, values = expression.kind, expression.key, expression.values
    what = f"{kind} {key}".strip()
    if values is None:
        asked = "given"
    else:
        asked = _listed(values) if len(values) == 1 else f"one of {_listed(values)}"
    return Condition(
        "field", f"{what} is {asked}", _field_test(kind, key, values), denied=f"{what} is not {asked}"
    )


def _field_test(kind: str, key: str, values: frozenset[str] | None) -> Callable[[Facts, Memo], bool]:
    if values is None:
        if kind == "header":
            return lambda facts, _memo: key in facts.headers
        return lambda facts, _memo: key in facts.metadata
    if kind == "header":

        def header(facts: Facts, _memo: Memo) -> bool:
            value = facts.headers.get(key)
            return value is not None and value.strip().casefold() in values

        return header
    if kind == "metadata":

        def metadata(facts: Facts, _memo: Memo) -> bool:
            return folded(facts.metadata.get(key)) in values

        return metadata
    if kind == "tenant_tag":
        return lambda facts, _memo: not values.isdisjoint(facts.tags)
    if kind == "tenant":
        return lambda facts, _memo: facts.tenant in values
    if kind == "model":
        return lambda facts, _memo: facts.model in values
    return lambda facts, _memo: facts.dialect in values


def _listed(operand: object) -> str:
    if isinstance(operand, frozenset):
        return ", ".join(sorted(map(text_of, operand)))
    return text_of(operand)
