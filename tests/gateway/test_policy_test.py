"""`dualgauge policy test`, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gateway.cli.policy import policy_group
from gateway.cli.policy_test import Case
from policies.compile import compile_policy
from policies.shipped import SHIPPED, shipped, shipped_cases

POLICY = """version: 1
rules:
  - {name: vip, when: {header: {x-vip: [yes]}}, send: exact}
  - {name: office, when: {time: {from: "09:00", to: "17:00"}}, send: exact}
  - {name: streamed, when: {any: [{signal: stream}, {tenant: ci}, {tenant_tag: t}]}, send: exact}
  - {name: rest, send: fast}
"""
GOOD = """policy: p.yaml
cases:
  - {name: a header, text: hello, headers: {X-VIP: "yes"}, expect: {tier: exact, rule: vip, reasons: [x-vip]}}
  - {name: at ten, text: hello, time: 2026-11-30T10:00:00Z, expect: {rule: office}}
  - {name: at ten elsewhere, text: hello, time: "2026-11-30T10:00:00+09:00", expect: {rule: rest}}
  - {name: a stream, request: {stream: true, messages: []}, expect: {tier: exact}}
  - {name: a tenant, text: hello, tenant: ci, expect: {rule: streamed}}
  - {name: a tag, text: hello, tags: [t], expect: {rule: streamed}}
  - {name: a name that pins, request: {model: "m:exact", messages: []}, expect: {rule: pinned, tier: exact}}
  - {name: other dialect, dialect: messages, request: {max_tokens: 1, messages: []}, expect: {tier: fast}}
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.yaml").write_text(POLICY)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(policy_group, ["test", *arguments])


def failures(text: str, *arguments: str) -> list[str]:
    Path("c.yaml").write_text(text)
    result = run("c.yaml", *arguments)
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    return result.stderr.splitlines()


@pytest.mark.parametrize("name", SHIPPED)
def test_the_cases_of_the_shipped_policies_hold(name: str) -> None:
    result = run(name)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.endswith("all as expected\n")


@pytest.mark.parametrize("name", SHIPPED)
def test_every_rule_of_a_shipped_policy_has_a_case(name: str) -> None:
    cases = shipped_cases(name)[0]
    for rule in compile_policy(*shipped(name)).rules:
        assert f"rule: {rule.name}" in cases


def test_all_that_a_case_can_say() -> None:
    Path("c.yaml").write_text(GOOD)
    result = run("c.yaml")
    assert result.exit_code == 0, result.output
    assert result.stdout == "8 cases, all as expected\n"


def test_a_policy_is_looked_for_beside_its_cases() -> None:
    Path("deeper").mkdir()
    Path("deeper/c.yaml").write_text(GOOD.replace("policy: p.yaml", "policy: ../p.yaml"))
    assert run("deeper/c.yaml").exit_code == 0


WRONG = """policy: p.yaml
cases:
  - name: plain
    text: hello
    expect:
      tier: exact
      rule: vip
      reasons: [no rule, because]
  - {name: fine, text: hello, expect: {rule: rest}}
"""
DECIDED = "decided is tier `fast` by rule `rest` (no rule before it held)"


def test_what_is_decided_otherwise_is_told_with_its_place() -> None:
    assert failures(WRONG) == [
        f"c.yaml:6:13: error: plain: expected tier `exact`, {DECIDED}",
        f"c.yaml:7:13: error: plain: expected rule `vip`, {DECIDED}",
        f"c.yaml:8:26: error: plain: expected a reason with `because`, {DECIDED}",
    ]
    assert run("c.yaml").stdout == "2 cases, 1 failed\n"


def test_a_request_that_the_gateway_would_refuse_fails() -> None:
    found = failures(
        "policy: p.yaml\ncases: [{name: a, request: {messages: [], stream: 7}, expect: {tier: fast}}]"
    )
    assert found == ["c.yaml:2:28: error: a: the gateway refuses it: stream must be true or false"]


def test_another_policy_can_be_given() -> None:
    Path("other.yaml").write_text("version: 1\nrules: [{name: all, send: exact}]")
    found = failures(GOOD, "--policy", "other.yaml")
    assert any("expected rule `vip`, decided is tier `exact` by rule `all`" in line for line in found)


