# ruff: noqa: RUF001
from __future__ import annotations

import subprocess
import sys

import pytest

from policies.compile import compile_policy
from policies.facts import Conversation, Facts, Turn
from policies.patterns import READ, pattern_signal


def facts(*turns: tuple[str, str]) -> Facts:
    read = Conversation(tuple(Turn(role, text) for role, text in turns))  # type: ignore[arg-type]
    return Facts(dialect="openai.chat", model="m", headers={}, read=lambda: read)


def found(pattern: str, text: str) -> object:
    return pattern_signal("user", pattern).read(facts(("user", text)), {})


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [
        ("invoice", "Pay this invoice.", True),
        ("invoice", "Pay this Invoice.", False),
        ("(?i)invoice", "Pay this Invoice.", True),
        (r"\bIBAN\b", "my IBAN: DE1", True),
        (r"^\s*/review", "/review this", True),
        (r"^\s*/review", "please /review this", False),
        (r"[а-яё]+", "Счёт", True),
        (r"^.$", "é", True),
        (r"\p{Han}", "发票", True),
        ("a", "", False),
        ("a", "\ud800", False),
    ],
)
def test_patterns_are_searched_as_text(pattern: str, text: str, matches: bool) -> None:
    assert found(pattern, text) is matches


def test_the_last_user_turn_and_the_system_prompt_are_told_apart() -> None:
    request = facts(("system", "Be brief."), ("user", "one"), ("assistant", "two"), ("user", "three"))
    user = {word: pattern_signal("user", word).read(request, {}) for word in ("brief", "one", "two", "three")}
    assert user == {"brief": False, "one": False, "two": False, "three": True}
    assert pattern_signal("system", "brief").read(request, {}) is True
    assert pattern_signal("system", "three").read(request, {}) is False


def test_of_a_long_text_both_ends_are_searched() -> None:
    filler = "x" * 2 * READ
    assert found("needle", "needle" + filler)
    assert found("needle", filler + "needle")
    assert not found("needle", filler + "needle" + filler)


def test_a_pattern_that_backtracks_elsewhere_is_searched_once() -> None:
    assert found("(a|aa)+$", "a" * 2 * READ + "b") is False


POLICY = """\
version: 1
rules:
  - {name: either, when: {matches: [alpha, beta]}, send: exact}
  - {name: both, when: {matches: {user: gamma, system: delta}}, send: exact}
  - {name: rest, send: fast}
"""


@pytest.mark.parametrize(
    ("user", "system", "rule"),
    [
        ("a beta", "", "either"),
        ("gamma", "delta", "both"),
        ("gamma", "", "rest"),
        ("delta", "gamma", "rest"),
    ],
)
def test_lists_are_any_and_places_are_all(user: str, system: str, rule: str) -> None:
    decision = compile_policy(POLICY, "p").decide(facts(("system", system), ("user", user)))
    assert decision.rule == rule


def test_a_decision_says_what_matched_and_not_the_text() -> None:
    decision = compile_policy(POLICY, "p").decide(facts(("user", "secret beta")))
    assert decision.reasons == ("the last user turn matches beta",)
    assert decision.signals == {"matches user: alpha": False, "matches user: beta": True}


def test_an_explanation_has_every_pattern() -> None:
    policy = compile_policy(POLICY, "p")
    explanation = policy.explain(facts(("user", "gamma")))
    assert explanation.signals["matches user: gamma"] is True
    assert explanation.signals["matches system: delta"] is False
    assert explanation.rules[1].reasons == ("the system prompt does not match delta",)
    assert policy.needs_conversation


def test_the_engine_of_patterns_is_imported_for_patterns_alone() -> None:
    program = """
import sys
from policies.compile import compile_policy
from policies.shipped import SHIPPED, shipped
for name in SHIPPED:
    compile_policy(*shipped(name))
assert "re2" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
