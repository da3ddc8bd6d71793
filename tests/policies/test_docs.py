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


@pytest.mark.parametrize("name", [*TOP_KEYS, *RULE_KEYS, *SIGNALS])
def test_every_key_and_signal_has_a_heading(name: str) -> None:
    assert name in HEADINGS


def test_every_heading_is_a_key_or_a_signal() -> None:
    assert set(HEADINGS) == {*TOP_KEYS, *RULE_KEYS, *SIGNALS}


@pytest.mark.parametrize("name", [*TESTS, *COMPARISONS])
def test_every_test_and_comparison_is_described(name: str) -> None:
    assert re.search(rf"`\{{?{name}:|`{name}`|`{name}: ", PAGE)


def test_the_first_example_compiles() -> None:
    example = PAGE.split("```yaml\n", 1)[1].split("```", 1)[0]
    assert compile_policy(example, "example").warnings == ()


def test_every_condition_shown_for_a_signal_compiles() -> None:
    shown = re.findall(r"`(\{signal: [^`]*\})`", PAGE)
    assert len(shown) >= len(SIGNALS)
    for condition in shown:
        text = f"version: 1\nrules:\n- {{name: a, when: {condition}, send: exact}}\n- {{name: b, send: fast}}"
        compile_policy(text, "example")


def test_plans_shown_compile() -> None:
    example = PAGE.split("```yaml\nplans:", 1)[1].split("```", 1)[0]
    plans = yaml.safe_load(f"plans:{example}")["plans"]
    text = yaml.safe_dump({"version": 1, "rules": [{"name": "a", "send": "fast"}], "plans": plans})
    assert set(compile_policy(text, "example").plans) == {"default", "trial"}
