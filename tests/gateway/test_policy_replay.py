"""`dualgauge policy replay`, as a user runs it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from gateway.cli import bar, policy_replay
from gateway.cli.bar import Bar
from gateway.cli.policy import policy_group
from policies.compile import compile_policy
from policies.decision import pinned
from policies.facts import Conversation, Facts, Turn
from policies.logged import Fields, line_of
from policies.signals import Memo

LIVE = """version: 1
classes: {tools: {signal: has_tools}}
rules:
  - {name: with tools, when: tools, send: exact}
  - {name: the rest, send: fast}
"""
NEW = """version: 1
classes: {streams: {signal: stream}}
rules:
  - {name: streamed, when: streams, send: exact}
  - {name: the rest, send: fast}
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("new.yaml").write_text(NEW)


def log(*requests: dict[str, Any], measure_all: bool = True, pin: str | None = None) -> bytes:
    """The text of a log, of requests that LIVE decided."""
    live = compile_policy(LIVE, "live.yaml")
    fields = Fields([live])
    text = fields.line
    for number, request in enumerate(requests):
        conversation = Conversation((Turn("user", "hello"),))
        facts = Facts(
            dialect="openai.chat",
            model="m",
            headers={},
            read=lambda c=conversation: c,
            time=60.0 * number,
            **request,
        )
        memo: Memo = {}
        decision = live.decide(facts, memo) if pin is None else pinned(pin, live.hash)
        line = line_of(facts, memo, decision, fields, id_="r", time=0, measure_all=measure_all)
        text += msgspec.json.encode(line) + b"\n"
    return text


MIXED = (*[{}] * 90, *[{"stream": True}] * 6, *[{"has_tools": True}] * 4)


def replay(*arguments: str) -> Result:
    return CliRunner().invoke(policy_group, ["replay", *arguments])


def body(*arguments: str) -> Any:
    return json.loads(replay(*arguments, "--json").stdout)


def test_what_moves_is_told() -> None:
    Path("d.jsonl").write_bytes(log(*MIXED))
    result = replay("--log", "d.jsonl", "--policy", "new.yaml")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "100 decisions from 1970-01-01 00:00:00 UTC to 1970-01-01 01:39:00 UTC, in 1 file"
    assert "moves 10 (10.0 %) to another tier" in lines[2]
    rows = [" ".join(line.split()) for line in lines]
    assert any(row.startswith("exact -> fast 4 4.0 %") for row in rows)
    assert any(row.startswith("fast -> exact 6 6.0 %") for row in rows)
    assert any(row.startswith("with tools exact the rest fast 4") for row in rows)
    assert any(row.startswith("the rest fast streamed exact 6") for row in rows)
    assert any(row.startswith("streams 6") and row.endswith("fast -> exact 6") for row in rows)


def test_as_json() -> None:
    Path("d.jsonl").write_bytes(log(*MIXED))
    found = body("--log", "d.jsonl", "--policy", "new.yaml")
    assert found["log"]["decisions"] == found["compared"]["requests"] == 100
    assert (found["moved"]["requests"], found["moved_share"]) == (10, 0.1)
    assert {(one["from"], one["to"]): one["requests"] for one in found["tiers"]} == {
        ("exact", "fast"): 4,
        ("fast", "exact"): 6,
        ("fast", "fast"): 90,
    }
    assert found["classes"] == [
        {
            "class": "streams",
            "from": "fast",
            "to": "exact",
            "requests": 6,
            "tokens": found["classes"][0]["tokens"],
        }
    ]
    assert found["problem"] is None


@pytest.mark.parametrize(("bound", "status"), [("10%", 0), ("0.1", 0), ("9.9%", 1), ("0%", 1), ("100%", 0)])
def test_a_bound_for_ci(bound: str, status: int) -> None:
    Path("d.jsonl").write_bytes(log(*MIXED))
    result = replay("--log", "d.jsonl", "--policy", "new.yaml", "--max-moved", bound)
    assert result.exit_code == status
    assert ("error: 10.0 % of the requests would move" in result.stderr) == bool(status)


def test_what_the_log_cannot_tell_counts_as_moved() -> None:
    Path("d.jsonl").write_bytes(log(*MIXED, measure_all=False))
    result = replay("--log", "d.jsonl", "--policy", "new.yaml", "--max-moved", "50%")
    assert result.exit_code == 1
    assert "100 requests cannot be decided again, the log lacks of them:\n  stream (100)" in result.stdout
    assert "100 of them since the log cannot tell" in result.stderr


