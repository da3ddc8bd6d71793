"""A candidate beside the policy: it decides without acting, then acts for a share of the conversations."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway import snapshots
from gateway.cli.status import describe, status
from gateway.config import parse
from gateway.shadow import Candidate
from policies.compile import compile_policy
from policies.facts import Conversation, Facts, Turn
from policies.logged import DecisionLine, decode
from policies.policy import Policy
from policies.signals import Memo
from tests.support.client import ask, get, until
from tests.support.engine import FakeEngine, engines, reply
from tests.support.serving import Served, deployment, serving
from tests.support.shapes import CHAT, RESPONSES

RULES = """version: 1
rules:
  - {name: streamed, when: {signal: stream}, send: exact, if_unavailable: fail}
  - {name: everything else, send: fast, if_unavailable: fail}
"""
LIVE = f"{RULES}shadow: candidate.yaml\n"
CANDIDATE = """version: 1
rules:
  - {name: critical, when: {header: {x-criticality: high}}, send: exact, if_unavailable: fail}
  - {name: the rest, send: fast, if_unavailable: fail}
"""
BROKEN = "version: 1\nrules: [{name: all, send: fats}]\n"


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "FILE_POLL_SECONDS", 0.02)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "candidate.yaml").write_text(CANDIDATE)
    return tmp_path


def rollout(share: str) -> str:
    return f"{LIVE}rollout: {share}\n"


def both() -> dict[str, FakeEngine]:
    return {"fast": FakeEngine(reply(CHAT.reply)), "exact": FakeEngine(reply(CHAT.reply))}


async def rule(served: Served, text: str = "hi", **headers: str) -> str:
    body = CHAT.ask(messages=[{"role": "user", "content": text}])
    answer = await ask(served.port, CHAT.path, body, headers=headers)
    assert answer.status == 200
    return answer.headers["x-dualgauge-rule"]


def series(served: Served, name: str) -> dict[tuple[str, ...], float]:
    for family in text_string_to_metric_families(served.metrics().decode()):
        for sample in family.samples:
            if sample.name == name:
                return {
                    tuple(value for _, value in sorted(s.labels.items())): s.value
                    for s in family.samples
                    if s.name == name
                }
    return {}


async def shadow(served: Served) -> Any:
    return (await get(served.admin, "/admin/status")).json["policy"]["shadow"]


async def test_a_candidate_is_counted_and_does_not_act(folder: Path) -> None:
    some = both()
    async with engines(*some.values()), serving(folder, some, policy=LIVE) as served:
        assert await rule(served) == "everything else"
        assert await rule(served, **{"x-criticality": "high"}) == "everything else"
        assert series(served, "dualgauge_shadow_decisions_total") == {
            ("fast", "everything else", "fast"): 1,
            ("exact", "everything else", "fast"): 1,
        }
        found = await shadow(served)
        assert (found["decided"], found["moved"], found["acted"], found["rollout"]) == (2, 1, 0, 0)
        assert found["hash"] != served.gateway.snapshot.policy.hash
        assert series(served, "dualgauge_shadow_rollout") == {(found["hash"],): 0}
        assert {(one["candidate_rule"], one["candidate_tier"]) for one in found["differences"]} == {
            ("critical", "exact"),
            ("the rest", "fast"),
        }


async def test_without_a_candidate_nothing_is_counted(folder: Path) -> None:
    some = both()
    async with engines(*some.values()), serving(folder, some, policy=RULES) as served:
        await rule(served)
        assert served.gateway.snapshot.candidate is None
        assert await shadow(served) is None
        assert series(served, "dualgauge_shadow_decisions_total") == {}
        assert series(served, "dualgauge_shadow_rollout") == {}


async def test_a_whole_rollout_acts_and_names_its_hash(folder: Path) -> None:
    some = both()
    log = {"path": "d.jsonl"}
    async with (
        engines(*some.values()),
        serving(folder, some, policy=rollout("100%"), decision_log=log) as served,
    ):
        assert await rule(served, **{"x-criticality": "high"}) == "critical"
        found = await shadow(served)
        assert (found["decided"], found["acted"], found["moved"]) == (1, 1, 1)
        live = served.gateway.snapshot.policy.hash
    lines = [decode(line) for line in (folder / "d.jsonl").read_bytes().splitlines()]
    (made,) = [line for line in lines if isinstance(line, DecisionLine)]
    assert (made.policy, made.rule) == (found["hash"], "critical")
    assert made.other is not None
    assert (made.other.policy, made.other.rule, made.other.tier) == (live, "everything else", "fast")
    assert made.headers == {"x-criticality": "high"}


async def test_a_share_of_conversations_is_decided_by_the_candidate_and_stays_there(folder: Path) -> None:
    some = both()
    async with engines(*some.values()), serving(folder, some, policy=rollout("30%")) as served:
        first = {text: await rule(served, text) for text in map(str, range(200))}
        acted = [text for text, name in first.items() if name == "the rest"]
        assert 30 <= len(acted) <= 90
        assert (await shadow(served))["acted"] == len(acted)
        for text in list(first)[:40]:
            later = [
                {"role": "user", "content": text},
                {"role": "assistant", "content": "yes"},
                {"role": "user", "content": f"and {text}?"},
            ]
            answer = await ask(served.port, CHAT.path, CHAT.ask(messages=later))
            assert answer.headers["x-dualgauge-rule"] == first[text]
        (folder / "policy.yaml").write_text(rollout("60%"))
        assert (await ask(served.admin, "/admin/reload")).status == 200
        again = {text: await rule(served, text) for text in first}
        assert sum(name == "the rest" for name in again.values()) > len(acted)
        assert all(again[text] == "the rest" for text in acted), "who was on it stays on it"


async def test_a_conversation_in_stored_replies_stays_where_it_began(folder: Path) -> None:
    some = both()
    async with engines(*some.values()), serving(folder, some, policy=rollout("50%")) as served:
        for number in range(12):
            made = {**json.loads(RESPONSES.reply), "id": f"resp_{number:016x}"}
            for engine in some.values():
                engine.script = reply(made)
            begun = await ask(served.port, RESPONSES.path, RESPONSES.ask(input=f"begin {number}"))
            for _ in range(3):
                more = RESPONSES.ask(input=f"go on {number}", previous_response_id=made["id"])
                answer = await ask(served.port, RESPONSES.path, more)
                assert answer.headers["x-dualgauge-rule"] == begun.headers["x-dualgauge-rule"]


async def test_the_candidates_file_is_watched(folder: Path) -> None:
    some = both()
    async with engines(*some.values()), serving(folder, some, policy=rollout("100%")) as served:
        assert await rule(served) == "the rest"
        before = served.gateway.snapshot.candidate
        assert before is not None
        (folder / "candidate.yaml").write_text(CANDIDATE.replace("the rest", "others"))
        await until(lambda: served.gateway.snapshot.candidate is not before)
        assert await rule(served) == "others"


async def test_a_broken_candidate_changes_nothing_and_is_loud(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    some = both()
    async with engines(*some.values()), serving(folder, some, policy=rollout("100%")) as served:
        before = served.gateway.snapshot
        with caplog.at_level(logging.ERROR):
            (folder / "candidate.yaml").write_text(BROKEN)
            await until(lambda: served.gateway.shadow_error is not None)
        place = f"{folder}/candidate.yaml:2:27: error: unknown tier `fats`; did you mean `fast`?"
        assert place in caplog.text
        assert place in (await get(served.port, "/readyz")).json["shadow_error"]
        assert place in (await get(served.admin, "/admin/status")).json["policy"]["shadow_error"]
        assert series(served, "dualgauge_reload_failures_total")["shadow",] == 1
        assert (await get(served.port, "/readyz")).status == 200
        assert served.gateway.snapshot.policy.hash == before.policy.hash
        assert await rule(served) == "the rest"
        answer = await ask(served.admin, "/admin/reload")
        assert answer.status == 400
        assert place in answer.json["error"]["message"]
        (folder / "candidate.yaml").write_text(CANDIDATE.replace("the rest", "others"))
        await until(lambda: served.gateway.shadow_error is None)
        assert await rule(served) == "others"
        assert "shadow_error" not in (await get(served.port, "/readyz")).json


@pytest.mark.parametrize("text", [BROKEN, None], ids=["broken", "missing"])
async def test_a_candidate_that_is_broken_at_the_start_is_left_out(
    folder: Path, caplog: pytest.LogCaptureFixture, text: str | None
) -> None:
    (folder / "candidate.yaml").unlink()
    if text is not None:
        (folder / "candidate.yaml").write_text(text)
    some = both()
    async with engines(*some.values()), serving(folder, some, policy=rollout("100%")) as served:
        assert "the candidate is refused, there is none" in caplog.text
        assert await rule(served) == "everything else"
        assert served.gateway.shadow_error is not None
        (folder / "candidate.yaml").write_text(CANDIDATE)
        await until(lambda: served.gateway.shadow_error is None)
        assert await rule(served) == "the rest"


async def test_another_candidate_that_is_broken_does_not_leave_the_old_one_in_its_place(folder: Path) -> None:
    (folder / "other.yaml").write_text(BROKEN)
    some = both()
    async with engines(*some.values()), serving(folder, some, policy=rollout("100%")) as served:
        (folder / "policy.yaml").write_text(rollout("100%").replace("candidate.yaml", "other.yaml"))
        await until(lambda: served.gateway.shadow_error is not None)
        assert served.gateway.snapshot.candidate is None
        assert await rule(served) == "everything else"


async def test_a_broken_policy_keeps_its_candidate(folder: Path) -> None:
    some = both()
    async with engines(*some.values()), serving(folder, some, policy=rollout("100%")) as served:
        (folder / "policy.yaml").write_text(BROKEN)
        await until(lambda: served.gateway.reload_error is not None)
        assert await rule(served) == "the rest"
        (folder / "candidate.yaml").write_text(CANDIDATE + "# touched\n")
        await asyncio.sleep(0.1)
        assert series(served, "dualgauge_reload_failures_total")["policy",] == 2


async def test_a_candidate_that_fails_leaves_the_policy_to_decide(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = both()
    decide = Policy.decide

    def failing(policy: Policy, facts: Facts, memo: Memo | None = None) -> Any:
        if policy.file.endswith("candidate.yaml"):
            raise RuntimeError("a fault")
        return decide(policy, facts, memo)

    async with engines(*some.values()), serving(folder, some, policy=rollout("100%")) as served:
        monkeypatch.setattr(Policy, "decide", failing)
        for _ in range(3):
            assert await rule(served) == "everything else"
        assert series(served, "dualgauge_shadow_failures_total") == {(): 3}
        assert (await shadow(served))["failed"] == 3
        assert caplog.text.count("cannot decide: the policy in force does") == 1


async def test_a_shipped_policy_can_be_the_candidate(folder: Path) -> None:
    some = both()
    policy = LIVE.replace("candidate.yaml", "strict") + "plans: {default: {requests: 1M/min}}\n"
    async with engines(*some.values()), serving(folder, some, policy=policy) as served:
        body = CHAT.ask(messages=[{"role": "user", "content": "Write a function in Python."}])
        assert (await ask(served.port, CHAT.path, body)).status == 200
        found = await shadow(served)
        assert found["file"].endswith("strict.yaml")
        assert found["moved"] == 1


async def test_counts_stay_at_a_reload_that_changes_neither(folder: Path) -> None:
    some = both()
    async with engines(*some.values()), serving(folder, some, policy=LIVE) as served:
        await rule(served)
        told = (await ask(served.admin, "/admin/reload")).json
        found = await shadow(served)
        assert found["decided"] == 1
        assert told["candidate"] == found["hash"]
        (folder / "policy.yaml").write_text(LIVE + "# changed\n")
        await ask(served.admin, "/admin/reload")
        assert (await shadow(served))["decided"] == 0


async def test_status_shows_the_candidate(folder: Path) -> None:
    some = both()
    async with engines(*some.values()), serving(folder, some, policy=rollout("10%")) as served:
        for number in range(5):
            await rule(served, str(number), **{"x-criticality": "high"})
        (folder / "candidate.yaml").write_text(BROKEN)
        await until(lambda: served.gateway.shadow_error is not None)
        answer = (await get(served.admin, "/admin/status")).json
        config = parse(json.dumps(deployment(some)), folder / "dualgauge.yaml", os.environ)
        lines = "\n".join(describe(status(config, None, answer), ""))
        assert f"candidate: {folder}/candidate.yaml " in lines
        assert "decides 10 % of the conversations" in lines
        assert "of 5 requests it sends 5 (100.0%) to another tier" in lines
        assert "5: everything else (fast) -> critical (exact)" in lines
        assert "the candidate is refused:" in lines


def test_classes_of_one_name_do_not_meet() -> None:
    """Both policies have a class `a`, used twice: what the one found must not be taken for the other's."""

    def policy(condition: str) -> Policy:
        return compile_policy(
            f"version: 1\nclasses: {{a: {condition}, b: a}}\nrules:\n"
            "  - {name: one, when: {all: [a, b]}, send: exact}\n  - {name: rest, send: fast}",
            "p.yaml",
        )

    live, other = policy("{signal: stream}"), policy("{signal: has_tools}")
    conversation = Conversation((Turn("user", "hi"),))
    facts = Facts(dialect="openai.chat", model="m", headers={}, read=lambda: conversation, has_tools=True)
    memo: Memo = {}
    decision = live.decide(facts, memo)
    acting, shadowed = Candidate("c", other, live, 0.0).beside(facts, memo, decision)
    assert acting.rule == "rest"
    assert shadowed is not None
    assert shadowed.rule == "one"
