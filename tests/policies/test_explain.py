"""`dualgauge explain` and `dualgauge policy`, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from gateway.asked import Caller, facts_of
from gateway.cli.explain import explain_command
from gateway.cli.policy import policy_group
from policies.compile import compile_policy
from policies.logged import Fields, line_of
from policies.schema import policy_schema
from policies.shipped import shipped
from policies.signals import SIGNALS, Memo

CODE = "Write a function in Python that reverses a linked list."
SUM = "A shirt costs $40 after a 20% discount. How much was it before?"
PROSE = "Tell me about the history of the lighthouse."
INVALID = Path(__file__).parent / "invalid"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder without a deployment of its own."""
    monkeypatch.chdir(tmp_path)


def explain(*arguments: str, stdin: bytes | str | None = None) -> Result:
    return CliRunner().invoke(explain_command, arguments, input=stdin)


def body(text: str, **more: Any) -> str:
    return json.dumps({"messages": [{"role": "user", "content": text}], **more})


def record(*arguments: str, stdin: str) -> dict[str, Any]:
    result = explain("-", "--json", *arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_request_from_stdin_as_text() -> None:
    result = explain("-", stdin=body(CODE, stream=True))
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "exact, by the rule `code`"
    assert lines[1].startswith("  code_heavy: code ")
    assert "  if unavailable: degrade" in lines
    assert "  if busy (8 waiting or 95% of the KV cache): fast" in lines
    assert "  * code -> exact" in lines
    assert "  + everything else -> fast  (decided before)" in lines
    assert any(line.startswith("  stream         yes") for line in lines)
    assert all(any(line.startswith(f"  {name} ") for line in lines) for name in SIGNALS)


def test_a_request_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "request.json"
    file.write_text(body(PROSE), encoding="utf-8")
    assert explain(str(file)).stdout.startswith("fast, by the rule `everything else`")


def test_a_plain_text() -> None:
    assert explain("--text", CODE).stdout.startswith("exact, by the rule `code`")


def test_as_json() -> None:
    found = record(stdin=body(CODE, temperature=0.5, max_tokens=20))
    assert (found["tier"], found["rule"]) == ("exact", "code")
    assert found["if_unavailable"]["kind"] == "degrade"
    assert found["if_busy"] == {"use": "fast", "waiting": 8, "kv": 0.95, "wait": None}
    assert found["signals"]["code"] >= 0.5
    assert (found["signals"]["temperature"], found["signals"]["output_tokens"]) == (0.5, 20)
    held = {rule["name"]: (rule["held"], rule["reached"]) for rule in found["rules"]}
    assert held["critical stays exact"] == (False, True)
    assert held["code"] == (True, True)
    assert held["everything else"] == (True, False)
    assert len(found["policy"]["hash"]) == 12


def test_headers_and_tags() -> None:
    critical = record("--header", "X-Criticality: high", stdin=body(PROSE))
    assert critical["reasons"] == ["critical: header x-criticality is one of critical, high"]
    assert record("--tag", "critical", stdin=body(PROSE))["rule"] == "critical stays exact"
    assert record(stdin=body(PROSE, metadata={"critical": "true"}))["rule"] == "critical stays exact"


def test_a_model_name_that_pins_its_tier() -> None:
    found = record(stdin=body(CODE, model="smollm2:fast"))
    assert (found["tier"], found["rule"]) == ("fast", "pinned")
    assert not any(rule["reached"] for rule in found["rules"])


@pytest.mark.parametrize(
    ("request_", "dialect"),
    [
        ({"prompt": "def f(x):\n    return x + 1\n\ndef g("}, "openai.completions"),
        ({"input": CODE}, "openai.responses"),
        ({"messages": [{"role": "user", "content": CODE}]}, "openai.chat"),
    ],
)
def test_the_dialect_is_told_from_the_body(request_: dict[str, Any], dialect: str) -> None:
    found = record(stdin=json.dumps(request_))
    assert (found["signals"]["dialect"], found["rule"]) == (dialect, "code")


def test_the_dialect_can_be_given() -> None:
    request = {"system": "Be brief.", "max_tokens": 9, "messages": [{"role": "user", "content": CODE}]}
    found = record("--dialect", "messages", stdin=json.dumps(request))
    assert (found["signals"]["dialect"], found["rule"]) == ("anthropic.messages", "code")


def test_json_lines() -> None:
    lines = "\n".join([body(PROSE), "", body(CODE, stream=True), '{"messages": 3', body(PROSE, stream=7)])
    result = explain("--jsonl", "-", stdin=lines)
    assert result.exit_code == 1
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [set(one) for one in found[:2]] == [{"tier", "rule", "signals", "reasons"}] * 2
    assert [(one.get("tier"), one.get("rule")) for one in found[:2]] == [
        ("fast", "everything else"),
        ("exact", "code"),
    ]
    assert [one["line"] for one in found[2:]] == [4, 5]
    assert found[2]["error"].startswith("not a JSON object")
    assert found[3]["error"] == "stream must be true or false"


def test_json_lines_that_can_all_be_explained_exit_with_0(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(f"{body(PROSE)}\n{body(CODE)}\n", encoding="utf-8")
    result = explain("--jsonl", str(file))
    assert result.exit_code == 0
    assert [json.loads(line)["tier"] for line in result.stdout.splitlines()] == ["fast", "exact"]


def test_the_time_of_a_request() -> None:
    Path("office.yaml").write_text("""version: 1
rules:
  - {name: office, when: {time: {from: "09:00", to: "17:00"}}, send: exact}
  - {name: rest, send: fast}
""")
    office = ("--policy", "office.yaml", "--time")
    assert record(*office, "2026-11-30T10:00:00+00:00", stdin=body(PROSE))["rule"] == "office"
    assert record(*office, "2026-11-30T18:00:00+00:00", stdin=body(PROSE))["rule"] == "rest"


def logged(*texts: str, policy: str = "default") -> bytes:
    """A decision log of these requests."""
    live = compile_policy(*shipped(policy))
    fields = Fields([live])
    written = fields.line
    for number, text in enumerate(texts):
        facts, memo = facts_of({"messages": [{"role": "user", "content": text}]}, Caller(time=number)), Memo()
        decision = live.decide(facts, memo)
        line = line_of(facts, memo, decision, fields, id_=f"req_{number}", time=0, measure_all=True)
        written += msgspec.json.encode(line) + b"\n"
    return written


def test_the_last_decisions_of_a_log() -> None:
    Path("d.jsonl").write_bytes(logged(PROSE, CODE, PROSE))
    result = explain("--last", "2", "--log", "d.jsonl")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "1970-01-01 00:00:01 UTC  req_1  anonymous  openai.chat  any"
    assert lines[1].startswith("decided then: exact, by the rule `code` of ")
    assert lines[2] == "exact, by the rule `code`"
    assert "1970-01-01 00:00:02 UTC  req_2  anonymous  openai.chat  any" in lines
    assert "req_0" not in result.stdout
    assert "decided otherwise now" not in result.stdout


def test_the_last_decisions_under_another_policy_as_json() -> None:
    Path("d.jsonl").write_bytes(logged(PROSE, CODE, policy="thrifty"))
    Path("new.yaml").write_text(
        "version: 1\nrules: [{name: a, when: {header: {x-a: 1}}, send: exact}, {name: b, send: fast}]\n"
    )
    found = json.loads(explain("--last", "5", "--log", "d.jsonl", "--policy", "new.yaml", "--json").stdout)
    assert [one["made"]["id"] for one in found] == ["req_0", "req_1"]
    assert [(one["made"]["rule"], one["rule"]) for one in found] == [("everything else", "b"), ("code", "b")]
    assert found[1]["signals"]["code"] >= 0.8
    assert found[1]["lacking"] == ["header x-a"]
    assert (
        "not in the log, taken for not given: header x-a"
        in explain("--last", "1", "--log", "d.jsonl", "--policy", "new.yaml").stdout
    )


def test_the_last_decisions_go_on_in_older_files_and_pass_over_what_is_no_line() -> None:
    Path("d.jsonl.1").write_bytes(logged(PROSE, CODE))
    Path("d.jsonl").write_bytes(logged(SUM) + b"torn\n")
    found = json.loads(explain("--last", "2", "--log", "d.jsonl", "--json").stdout)
    assert [one["rule"] for one in found] == ["code", "maths"]
    assert [one["lacking"] for one in found] == [[], []]


def test_the_last_decisions_of_the_deployment_here() -> None:
    engine = {
        "name": "e",
        "tier": "fast",
        "kind": "external",
        "url": "http://127.0.0.1:1",
        "precision": "awq",
    }
    file = {"model": "m", "engines": [engine], "policy": "strict", "decision_log": {"path": "logs/d.jsonl"}}
    Path("dualgauge.yaml").write_text(json.dumps(file))
    assert "there is no decision log" in explain("--last", "1").output
    Path("logs").mkdir()
    Path("logs/d.jsonl").write_bytes(logged(CODE))
    assert json.loads(explain("--last", "1", "--json").stdout)[0]["rule"] == "demanding"


def test_an_empty_log_has_no_last_decision() -> None:
    Path("d.jsonl").write_bytes(b"")
    result = explain("--last", "1", "--log", "d.jsonl")
    assert (result.exit_code, result.stdout) == (0, "the log holds no decision\n")


@pytest.mark.parametrize("policy", ["strict", "thrifty"])
def test_a_shipped_policy_by_name(policy: str) -> None:
    assert record("--policy", policy, stdin=body(PROSE))["policy"]["file"].endswith(f"{policy}.yaml")


def test_the_deployment_here_gives_policy_and_tiers() -> None:
    Path("own.yaml").write_text("version: 1\nrules: [{name: all, send: high}]\n", encoding="utf-8")
    deployment = {
        "model": "m",
        "tiers": ["low", "high"],
        "policy": "own.yaml",
        "engines": [
            {
                "name": "e",
                "tier": "high",
                "kind": "external",
                "precision": "bf16",
                "url": "http://127.0.0.1:9",
            }
        ],
    }
    Path("dualgauge.yaml").write_text(json.dumps(deployment), encoding="utf-8")
    result = CliRunner().invoke(explain_command, ["--text", PROSE])
    assert result.stdout.startswith("high, by the rule `all`"), result.output
    Path("dualgauge.yaml").write_text('{"modle": "m"}', encoding="utf-8")
    result = CliRunner().invoke(explain_command, ["--text", PROSE])
    assert result.exit_code == 1
    assert "dualgauge.yaml:1:2: error: unknown key `modle`; did you mean `model`?" in result.output


@pytest.mark.parametrize(
    ("arguments", "stdin", "status", "message"),
    [
        ([], None, 2, "give one of FILE, --text, --jsonl and --last"),
        (["-", "--text", "x"], "{}", 2, "give one of FILE, --text, --jsonl and --last"),
        (["none.json"], None, 1, "none.json"),
        (["--last", "1"], None, 1, "there is no dualgauge.yaml here: name a log with --log"),
        (["--last", "0"], None, 2, "is not in the range 1<=x<=10000"),
        (["--text", "x", "--time", "noon"], None, 2, "write it as 2026-11-30T09:00:00+01:00"),
        (["--text", "\udcff"], None, 2, "--text is not UTF-8"),
        (["-"], "not json", 1, "not a JSON object"),
        (["-"], b"\xff\xfe", 1, "not a JSON object"),
        (["-"], "[1]", 1, "not a JSON object"),
        (["-"], "[" * 5000, 1, "not a JSON object"),
        (["-", "--header", "nonsense"], "{}", 2, "write it as `x-criticality: high`"),
        (["-", "--policy", "none.yaml"], "{}", 1, "none.yaml:1:1: error: cannot read the policy: "),
        (["-", "--policy", str(INVALID / "unknown_tier.yaml")], "{}", 1, "unknown_tier.yaml:3:45: error:"),
    ],
)
def test_mistakes_have_one_message(
    arguments: list[str], stdin: str | bytes | None, status: int, message: str
) -> None:
    result = explain(*arguments, stdin=stdin)
    assert result.exit_code == status
    assert message in result.output
    assert "Traceback" not in result.output


def test_check_takes_a_good_policy() -> None:
    result = CliRunner().invoke(policy_group, ["check", "default"])
    assert result.exit_code == 0
    assert "default.yaml: 7 rules, hash " in result.output


def test_check_looks_at_the_candidate_too() -> None:
    Path("p.yaml").write_text("version: 1\nrules: [{name: a, send: fast}]\nshadow: c.yaml\n")
    result = CliRunner().invoke(policy_group, ["check", "p.yaml"])
    assert result.exit_code == 1
    assert "c.yaml:1:1: error: cannot read the policy: No such file" in result.output
    Path("c.yaml").write_text("version: 1\nrules: [{name: a, send: fats}]\n")
    result = CliRunner().invoke(policy_group, ["check", "p.yaml"])
    assert result.exit_code == 1
    assert "c.yaml:2:25: error: unknown tier `fats`; did you mean `fast`?" in result.output
    Path("c.yaml").write_text("version: 1\nrules: [{name: a, send: fast}]\n")
    result = CliRunner().invoke(policy_group, ["check", "p.yaml"])
    assert result.exit_code == 0
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == ["p.yaml", "c.yaml"]


def test_check_shows_warnings_and_takes_the_policy() -> None:
    path = INVALID.parent / "valid" / "unused_class.yaml"
    result = CliRunner().invoke(policy_group, ["check", str(path)])
    assert result.exit_code == 0
    assert f"{path}:3:3: warning: the class `agent` is used nowhere" in result.output


def test_check_refuses_with_positions() -> None:
    path = INVALID / "unknown_tier.yaml"
    result = CliRunner().invoke(policy_group, ["check", str(path)])
    assert result.exit_code == 1
    assert f"{path}:3:45: error: unknown tier `exat`; did you mean `exact`?" in result.output


def test_check_knows_other_tiers() -> None:
    path = INVALID / "unknown_tier.yaml"
    result = CliRunner().invoke(policy_group, ["check", str(path), "--tiers", "fast,fastt,slow,exat"])
    assert result.exit_code == 0, result.output
    result = CliRunner().invoke(policy_group, ["check", "default", "--tiers", "fast,,exact"])
    assert result.exit_code == 2


def test_check_of_a_file_that_is_not_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"version: 1\n# caf\xe9\n")
    result = CliRunner().invoke(policy_group, ["check", str(path)])
    assert result.exit_code == 1
    assert "latin.yaml:2:6: error: this is not UTF-8: save it as UTF-8" in result.output


def test_check_of_a_name_that_is_no_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(policy_group, ["check", "defualt"])
    assert result.exit_code == 1
    assert result.output == (
        "defualt:1:1: error: cannot read the policy: No such file or directory;"
        " unknown policy `defualt`; did you mean `default`?\n"
    )


def test_check_of_a_candidate_below_a_home_that_nobody_has(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("version: 1\nshadow: ~nobody-has-this/x.yaml\nrules: [{name: all, send: fast}]\n")
    result = CliRunner().invoke(policy_group, ["check", str(path)])
    assert result.exit_code == 1
    assert "x.yaml:1:1: error: cannot read the policy: No such file" in result.output


def test_schema_is_printed() -> None:
    result = CliRunner().invoke(policy_group, ["schema"])
    assert json.loads(result.stdout) == policy_schema()