def test_the_same_policy_moves_nothing() -> None:
    Path("live.yaml").write_text(LIVE)
    Path("d.jsonl").write_bytes(log(*MIXED) + log({}, {}, pin="exact"))
    result = replay("--log", "d.jsonl", "--policy", "live.yaml", "--max-moved", "0%")
    assert result.exit_code == 0
    assert "2 requests named their tier themselves" in result.stdout


def test_older_and_compressed_files_are_read() -> None:
    Path("d.jsonl").write_bytes(log(*MIXED))
    Path("d.jsonl.1").write_bytes(log(*MIXED))
    Path("d.jsonl.2.gz").write_bytes(gzip.compress(log(*MIXED)))
    found = body("--log", "d.jsonl", "--policy", "new.yaml")
    assert found["log"]["decisions"] == 300
    assert [Path(file).name for file in found["log"]["files"]] == ["d.jsonl.2.gz", "d.jsonl.1", "d.jsonl"]


def test_several_logs_are_added_up() -> None:
    for name in ("a", "b"):
        Path(name).write_bytes(log(*MIXED))
    assert body("--log", "a", "--log", "b", "--policy", "new.yaml")["log"]["decisions"] == 200


def test_the_log_of_the_deployment_here() -> None:
    engine = {
        "name": "e",
        "tier": "slow",
        "kind": "external",
        "url": "http://127.0.0.1:1",
        "precision": "awq",
    }
    file = {"model": "m", "engines": [engine], "tiers": ["slow", "fast", "exact"]}
    Path("dualgauge.yaml").write_text(json.dumps({**file, "decision_log": {"path": "logs/d.jsonl"}}))
    Path("logs").mkdir()
    Path("logs/d.jsonl").write_bytes(log(*MIXED))
    Path("new.yaml").write_text(NEW.replace("send: fast", "send: slow"))
    assert body("--policy", "new.yaml")["moved"]["requests"] == 100
    Path("dualgauge.yaml").write_text(json.dumps(file))
    result = replay("--policy", "new.yaml")
    assert result.exit_code == 1
    assert "dualgauge.yaml has no `decision_log`: name a log with --log" in result.output


def test_bad_lines_are_told_and_counted() -> None:
    Path("d.jsonl").write_bytes(b"no\n" + log({}) + b'{"kind":"decision"}\n\xff\n' + b"bad\n" * 30)
    result = replay("--log", "d.jsonl", "--policy", "new.yaml")
    assert result.exit_code == 0
    told = result.stderr.splitlines()
    assert told[0].startswith("d.jsonl:1: not a line of a decision log: ")
    assert told[1].startswith("d.jsonl:4: not a line of a decision log: ")
    assert len(told) == policy_replay.TOLD + 1
    assert told[-1] == "further bad lines are only counted"
    assert "33 lines could not be read" in result.stdout
    found = body("--log", "d.jsonl", "--policy", "new.yaml")
    assert found["log"]["bad_lines"] == {"d.jsonl": 33}


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--log", "none", "--policy", "new.yaml"], 1, "there is no decision log none"),
        (["--log", "empty", "--policy", "new.yaml"], 1, "error: the log holds no decision"),
        (
            ["--log", "d.jsonl", "--policy", "none.yaml"],
            1,
            "none.yaml:1:1: error: cannot read the policy: No such file",
        ),
        (["--log", "d.jsonl"], 2, "Missing option '--policy'"),
        (["--log", "d.jsonl", "--policy", "new.yaml", "--max-moved", "many"], 2, "write 5% or 0.05"),
        (["--log", "d.jsonl", "--policy", "new.yaml", "--max-moved", "101%"], 2, "write 5% or 0.05"),
        (["--log", "d.jsonl", "--policy", "new.yaml", "--tiers", "a,a"], 2, "fast,exact"),
        (["--policy", "new.yaml"], 1, "there is no dualgauge.yaml here: name a log with --log"),
    ],
)
def test_mistakes_have_one_message(arguments: list[str], status: int, message: str) -> None:
    Path("d.jsonl").write_bytes(log(*MIXED))
    Path("empty").write_bytes(b"")
    result = replay(*arguments)
    assert result.exit_code == status
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_bar_is_shown_to_the_patient_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    patient = Bar("reading", 10, lambda: now)
    patient.show(1)
    assert patient._bar is None
    now = bar.PATIENCE + 0.1
    patient.show(2)
    assert patient._bar is not None
    progress, task = patient._bar
    patient.show(7)
    assert next(one for one in progress.tasks if one.id == task).completed == 7
    patient.close()
