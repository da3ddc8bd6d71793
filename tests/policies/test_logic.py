"""What is said of rules without a request is true of every request."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from policies.compile import compile_policy
from policies.document import load
from policies.facts import Conversation, Facts, Turn
from policies.logic import BUDGET, Logic
from policies.policy import Policy

LEAVES: list[Any] = [
    {"signal": "stream"},
    {"signal": "stream", "equals": False},
    {"signal": "has_tools"},
    *(
        {"signal": "turns", op: n}
        for op in ("at_least", "above", "at_most", "below", "equals")
        for n in (1, 2)
    ),
    {"signal": "turns", "in": [0, 2]},
    {"signal": "turns", "at_least": 0},
    {"signal": "output_tokens", "below": 5},
    {"signal": "output_tokens", "at_least": 5},
    {"header": "x-a"},
    {"header": {"x-a": "1"}},
    {"header": {"x-a": ["1", "2"]}},
    {"tenant_tag": "x"},
    {"tenant_tag": "y"},
    {"tenant": "ci"},
    {"tenant": ["cd", "ce"]},
    "c",
]
CONDITIONS = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        st.builds(
            lambda test, parts: {test: parts},
            st.sampled_from(["all", "any"]),
            st.lists(inner, min_size=1, max_size=3),
        ),
        st.builds(lambda part: {"not": part}, inner),
    ),
    max_leaves=4,
)
CLASS = CONDITIONS.filter(lambda one: '"c"' not in json.dumps(one))


def requests() -> list[Facts]:
    """Every request that the leaves can tell apart."""
    found = []
    for stream, tools, turns, output, header, tags, tenant in itertools.product(
        (False, True), (False, True), range(4), (None, 4, 5), (None, "1", "3"), ("", "x", "xy"), ("ci", "cd")
    ):
        conversation = Conversation((Turn("user", ""),) * turns)
        found.append(
            Facts(
                dialect="openai.chat",
                model="m",
                read=lambda conversation=conversation: conversation,  # type: ignore[misc]
                headers={} if header is None else {"x-a": header},
                tags=frozenset(tags),
                tenant=tenant,
                stream=stream,
                has_tools=tools,
                output_tokens=output,
            )
        )
    return found


REQUESTS = requests()


def deciding(policy: Policy) -> set[str]:
    return {policy.decide(request).rule for request in REQUESTS}


@settings(deadline=None)
@given(CLASS, st.lists(CONDITIONS, min_size=1, max_size=3))
def test_a_rule_that_is_said_never_to_decide_never_does(named: Any, whens: list[Any]) -> None:
    rules = [{"name": f"r{index}", "when": when, "send": "exact"} for index, when in enumerate(whens)]
    written = {"version": 1, "classes": {"c": named}, "rules": [*rules, {"name": "rest", "send": "fast"}]}
    text = json.dumps(written, indent=1)
    policy = compile_policy(text, "p")
    warned = {(warning.line, warning.column) for warning in policy.warnings if "never" in warning.message}
    document = load(text, "p")
    places = {f"r{index}": document.position(("rules", index, "when")) for index in range(len(whens))}
    places["rest"] = document.position(("rules", len(whens)))
    never = {name for name, place in places.items() if place in warned}
    event("a rule never decides" if never else "every rule may decide")
    assert not never & deciding(policy)


def warnings(*whens: str) -> list[str]:
    rules = [f"  - {{name: r{index}, when: {when}, send: exact}}" for index, when in enumerate(whens)]
    policy = compile_policy("\n".join(["version: 1", "rules:", *rules, "  - {name: rest, send: fast}"]), "p")
    return [str(warning)[2:] for warning in policy.warnings]


NEVER = "never holds: what it asks for excludes itself"


@pytest.mark.parametrize(
    "when",
    [
        "{all: [{signal: stream}, {not: {signal: stream}}]}",
        "{all: [{signal: stream}, {signal: stream, equals: false}]}",
        "{signal: turns, at_least: 5, below: 5}",
        "{signal: turns, below: 0}",
        "{signal: code, above: 1}",
        "{all: [{signal: script, in: [han, thai]}, {signal: script, equals: latin}]}",
        "{all: [{tenant: ci}, {tenant: [cd, ce]}]}",
        "{all: [{header: {x-a: 1}}, {header: {x-a: 2}}]}",
        "{not: {any: [{signal: has_tools}, {not: {signal: has_tools}}]}}",
        "{all: [{signal: stream}, {all: [{signal: turns, above: 3}, {signal: turns, at_most: 3}]}]}",
    ],
)
def test_a_condition_that_excludes_itself(when: str) -> None:
    assert warnings(when) == [f"3:{len('  - {name: r0, when: ') + 1}: warning: {NEVER}"]


@pytest.mark.parametrize(
    "when",
    [
        "{all: [{tenant_tag: a}, {tenant_tag: b}]}",
        "{signal: turns, at_least: 5, at_most: 5}",
        "{all: [{header: {x-a: [1, 2]}}, {header: {x-a: [2, 3]}}]}",
        "{signal: code, at_least: 1}",
    ],
)
def test_a_condition_that_can_hold(when: str) -> None:
    assert warnings(when) == []


def test_rules_that_take_everything_together() -> None:
    said = warnings("{signal: stream}", "{not: {signal: stream}}")
    assert said == ["5:5: warning: never reached: of the rules before it, one always holds"]


def test_a_rule_that_several_others_cover() -> None:
    said = warnings(
        "{signal: stream}", "{signal: has_tools}", "{any: [{signal: has_tools}, {signal: stream}]}"
    )
    one_of_them = "never reached: whenever it holds, one of the rules before it has decided"
    assert said == [f"5:22: warning: {one_of_them}"]


def test_tiers_without_an_engine() -> None:
    text = """\
version: 1
rules:
  - {name: a, when: {signal: stream}, send: exact, if_busy: fast}
  - {name: b, when: {signal: images}, send: fast, if_busy: {use: exact, waiting: 2}}
  - {name: c, send: fast, if_unavailable: {use: exact}}
"""
    policy = compile_policy(text, "p", served={"fast"})
    assert [str(warning) for warning in policy.warnings] == [
        "p:3:45: warning: no engine has the tier `exact`, which is named 3 times",
    ]
    assert compile_policy(text, "p", served={"fast", "exact"}).warnings == ()


@pytest.mark.parametrize(
    ("more", "column"),
    [
        ("if_busy: exact", 36),
        ("if_busy: {use: exact, waiting: 2}", 42),
        ("if_unavailable: {use: exact}", 49),
    ],
)
def test_a_tier_without_an_engine_is_shown_where_it_is_named(more: str, column: int) -> None:
    policy = compile_policy(f"version: 1\nrules:\n  - {{name: a, send: fast, {more}}}", "p", served={"fast"})
    assert [str(one) for one in policy.warnings] == [f"p:3:{column}: warning: no engine has the tier `exact`"]


def test_rules_beyond_the_budget_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reload of thousands of rules must not hold the gateway up: pairs grow with their square."""
    asked = 0
    implies = Logic.implies

    def counted(logic: Logic, left: Any, right: Any) -> bool:
        nonlocal asked
        asked += 1
        return implies(logic, left, right)

    monkeypatch.setattr(Logic, "implies", counted)
    rules: list[Any] = [
        {"name": f"r{n}", "when": {"header": {"x-a": f"v{n}"}}, "send": "exact"} for n in range(1000)
    ]
    rules.append({"name": "rest", "send": "fast"})
    compile_policy(json.dumps({"version": 1, "rules": rules}), "p.yaml")
    assert asked < 2 * BUDGET