def test_tiers_are_the_deployments(tmp_path: Path) -> None:
    engine = {
        "name": "e",
        "tier": "slow",
        "kind": "external",
        "url": "http://127.0.0.1:1",
        "precision": "awq",
    }
    Path("dualgauge.yaml").write_text(
        json.dumps({"model": "m", "engines": [engine], "tiers": ["slow", "best"]})
    )
    Path("p.yaml").write_text("version: 1\nrules: [{name: all, send: slow}]")
    Path("c.yaml").write_text("policy: p.yaml\ncases: [{name: a, text: x, expect: {tier: slow}}]")
    assert run("c.yaml").exit_code == 0
    assert run("c.yaml", "--tiers", "fast,exact").exit_code == 1


@pytest.mark.parametrize(
    ("case", "place", "message"),
    [
        ("{name: a, text: x}", "2:9", "the key `expect` is missing"),
        ("{name: a, expect: {tier: fast}}", "2:9", "a case has either a `request` or a `text`"),
        ("{name: a, text: x, request: {}, expect: {tier: fast}}", "2:9", "a case has either"),
        ("{name: a, text: x, expect: {}}", "2:36", "expect a `tier`, a `rule` or `reasons`"),
        ("{name: a, text: x, expect: {teir: fast}}", "2:37", "unknown key `teir`; did you mean `tier`?"),
        ("{name: a, text: x, dialect: chta, expect: {tier: fast}}", "2:37", "did you mean `chat`?"),
        ("{name: a, text: x, time: noon, expect: {tier: fast}}", "2:34", "write a time with its zone"),
        ("{name: a, text: x, time: '2026-11-30T10:00', expect: {tier: fast}}", "2:34", "with its zone"),
        ("{name: a, text: x, times: 0, expect: {tier: fast}}", "2:35", "1 or more"),
        ("{name: a, text: x, times: 99999999, expect: {tier: fast}}", "2:35", "10000000 characters"),
        ("{name: a, text: x, headers: {x: 1}, expect: {tier: fast}}", "2:41", "expected `str`, got `int`"),
        (
            "{name: a, text: x, expect: {tier: fast}}, {name: a, text: x, expect: {tier: fast}}",
            "2:58",
            "called",
        ),
    ],
)
def test_mistakes_in_a_file_are_told_with_their_place(case: str, place: str, message: str) -> None:
    (line,) = failures(f"policy: p.yaml\ncases: [{case}]")
    assert line.startswith(f"c.yaml:{place}: error: ")
    assert message in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"policy: p.yaml\ncases: []", "no case: write at least one"),
        (
            b"policy: none.yaml\ncases: [{name: a, text: x, expect: {tier: fast}}]",
            "none.yaml:1:1: error: cannot read the policy",
        ),
        (
            b"policy: bad.yaml\ncases: [{name: a, text: x, expect: {tier: fast}}]",
            "bad.yaml:2:27: error: unknown",
        ),
        (b"cases: [", "error: not valid YAML"),
        (b"policy: p.yaml\n# \xff", "c.yaml:2:3: error: this is not UTF-8: save it as UTF-8"),
        (b"", "c.yaml:1:1: error: a file of cases is a mapping with the keys `policy` and `cases`"),
    ],
)
def test_files_that_cannot_be_used(text: bytes, message: str) -> None:
    Path("bad.yaml").write_text("version: 1\nrules: [{name: all, send: exat}]")
    Path("c.yaml").write_bytes(text)
    result = run("c.yaml")
    assert result.exit_code == 1
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_file_that_is_not_there() -> None:
    result = run("none.yaml")
    assert result.exit_code == 1
    assert "cannot read none.yaml: No such file or directory" in result.output


def test_the_example_of_the_documentation_holds_and_fails_as_it_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "changing-policies.md").read_text("utf-8")
    example = page.split("```yaml\n# policy.test.yaml\n", 1)[1].split("```", 1)[0]
    said = page.split("$ dualgauge policy test policy.test.yaml\n", 1)[1].split("```", 1)[0].splitlines()
    Path("policy.test.yaml").write_text(f"# policy.test.yaml\n{example}")
    assert run("policy.test.yaml", "--policy", "default").exit_code == 0
    Path("without.yaml").write_text("""version: 1
rules:
  - {name: critical stays exact, when: {metadata: {critical: true}}, send: exact}
  - {name: everything else, send: fast}
""")
    result = run("policy.test.yaml", "--policy", "without.yaml")
    assert [*result.stderr.splitlines(), *result.stdout.splitlines()] == said


def test_every_key_of_a_case_has_a_row() -> None:
    page = (Path(__file__).parents[2] / "docs" / "changing-policies.md").read_text("utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")]
    for name in Case.__struct_fields__:
        assert any(f"`{name}`" in row for row in rows), name
