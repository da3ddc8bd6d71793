from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.dialects import facts_from_body
from policies.compile import compile_policy
from policies.facts import Conversation, Facts, Turn
from policies.shipped import shipped
from policies.signals.lexicon import build


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


def hard_cases() -> Iterator[Any]:
    misread = pytest.mark.xfail(strict=True, reason="known to be misread")
    marks: list[pytest.MarkDecorator] = []
    for line in (Path(__file__).parent / "hard_cases.txt").read_text(encoding="utf-8").splitlines():
        if line == "# misread":
            marks = [misread]
        elif not line.startswith("#"):
            label, dialect, text = line.split(" ", 2)
            yield pytest.param(label, dialect, text.replace("\\n", "\n"), marks=marks)


def in_dialect(dialect: str, text: str) -> Facts:
    said = [{"role": "user", "content": text}]
    if dialect == "completions":
        return facts_from_body("openai.completions", {"prompt": text}, {})
    if dialect == "responses":
        return facts_from_body("openai.responses", {"input": said}, {})
    if dialect == "messages":
        return facts_from_body("anthropic.messages", {"messages": said, "max_tokens": 9}, {})
    return facts_from_body("openai.chat", {"messages": said}, {})


@pytest.mark.parametrize(("label", "dialect", "text"), list(hard_cases()))
def test_hard_cases(label: str, dialect: str, text: str) -> None:
    signals = compile_policy(*shipped("default")).explain(in_dialect(dialect, text)).signals
    code, math = signals["code"], signals["math"]
    assert isinstance(code, float)
    assert isinstance(math, float)
    assert (code >= 0.5, math >= 0.5) == (label == "c", label == "m")


def test_all_dialects_are_measured_alike() -> None:
    text = "Write a function that merges two sorted lists."
    chosen = ("chat", "completions", "responses", "messages")
    scores = {
        compile_policy(*shipped("default")).explain(in_dialect(d, text)).signals["code"] for d in chosen
    }
    assert len(scores) == 1


@pytest.mark.parametrize("before", ["", "山", "山川", "😀", "a 😀"])
def test_terms_of_unspaced_scripts_are_found_wherever_they_stand(before: str) -> None:
    lexicon = build([("a", "函数"), ("a", "关数"), ("b", "倍"), ("c", "ฟังก์ชัน"), ("d", "関数型")])
    assert lexicon.count(f"{before}函数倍")[0] == [1, 1, 0, 0]
    assert lexicon.count(f"{before}ฟังก์ชัน")[0] == [0, 0, 1, 0]
    assert lexicon.count(f"{before}関数")[0] == [0, 0, 0, 0]
