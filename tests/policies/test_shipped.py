# ruff: noqa: RUF001
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from policies.compile import compile_policy
from policies.decision import Busy, Contract
from policies.facts import Conversation, Facts, Turn
from policies.schema import policy_schema
from policies.shipped import SHIPPED, policy_text, shipped

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "policies"
PROSE = "Tell me about the history of the lighthouse."
CODE = "Write a function in Python that reverses a linked list."
SUMS = "A shirt costs $40 after a 20% discount. How much was it before?"


def facts(text: str = PROSE, *, tool_results: int = 0, **more: Any) -> Facts:
    conversation = Conversation((Turn("user", text),), tool_results)
    return Facts(
        **{"dialect": "openai.chat", "model": "m", "headers": {}, "read": lambda: conversation, **more}
    )


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_policies_compile_without_a_warning(name: str) -> None:
    assert compile_policy(*shipped(name)).warnings == ()


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize(
    "critical",
    [
        {"headers": {"x-criticality": "high"}},
        {"headers": {"x-criticality": "critical"}},
        {"metadata": {"critical": "true"}},
        {"tags": frozenset({"critical"})},
    ],
    ids=["high", "critical", "metadata", "tag"],
)
def test_critical_requests_never_leave_exact(name: str, critical: dict[str, Any]) -> None:
    for text in (PROSE, CODE, SUMS):
        decision = compile_policy(*shipped(name)).decide(facts(text, **critical))
        assert (decision.tier, decision.contract, decision.if_busy) == ("exact", Contract("fail"), None)


@pytest.mark.parametrize(
    ("request_", "rule", "tier"),
    [
        ({"text": PROSE}, "everything else", "fast"),
        ({"text": CODE}, "code", "exact"),
        ({"text": SUMS}, "maths", "exact"),
        ({"text": "Напиши стихотворение об осени."}, "other scripts", "exact"),
        ({"text": "Schreib mir bitte einen kurzen Brief an die Schule."}, "everything else", "fast"),
        ({"text": "word " * 70_000}, "long", "exact"),
        ({"text": "слово " * 40_000}, "long", "exact"),
        ({"text": "word " * 40_000}, "everything else", "fast"),
        ({"text": PROSE, "has_tools": True, "tool_results": 2}, "agent", "exact"),
        ({"text": PROSE, "has_tools": True, "tool_results": 1}, "everything else", "fast"),
        ({"text": PROSE, "structured": True}, "everything else", "fast"),
    ],
)
def test_default(request_: dict[str, Any], rule: str, tier: str) -> None:
    decision = compile_policy(*shipped("default")).decide(facts(**request_))
    assert (decision.rule, decision.tier) == (rule, tier)


def test_default_lets_code_fall_back_and_says_so() -> None:
    decision = compile_policy(*shipped("default")).decide(facts(CODE))
    assert decision.contract == Contract("degrade")
    assert decision.if_busy == Busy("fast")


def test_strict_and_thrifty_differ_as_their_names_say() -> None:
    tools = facts(PROSE, has_tools=True)
    assert compile_policy(*shipped("strict")).decide(tools).tier == "exact"
    assert compile_policy(*shipped("thrifty")).decide(tools).tier == "fast"
    busy = compile_policy(*shipped("thrifty")).decide(facts(CODE)).if_busy
    assert busy == Busy("fast", 1, 0.7)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_rule_gives_its_reason(name: str) -> None:
    lines = shipped(name)[0].splitlines()
    rules = [index for index, line in enumerate(lines) if line.startswith("  - {name:")]
    assert rules
    assert all(lines[index - 1].startswith("  # ") for index in rules)


def test_policy_text_reads_names_and_paths(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("version: 1\nrules: [{name: a, send: fast}]\n", encoding="utf-8")
    assert policy_text("strict") == shipped("strict")
    assert policy_text(str(own)) == (own.read_text(encoding="utf-8"), str(own))
    with pytest.raises(KeyError):
        shipped("none")


def test_the_schema_in_the_package_is_the_one_the_code_makes() -> None:
    committed = (PACKAGE / "schema.json").read_text(encoding="utf-8")
    assert committed == json.dumps(policy_schema(), indent=2) + "\n"


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(policy_schema())


@pytest.mark.parametrize(
    "path",
    sorted([*PACKAGE.glob("*.yaml"), *(HERE / "valid").glob("*.yaml")]),
    ids=lambda path: path.stem,
)
def test_the_schema_takes_what_compiles(path: Path) -> None:
    written = yaml.safe_load(path.read_text(encoding="utf-8"))
    jsonschema.validate(written, policy_schema(), cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    "name",
    [
        "unknown_top_key",
        "unknown_rule_key",
        "score_out_of_range",
        "unknown_signal",
        "contracts",
        "busy",
        "plans",
        "patterns",
        "times",
    ],
)
def test_the_schema_refuses_what_an_editor_can_see(name: str) -> None:
    written = yaml.safe_load((HERE / "invalid" / f"{name}.yaml").read_text(encoding="utf-8"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(written, policy_schema(), cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize("name", SHIPPED)
def test_editors_find_the_schema(name: str) -> None:
    first = shipped(name)[0].splitlines()[0]
    assert first == "# yaml-language-server: $schema=./schema.json"
