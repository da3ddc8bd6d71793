from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from policies.compile import compile_policy
from policies.expressions import COMPARISONS, TESTS
from policies.signals import SIGNALS
from policies.syntax import RULE_KEYS, TOP_KEYS

PAGE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
HEADINGS = re.findall(r"^### (\S+)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("name", sorted({*TOP_KEYS, *RULE_KEYS, *TESTS, *SIGNALS}))
def test_every_key_and_signal_has_a_heading(name: str) -> None:
    assert name in HEADINGS


def test_every_heading_is_a_key_or_a_signal() -> None:
    assert set(HEADINGS) == {*TOP_KEYS, *RULE_KEYS, *TESTS, *SIGNALS}


@pytest.mark.parametrize("name", COMPARISONS)
def test_every_comparison_is_described(name: str) -> None:
    assert re.search(rf"`\{{?{name}:|`{name}`|`{name}: ", PAGE)


def test_the_first_example_compiles() -> None:
    example = PAGE.split("```yaml\n", 1)[1].split("```", 1)[0]
    assert compile_policy(example, "example").warnings == ()


@pytest.mark.parametrize("name", sorted({*TESTS, *SIGNALS}))
def test_every_test_and_signal_has_an_example_that_compiles(name: str) -> None:
    section = PAGE.split(f"\n### {name}\n", 1)[1].split("\n#", 1)[0]
    shown = [" ".join(text.split()) for text in re.findall(r"`(\{[^`]*\})`", section)]
    assert any(f"{name}:" in text or f"signal: {name}" in text for text in shown)
    for condition in shown:
        classes = "{code_heavy: {signal: code, at_least: 0.5}, long: {signal: prompt_tokens, at_least: 9k}}"
        rules = f"- {{name: a, when: {condition}, send: exact}}\n- {{name: b, send: fast}}"
        compile_policy(f"version: 1\nclasses: {classes}\nrules:\n{rules}", "example")


def test_plans_shown_compile() -> None:
    example = PAGE.split("```yaml\nplans:", 1)[1].split("```", 1)[0]
    plans = yaml.safe_load(f"plans:{example}")["plans"]
    text = yaml.safe_dump({"version": 1, "rules": [{"name": "a", "send": "fast"}], "plans": plans})
    assert set(compile_policy(text, "example").plans) == {"default", "trial"}
