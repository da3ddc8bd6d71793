from __future__ import annotations

import pytest

from policies.compile import compile_policy
from policies.facts import Conversation, Facts, Turn
from policies.shipped import shipped


def facts(*turns: tuple[str, str]) -> Facts:
    conversation = Conversation(tuple(Turn(role, text) for role, text in turns))  # type: ignore[arg-type]
    return Facts(dialect="openai.chat", model="m", headers={}, read=lambda: conversation)


def tier(*turns: tuple[str, str]) -> str:
    return compile_policy(*shipped("default")).decide(facts(*turns)).tier


def test_c20_words_of_code_that_mean_other_things() -> None:
    text = "My ball python is sick, it will not eat. What function does the heat lamp have?"
    assert tier(("user", text)) == "fast"


def test_c21_code_without_code_and_not_in_english() -> None:
    policy = compile_policy(*shipped("default"))
    decision = policy.decide(
        facts(("user", "Напиши скрипт, который переименует все файлы в папке по дате создания"))
    )
    assert (decision.tier, decision.rule) == ("exact", "code")


def test_c22_a_system_prompt_about_code_does_not_count() -> None:
    rule = "You are a coding agent. Write clean code, run the tests before each commit, refactor functions. "
    assert tier(("system", rule * 210), ("user", "thanks, that is all for today")) == "fast"


@pytest.mark.parametrize(
    "text",
    [
        "Write a function that merges two sorted lists.",
        "def f(x):\n    return x +\n\nwhat is wrong here",
        "git rebase says there are conflicts, what now?",
        "SELECT name FROM users WHERE id = 3; -- make it faster",
    ],
)
def test_code(text: str) -> None:
    assert compile_policy(*shipped("default")).decide(facts(("user", text))).rule == "code"
