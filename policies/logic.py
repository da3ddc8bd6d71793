"""What can be told of conditions without a request: what implies or excludes what, holds always or never.

Sound, not complete: a yes is true of every request, a no says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations, islice
from typing import Any

from policies.expressions import AllOf, AnyOf, ClassName, Expression, FieldTest, Not, SignalTest
from policies.signals import SIGNALS

BUDGET = 20_000
"""Questions that are looked into in one policy; what is left then is taken for possible."""

_RANGES: Mapping[str, tuple[float, float]] = {
    "score": (0, 1),
    "share": (0, 1),
    "count": (0, float("inf")),
    "number": (float("-inf"), float("inf")),
}
_Bound = tuple[float, bool]
"""A bound, and whether it belongs to the range itself."""


class Logic:
    """Questions about the conditions of one policy; `classes` have no cycles."""

    def __init__(self, classes: Mapping[str, Expression]) -> None:
        self._classes = classes
        self._known: dict[tuple[str, Expression, Expression | None], bool] = {}

    def implies(self, left: Expression, right: Expression) -> bool:
        """Whether `right` holds wherever `left` does."""
        if left == right:
            return True
        return self._ask("implies", self._implies, left, right)

    def excludes(self, left: Expression, right: Expression) -> bool:
        """Whether the two never hold together."""
        return self._ask("excludes", self._excludes, left, right)

    def complete(self, left: Expression, right: Expression) -> bool:
        """Whether one of the two always holds."""
        if not isinstance(self._opened(left), Not | AnyOf) and not isinstance(
            self._opened(right), Not | AnyOf
        ):
            return False  # what asks for something, alone or together, leaves the rest to a negation
        return self.implies(Not(left), right) or self.implies(Not(right), left)

    def never(self, condition: Expression) -> bool:
        """Whether it holds for no request."""
        return self._ask("never", lambda one, _: self._never(one), condition)

    def always(self, condition: Expression) -> bool:
        """Whether it holds for every request."""
        return self._ask("always", lambda one, _: self._always(one), condition)

    @property
    def is_spent(self) -> bool:
        """Whether every further question would be answered with no."""
        return len(self._known) >= BUDGET

    def _ask(
        self,
        what: str,
        look: Callable[[Expression, Any], bool],
        left: Expression,
        right: Expression | None = None,
    ) -> bool:
        """Each question is looked into once: classes that use each other many times cost no more."""
        question = (what, left, right)
        if question not in self._known:
            if len(self._known) >= BUDGET:
                return False
            self._known[question] = look(left, right)
        return self._known[question]

    def _never(self, condition: Expression) -> bool:
        match condition:
            case ClassName(name):
                return self.never(self._classes[name])
            case Not(part):
                return self.always(part)
            case AnyOf(parts):
                return all(self.never(part) for part in parts)
            case AllOf(parts):
                if any(self.never(part) for part in parts):
                    return True
                return any(self.excludes(*pair) for pair in islice(combinations(parts, 2), BUDGET))
            case SignalTest():
                return _is_empty(condition)
            case _:
                return False

    def _always(self, condition: Expression) -> bool:
        match condition:
            case ClassName(name):
                return self.always(self._classes[name])
            case Not(part):
                return self.never(part)
            case AllOf(parts):
                return all(self.always(part) for part in parts)
            case AnyOf(parts):
                if any(self.always(part) for part in parts):
                    return True
                return any(self.complete(*pair) for pair in islice(combinations(parts, 2), BUDGET))
            case _:
                return False

    def _implies(self, left: Expression, right: Expression) -> bool:
        if isinstance(left, ClassName):
            return self.implies(self._classes[left.name], right)
        if isinstance(right, ClassName):
            return self.implies(left, self._classes[right.name])
        if isinstance(left, AnyOf):
            return all(self.implies(part, right) for part in left.parts)
        if isinstance(right, AllOf):
            return all(self.implies(left, part) for part in right.parts)
        if isinstance(left, Not) and isinstance(right, Not) and self.implies(right.part, left.part):
            return True
        if isinstance(left, Not) and self._opened(left.part) is not left.part:
            return self.implies(Not(self._opened(left.part)), right)
        if isinstance(left, AllOf) and any(self.implies(part, right) for part in left.parts):
            return True
        if isinstance(right, AnyOf) and any(self.implies(left, part) for part in right.parts):
            return True
        if isinstance(left, SignalTest) and isinstance(right, SignalTest):
            return _signal_implies(left, right)
        if isinstance(left, FieldTest) and isinstance(right, FieldTest):
            return _field_implies(left, right)
        return False

    def _opened(self, condition: Expression) -> Expression:
        """The condition that a class stands for."""
        while isinstance(condition, ClassName):
            condition = self._classes[condition.name]
        return condition

    def _excludes(self, left: Expression, right: Expression) -> bool:
        if isinstance(left, ClassName):
            return self.excludes(self._classes[left.name], right)
        if isinstance(right, ClassName):
            return self.excludes(left, self._classes[right.name])
        if isinstance(right, Not) and self.implies(left, right.part):
            return True
        if isinstance(left, Not) and self.implies(right, left.part):
            return True
        for one, other in ((left, right), (right, left)):
            if isinstance(one, AnyOf):
                return all(self.excludes(part, other) for part in one.parts)
            if isinstance(one, AllOf) and any(self.excludes(part, other) for part in one.parts):
                return True
        if isinstance(left, SignalTest) and isinstance(right, SignalTest):
            return _signal_excludes(left, right)
        if isinstance(left, FieldTest) and isinstance(right, FieldTest):
            return _field_excludes(left, right)
        return False


def _values(test: SignalTest) -> frozenset[float | int | bool | str] | None:
    """The values of an `equals` or `in`, None where a test compares by order."""
    if test.op not in ("equals", "in"):
        return None
    return test.operand if isinstance(test.operand, frozenset) else frozenset((test.operand,))


def _bounds(test: SignalTest) -> tuple[_Bound, _Bound]:
    """From where to where a test by order holds, within what the signal can be."""
    least, most = _RANGES[SIGNALS[test.signal].kind]
    low, high = (least, True), (most, True)
    bound = test.operand
    assert isinstance(bound, int | float)
    if test.op in ("at_least", "above"):
        low = max(low, (bound, test.op == "at_least"), key=lambda one: (one[0], not one[1]))
    else:
        high = min(high, (bound, test.op == "at_most"), key=lambda one: (one[0], one[1]))
    return low, high


def _apart(low: _Bound, high: _Bound) -> bool:
    return low[0] > high[0] or (low[0] == high[0] and not (low[1] and high[1]))


def _is_empty(test: SignalTest) -> bool:
    if _values(test) is not None:
        return False
    return _apart(*_bounds(test))


def _signal_implies(left: SignalTest, right: SignalTest) -> bool:
    if left.signal != right.signal:
        return False
    values = _values(left)
    if values is not None:
        return all(_satisfies(value, right) for value in values)
    if _values(right) is not None:
        return False
    (low, high), (least, most) = _bounds(left), _bounds(right)
    return (low[0], not low[1]) >= (least[0], not least[1]) and (high[0], high[1]) <= (most[0], most[1])


def _signal_excludes(left: SignalTest, right: SignalTest) -> bool:
    if left.signal != right.signal:
        return False
    for one, other in ((left, right), (right, left)):
        values = _values(one)
        if values is not None:
            return not any(_satisfies(value, other) for value in values)
    (low, high), (least, most) = _bounds(left), _bounds(right)
    return _apart(low, most) or _apart(least, high)


def _satisfies(value: float | bool | str, test: SignalTest) -> bool:
    values = _values(test)
    if values is not None:
        return value in values
    if isinstance(value, str):
        return False
    return not _apart((value, True), _bounds(test)[1]) and not _apart(_bounds(test)[0], (value, True))


def _field_implies(left: FieldTest, right: FieldTest) -> bool:
    if (left.kind, left.key) != (right.kind, right.key):
        return False
    return right.values is None or (left.values is not None and left.values <= right.values)


def _field_excludes(left: FieldTest, right: FieldTest) -> bool:
    if (left.kind, left.key) != (right.kind, right.key) or left.kind == "tenant_tag":
        return False
    return left.values is not None and right.values is not None and not left.values & right.values
