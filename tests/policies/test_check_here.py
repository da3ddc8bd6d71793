"""`dualgauge policy check` in a deployment's folder, and what `explain` tells of a rule's wishes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.cli.explain import explain_command
from gateway.cli.policy import policy_group

POLICY = """\
version: 1
rules:
  - name: all
    send: slow
    if_unavailable: {use: fast}
    priority: -2
    trace: always
    cap: {max_tokens: 64}
    set: {temperature: 0}
"""
DEPLOYMENT = """\
model: m
tiers: [fast, slow]
policy: ./policy.yaml
engines:
  - {name: a, tier: fast, kind: external, url: "http://127.0.0.1:1", precision: awq}
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY)
    (tmp_path / "dualgauge.yaml").write_text(DEPLOYMENT)
    monkeypatch.chdir(tmp_path)


def test_check_knows_the_tiers_and_engines_of_the_deployment_here() -> None:
    result = CliRunner().invoke(policy_group, ["check", "policy.yaml"])
    assert result.exit_code == 0, result.output
    assert result.stderr == "policy.yaml:4:11: warning: no engine has the tier `slow`\n"


def test_check_leaves_the_deployment_alone_where_tiers_are_named() -> None:
    result = CliRunner().invoke(policy_group, ["check", "policy.yaml", "--tiers", "fast,slow"])
    assert (result.exit_code, result.stderr) == (0, "")


def test_explain_tells_what_a_rule_changes() -> None:
    found = json.loads(CliRunner().invoke(explain_command, ["--text", "hi", "--json"]).stdout)
    assert found["edits"] == {"max_tokens": 64, "temperature": 0}
    assert (found["priority"], found["trace"]) == (-2, True)
    shown = CliRunner().invoke(explain_command, ["--text", "hi"]).stdout
    for line in (
        "caps the output at 64 tokens",
        "sets the temperature to 0",
        "priority: -2",
        "always traced",
    ):
        assert f"  {line}\n" in shown
