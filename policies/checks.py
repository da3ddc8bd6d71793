"""What is wrong with a policy as a whole: names, cycles, rules that can never decide."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from policies.document import Diagnostic, Document, unknown
from policies.expressions import AllOf, AnyOf, ClassName, Expression, FieldTest, Not, SignalTest
from policies.syntax import PolicySyntax, RuleSyntax

MAX_NESTING = 64


def check(document: Document, syntax: PolicySyntax, *, whole: bool) -> list[Diagnostic]:
    """Errors and warnings; shadowed rules are only looked for where all of the policy could be read (`whole`)
    and every name is known.
    """
    problems = [*_names(document, syntax), *_order(document, syntax.rules)]
    if not problems:
        problems += _nesting(document, syntax)
    if not problems and whole:
        problems += [*_shadows(document, syntax), *_unused(document, syntax)]
    return problems


def _names(document: Document, syntax: PolicySyntax) -> Iterator[Diagnostic]:
    for path, name in syntax.references:
        if name not in syntax.classes:
            yield document.problem(path, unknown("class", name, syntax.classes))
    seen: dict[str, int] = {}
    for rule in syntax.rules:
        if rule.name in seen:
            message = f"the rule `{rule.name}` is already on line {seen[rule.name]}: names must differ"
            yield document.problem((*rule.path, "name"), message)
        seen.setdefault(rule.name, document.position(rule.path)[0])


def _order(document: Document, rules: tuple[RuleSyntax, ...]) -> Iterator[Diagnostic]:
    always: RuleSyntax | None = None
    for rule in rules:
        if always is not None:
            line = document.position(always.path)[0]
            message = (
                f"never reached: the rule `{always.name}` on line {line} has no `when`, so it always decides"
            )
            yield document.problem(rule.path, message)
        elif rule.when is None:
            always = rule
    if rules and always is None:
        message = "the last rule must have no `when`, so that every request is decided"
        yield document.problem(rules[-1].path, message)


def _nesting(document: Document, syntax: PolicySyntax) -> Iterator[Diagnostic]:
    """Cycles of classes, and conditions that go too deep once classes are put in."""
    waiting = {name: set(_references(expression)) for name, expression in syntax.classes.items()}
    depths: dict[str, int] = {}
    while ready := [name for name, names in waiting.items() if names <= depths.keys()]:
        for name in ready:
            del waiting[name]
            depths[name] = _depth(syntax.classes[name], depths)
    for name in waiting:
        if (cycle := _cycle(name, waiting)) is not None:
            message = f"the class `{name}` is defined by itself: {' -> '.join(cycle)}"
            yield document.problem(("classes", name), message, key=True)
    if waiting:
        return
    for name, depth in depths.items():
        if depth > MAX_NESTING:
            message = f"the class `{name}` nests deeper than {MAX_NESTING} conditions"
            yield document.problem(("classes", name), message, key=True)
            return
    for rule in syntax.rules:
        if rule.when is not None and _depth(rule.when, depths) > MAX_NESTING:
            message = f"the condition nests deeper than {MAX_NESTING} levels, classes put in"
            yield document.problem((*rule.path, "when"), message)


def _parts(expression: Expression) -> tuple[Expression, ...]:
    match expression:
        case AllOf(parts) | AnyOf(parts):
            return parts
        case Not(part):
            return (part,)
        case _:
            return ()


def _references(expression: Expression) -> Iterator[str]:
    if isinstance(expression, ClassName):
        yield expression.name
    for part in _parts(expression):
        yield from _references(part)


def _depth(expression: Expression, depths: Mapping[str, int]) -> int:
    if isinstance(expression, ClassName):
        return 1 + depths[expression.name]
    return 1 + max((_depth(part, depths) for part in _parts(expression)), default=0)


def _cycle(name: str, graph: Mapping[str, set[str]]) -> list[str] | None:
    """The shortest way from a class back to itself."""
    ways: list[list[str]] = [[name]]
    seen: set[str] = set()
    while ways:
        way = ways.pop(0)
        for step in sorted(graph.get(way[-1], ())):
            if step == name:
                return [*way, name]
            if step not in seen:
                seen.add(step)
                ways.append([*way, step])
    return None


def _unused(document: Document, syntax: PolicySyntax) -> Iterator[Diagnostic]:
    used = {name for _, name in syntax.references}
    for name in syntax.classes:
        if name not in used:
            message = f"the class `{name}` is used nowhere"
            yield document.problem(("classes", name), message, key=True, severity="warning")


def _shadows(document: Document, syntax: PolicySyntax) -> Iterator[Diagnostic]:
    implication = _Implication(syntax.classes)
    for index, rule in enumerate(syntax.rules):
        if rule.when is None:
            continue
        for earlier in syntax.rules[:index]:
            if earlier.when is not None and implication.holds(rule.when, earlier.when):
                line = document.position(earlier.path)[0]
                message = (
                    f"never reached: whenever it holds, the rule `{earlier.name}` on line {line} has decided"
                )
                yield document.problem((*rule.path, "when"), message, severity="warning")
                break


class _Implication:
    """Whether one condition can be seen to hold whenever another does. Sound, not complete."""

    BUDGET = 20_000

    def __init__(self, classes: Mapping[str, Expression]) -> None:
        self._classes = classes
        self._known: dict[tuple[Expression, Expression], bool] = {}

    def holds(self, left: Expression, right: Expression) -> bool:
        """Whether `left` implies `right`."""
        pair = (left, right)
        if pair not in self._known:
            if len(self._known) >= self.BUDGET:
                return False
            self._known[pair] = left == right or self._look(left, right)
        return self._known[pair]

    def _look(self, left: Expression, right: Expression) -> bool:
        if isinstance(left, ClassName):
            return self.holds(self._classes[left.name], right)
        if isinstance(right, ClassName):
            return self.holds(left, self._classes[right.name])
        if isinstance(left, AnyOf):
            return all(self.holds(part, right) for part in left.parts)
        if isinstance(right, AllOf):
            return all(self.holds(left, part) for part in right.parts)
        if isinstance(left, Not) and isinstance(right, Not) and self.holds(right.part, left.part):
            return True
        if isinstance(left, AllOf) and any(self.holds(part, right) for part in left.parts):
            return True
        if isinstance(right, AnyOf) and any(self.holds(left, part) for part in right.parts):
            return True
        if isinstance(left, SignalTest) and isinstance(right, SignalTest):
            return _signal_implies(left, right)
        if isinstance(left, FieldTest) and isinstance(right, FieldTest):
            return _field_implies(left, right)
        return False


def _signal_implies(left: SignalTest, right: SignalTest) -> bool:
    if left.signal != right.signal:
        return False
    a, b = left.operand, right.operand
    if left.op in ("equals", "in"):
        values = a if isinstance(a, frozenset) else frozenset((a,))
        return all(_satisfies(value, right) for value in values)
    if isinstance(a, frozenset | str) or isinstance(b, frozenset | str):
        return False
    if left.op in ("at_least", "above"):
        return (right.op == "at_least" and a >= b) or (
            right.op == "above" and (a > b or (a == b and left.op == "above"))
        )
    return (right.op == "at_most" and a <= b) or (
        right.op == "below" and (a < b or (a == b and left.op == "below"))
    )


def _satisfies(value: float | bool | str, test: SignalTest) -> bool:
    operand = test.operand
    if isinstance(operand, frozenset):
        return value in operand
    if test.op == "equals":
        return value == operand
    if isinstance(value, str) or isinstance(operand, str):
        return False
    if test.op == "at_least":
        return value >= operand
    if test.op == "above":
        return value > operand
    return value <= operand if test.op == "at_most" else value < operand


def _field_implies(left: FieldTest, right: FieldTest) -> bool:
    if (left.kind, left.key) != (right.kind, right.key):
        return False
    return right.values is None or (left.values is not None and left.values <= right.values)
