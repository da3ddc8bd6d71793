"""Any policy either compiles and decides every request the same way twice, and once more from its line in a
decision log, or is refused with a position.

    pytest tests/policies/test_random_policies.py --hypothesis-profile=thorough     # 10,000 policies
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st
from msgspec.json import encode

from policies.compile import compile_policy
from policies.document import Diagnostic, ProblemsError
from policies.expressions import COMPARISONS, TESTS
from policies.facts import Conversation, Facts, Turn
from policies.logged import Fields, Reader, decode, line_of
from policies.policy import Policy
from policies.signals import DIALECTS, SIGNALS, Memo
from policies.signals.script import SCRIPTS
from policies.syntax import RULE_KEYS, TOP_KEYS

EXAMPLES = max(250, settings().max_examples)
CLASSES = ("a", "b", "c", "d")
TIERS = st.sampled_from(["fast", "exact", "exact", "fast", "slow"])
SCALARS = st.one_of(
    st.booleans(),
    st.integers(-3, 5),
    st.floats(0, 1.5).map(lambda number: round(number, 2)),
    st.sampled_from(["true", "32k", "high", "m", "", *DIALECTS[:2], *SCRIPTS[:3]]),
    st.none(),
)
TEXTS = st.one_of(SCALARS, st.lists(SCALARS, max_size=2))


def rarely(often: st.SearchStrategy[Any], rare: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 15).flatmap(lambda roll: rare if roll == 0 else often)


GOOD_PATTERN = st.sampled_from(["hi", "^def ", "(?i)HI$", r"\d"])
PATTERN = rarely(GOOD_PATTERN, st.sampled_from(["(", "a(?=b)", ""]))
PATTERNS = st.one_of(
    PATTERN,
    st.lists(PATTERN, min_size=1, max_size=2),
    st.dictionaries(st.sampled_from(["user", "system"]), PATTERN, min_size=1, max_size=2),
)
WINDOWS = st.fixed_dictionaries(
    {"from": rarely(st.sampled_from(["08:00", "22:30"]), st.sampled_from(["24:00", "8"]))},
    optional={
        "to": st.sampled_from(["06:00", "18:00"]),
        "days": rarely(st.sampled_from(["mon-fri", "sat", ["sun", "tue-thu"]]), st.just("someday")),
        "zone": rarely(st.sampled_from(["UTC", "Europe/Berlin"]), st.just("Mars/Base")),
    },
)


@st.composite
def signal_tests(draw: st.DrawFn) -> dict[str, Any]:
    signal = draw(st.sampled_from(list(SIGNALS.values())))
    fitting = {
        "score": st.floats(0, 1),
        "share": st.one_of(st.floats(0, 1), st.sampled_from(["10%", "50%"])),
        "count": st.integers(0, 5),
        "number": st.floats(0, 2),
        "flag": st.booleans(),
        "text": st.sampled_from(signal.values or ("m", "ci")),
    }[signal.kind]
    ordered = signal.kind not in ("flag", "text")
    comparison = draw(st.sampled_from(list(COMPARISONS) if ordered else ["equals", "in"]))
    operand = draw(st.lists(fitting, min_size=1, max_size=3) if comparison == "in" else fitting)
    return {"signal": signal.name, comparison: operand}


@cache
def conditions(classes: tuple[str, ...]) -> st.SearchStrategy[Any]:
    """Conditions that may name these classes, and now and then what is no condition."""
    broken = st.one_of(
        st.builds(lambda key, value: {key: value}, st.sampled_from(TESTS), TEXTS), st.sampled_from(CLASSES)
    )
    leaves = [
        signal_tests(),
        st.builds(
            lambda key, name, value: {key: {name: value}},
            st.sampled_from(["header", "metadata"]),
            st.sampled_from(["x-a", "critical"]),
            st.sampled_from(["high", True, 3, ["high", "3"]]),
        ),
        st.builds(lambda tag: {"tenant_tag": tag}, st.sampled_from(["x", "y"])),
        st.builds(lambda value: {"matches": value}, PATTERNS),
        st.builds(lambda value: {"time": value}, WINDOWS),
    ]
    if classes:
        leaves.append(st.sampled_from(classes))
    return st.recursive(
        rarely(st.one_of(leaves), broken),
        lambda inner: st.one_of(
            st.builds(
                lambda key, parts: {key: parts},
                st.sampled_from(["all", "any"]),
                st.lists(inner, min_size=1, max_size=3),
            ),
            st.builds(lambda part: {"not": part}, inner),
        ),
        max_leaves=5,
    )


CONTRACTS = st.one_of(
    st.sampled_from(["fail", "degrade"]),
    st.builds(
        lambda wait, then: {"wait": wait, "then": then},
        rarely(st.sampled_from(["2s", "1h"]), SCALARS),
        st.sampled_from(["fail", "degrade"]),
    ),
    st.builds(lambda tier: {"use": tier}, rarely(st.just("fast"), TIERS)),
)


@st.composite
def policies(draw: st.DrawFn) -> dict[str, Any]:
    named = CLASSES[: draw(st.integers(0, len(CLASSES)))]
    classes = {name: draw(conditions(named[:index])) for index, name in enumerate(named)}
    rules: list[Any] = []
    for index in range(draw(st.integers(0, 4))):
        when, send = draw(conditions(named)), draw(rarely(st.just("exact"), TIERS))
        rule = {"name": f"r{index}", "when": when, "send": send}
        if draw(st.booleans()):
            rule["if_unavailable"] = draw(CONTRACTS)
        if draw(st.booleans()):
            rule["if_busy"] = draw(rarely(st.just("fast"), st.one_of(TIERS, SCALARS)))
        if draw(st.integers(0, 9)) == 0:
            rule[draw(st.sampled_from(RULE_KEYS))] = draw(TEXTS)
        rules.append(draw(rarely(st.just(rule), SCALARS)))
    rules.append({"name": "rest", "send": "fast"})
    top: dict[str, Any] = {"version": 1, "classes": classes, "rules": rules}
    if draw(st.integers(0, 9)) == 0:
        top[draw(st.sampled_from(TOP_KEYS))] = draw(st.one_of(TEXTS, conditions(named)))
    return top


REQUESTS = st.fixed_dictionaries(
    {
        "text": st.sampled_from(["hi", "def f(x):\n    return x", "Сколько будет 2+2?", "写一个函数", ""]),
        "headers": st.dictionaries(st.just("x-a"), st.sampled_from(["high", "True", "3"])),
        "metadata": st.dictionaries(st.just("critical"), st.sampled_from(["true", True, 3, None, []])),
        "tags": st.frozensets(st.sampled_from(["x", "z"])),
        "stream": st.booleans(),
        "has_tools": st.booleans(),
        "output_tokens": st.one_of(st.none(), st.integers(0, 10)),
        "temperature": st.one_of(st.none(), st.floats(0, 2)),
        "tool_results": st.integers(0, 3),
        "time": st.integers(1_760_000_000, 1_800_000_000),
    }
)


def facts(request: dict[str, Any]) -> Facts:
    more = dict(request)
    conversation = Conversation((Turn("user", more.pop("text")),), more.pop("tool_results"))
    return Facts(dialect="openai.chat", model="m", read=lambda: conversation, **more)


def compiled(text: str) -> Policy | tuple[Diagnostic, ...]:
    try:
        return compile_policy(text, "p.yaml")
    except ProblemsError as error:
        return error.diagnostics


@settings(max_examples=EXAMPLES, deadline=None)
@given(policies(), st.lists(REQUESTS, min_size=1, max_size=3))
def test_decides_twice_the_same_or_is_refused(
    written: dict[str, Any], requests: list[dict[str, Any]]
) -> None:
    text = json.dumps(written, indent=1, ensure_ascii=False)
    policy, again = compiled(text), compiled(text)
    event("compiles" if isinstance(policy, Policy) else "is refused")
    if not isinstance(policy, Policy) or not isinstance(again, Policy):
        assert policy == again
        assert any(problem.severity == "error" for problem in policy)
        lines = text.count("\n") + 1
        assert all(1 <= problem.line <= lines and problem.column >= 1 for problem in policy)
        return
    fields, reader = Fields([policy]), Reader(policy)
    reader.fields(decode(fields.line))
    for request in requests:
        memo: Memo = {}
        decision = policy.decide(facts(request), memo)
        assert decision == again.decide(facts(request))
        line = line_of(facts(request), memo, decision, fields, id_="", time=0.0, measure_all=False)
        assert decision == policy.decide(*reader.facts(decode(encode(line))))
        explanation = policy.explain(facts(request))
        assert explanation.decision == decision
        first = next(rule for rule in explanation.rules if rule.held)
        assert (first.name, first.reached) == (decision.rule, True)
        assert all(explanation.signals[name] == value for name, value in decision.signals.items())


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.text(max_size=80) | st.binary(max_size=60).map(lambda raw: raw.decode("latin-1")))
def test_any_text_is_refused_with_a_position(text: str) -> None:
    problems = compiled(text)
    assert not isinstance(problems, Policy)
    assert problems
