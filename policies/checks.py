"""What is wrong with a policy as a whole: names, cycles, rules that can never decide."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import islice

from policies.document import Diagnostic, Document, Path, unknown
from policies.expressions import AllOf, AnyOf, ClassName, Expression, Not
from policies.logic import Logic
from policies.syntax import PolicySyntax, RuleSyntax

MAX_NESTING = 64
MAX_CYCLES = 20
"""Classes that are told to be defined by themselves; a cycle of many has as many."""
MAX_STEPS = 8


def check(
    document: Document, syntax: PolicySyntax, served: Collection[str] | None, *, whole: bool
) -> list[Diagnostic]:
    """Errors and warnings; shadowed rules are only looked for where all of the policy could be read (`whole`)
    and every name is known. `served` are the tiers that have an engine, None where that is not known.
    """
    problems = [*_names(document, syntax), *_order(document, syntax.rules)]
    if not problems:
        problems += _nesting(document, syntax)
    if not problems and whole:
        problems += [*_shadows(document, syntax), *_unused(document, syntax)]
        if served is not None:
            problems += _unserved(document, syntax.rules, served)
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
    cycles = ((name, cycle) for name in waiting if (cycle := _cycle(name, waiting)) is not None)
    for name, cycle in islice(cycles, MAX_CYCLES):
        shown = cycle if len(cycle) <= MAX_STEPS else [*cycle[: MAX_STEPS - 2], "...", name]
        message = f"the class `{name}` is defined by itself: {' -> '.join(shown)}"
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


def _unserved(
    document: Document, rules: tuple[RuleSyntax, ...], served: Collection[str]
) -> Iterator[Diagnostic]:
    """Tiers that rules name and no engine has, each once, where it is named first."""
    places: dict[str, list[Path]] = {}
    for rule in rules:
        named: list[tuple[Path, str]] = [(("send",), rule.send)]
        if rule.busy is not None:
            spelt = document.has((*rule.path, "if_busy", "use"))
            named.append((("if_busy", "use") if spelt else ("if_busy",), rule.busy.use))
        if rule.contract.use is not None:
            named.append((("if_unavailable", "use"), rule.contract.use))
        for where, tier in named:
            if tier not in served:
                places.setdefault(tier, []).append((*rule.path, *where))
    for tier, paths in places.items():
        often = "" if len(paths) == 1 else f", which is named {len(paths)} times"
        yield document.problem(paths[0], f"no engine has the tier `{tier}`{often}", severity="warning")


def _shadows(document: Document, syntax: PolicySyntax) -> Iterator[Diagnostic]:
    """Rules that never decide, by what they ask for themselves or by the rules before them."""
    logic = Logic(syntax.classes)
    before: list[tuple[RuleSyntax, Expression]] = []
    decided = False
    for rule in syntax.rules:
        if logic.is_spent:
            return
        message = None
        if decided:
            message = "never reached: of the rules before it, one always holds"
        elif rule.when is not None:
            if logic.never(rule.when):
                message = "never holds: what it asks for excludes itself"
            else:
                message = _shadow(document, logic, rule.when, before)
                decided = logic.always(rule.when) or any(
                    logic.complete(rule.when, earlier) for _, earlier in before
                )
                before.append((rule, rule.when))
        if message is not None:
            where = rule.path if rule.when is None else (*rule.path, "when")
            yield document.problem(where, message, severity="warning")


def _shadow(
    document: Document, logic: Logic, when: Expression, before: list[tuple[RuleSyntax, Expression]]
) -> str | None:
    for earlier, held in before:
        if logic.implies(when, held):
            line = document.position(earlier.path)[0]
            return f"never reached: whenever it holds, the rule `{earlier.name}` on line {line} has decided"
    if before and logic.implies(when, AnyOf(tuple(held for _, held in before))):
        return "never reached: whenever it holds, one of the rules before it has decided"
    return None
