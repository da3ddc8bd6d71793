"""The decision log of a running gateway: a line of facts for each decided request, whatever became of it."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gateway.cli.explain import explain_command
from gateway.telemetry import decision_log
from gateway.telemetry.decision_files import lines, whole
from policies.logged import DecisionLine, FieldsLine, decode
from tests.support.client import Wire, ask, get, until
from tests.support.engine import FakeEngine, engines, hang, reply, stream
from tests.support.serving import Served, process, serving
from tests.support.shapes import CHAT, SHAPES, Shape

SECRET = "correct horse battery staple"
POLICY = """version: 1
rules:
  - {name: critical, when: {header: {x-criticality: high}}, send: exact, if_unavailable: fail}
  - name: streamed
    when: {all: [{signal: stream}, {metadata: {k: [v]}}]}
    send: exact
    if_unavailable: degrade
  - {name: everything else, send: fast, if_unavailable: fail}
plans: {default: {requests: 1M/min}, tiny: {tokens: 1/min}}
"""
KEYS = "keys: [{name: a, key: sk-a, tags: [t, s]}, {name: tiny, key: sk-tiny, plan: tiny}]"
LOG = {"path": "logs/decisions.jsonl", "size": "64KiB"}


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_log, "EVERY_SECONDS", 0.005)


def logged(folder: Path) -> list[DecisionLine]:
    found = [decode(placed.data or b"") for placed in lines(whole(folder / LOG["path"]), lambda _: None)]
    return [line for line in found if isinstance(line, DecisionLine)]


async def one(folder: Path) -> DecisionLine:
    await until(lambda: (folder / LOG["path"]).exists() and bool(logged(folder)))
    (line,) = logged(folder)
    return line


async def a(served: Served, shape: Shape = CHAT, **fields: Any) -> Any:
    return await ask(served.port, shape.path, shape.ask(**fields), headers={"x-api-key": "sk-a"})


@pytest.mark.parametrize("shape", SHAPES, ids=[shape.name for shape in SHAPES])
async def test_a_request_has_a_line(tmp_path: Path, shape: Shape) -> None:
    engine = FakeEngine(reply(shape.reply))
    options: dict[str, Any] = {"policy": POLICY, "keys": KEYS, "decision_log": LOG}
    async with engines(engine), serving(tmp_path, {"fast": engine}, **options) as served:
        answer = await a(served, shape)
        line = await one(tmp_path)
        assert line.id == answer.headers["x-request-id"]
        assert line.policy == served.gateway.snapshot.policy.hash
        assert (line.dialect, line.model, line.tenant, line.tags) == (
            shape.dialect.name,
            "smollm2",
            "a",
            ["s", "t"],
        )
        assert (line.tier, line.rule, line.unavailable) == ("fast", "everything else", "fail")
        assert line.reasons == ("no rule before it held",)
        assert (line.served, line.engine, line.degraded) == ("fast", "fast-0", False)
        assert (line.outcome, line.status) == ("ok", 200)
        assert line.usage is not None
        usage = shape.reply_usage
        assert (line.usage.prompt, line.usage.completion) == (usage.prompt, usage.completion)
        assert line.headers == {"x-criticality": None}
        assert line.metadata == {"k": None}
        assert {"code", "math", "prompt_tokens", "script", "turns"} <= line.signals.keys()
        assert line.signals["prompt_tokens"] > 0
        assert abs(line.time - served.gateway.wall()) < 60


async def test_nothing_private_is_in_the_log(tmp_path: Path) -> None:
    engine = FakeEngine(reply({"choices": [{"message": {"content": SECRET}}], "usage": {"prompt_tokens": 1}}))
    options: dict[str, Any] = {"policy": POLICY, "keys": KEYS, "decision_log": LOG}
    async with engines(engine), serving(tmp_path, {"fast": engine}, **options) as served:
        await ask(
            served.port,
            CHAT.path,
            CHAT.ask(
                messages=[{"role": "system", "content": SECRET}, {"role": "user", "content": SECRET}],
                metadata={"k": SECRET, "other": SECRET},
                user=SECRET,
            ),
            headers={"x-api-key": "sk-a", "x-criticality": SECRET, "x-other": SECRET, "cookie": SECRET},
        )
        line = await one(tmp_path)
    text = (tmp_path / LOG["path"]).read_text()
    assert SECRET not in text
    assert "sk-a" not in text
    assert line.headers == {"x-criticality": True}
    assert line.metadata == {"k": True}


async def test_only_what_deciding_measured_where_that_is_asked_for(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    options: dict[str, Any] = {"policy": POLICY, "decision_log": {**LOG, "signals": "used"}}
    async with engines(engine), serving(tmp_path, {"fast": engine}, **options) as served:
        await ask(served.port, CHAT.path, CHAT.ask())
        assert (await one(tmp_path)).signals == {"stream": False}


async def test_a_degraded_answer_says_why(tmp_path: Path) -> None:
    engine = FakeEngine(stream(CHAT.stream))
    tiers: dict[str, FakeEngine | str] = {"fast": engine, "exact": "http://127.0.0.1:9"}
    options: dict[str, Any] = {"policy": POLICY, "decision_log": LOG, "wait": False}
    async with engines(engine), serving(tmp_path, tiers, **options) as served:
        served.mark("fast-0", "ready")
        await ask(served.port, CHAT.path, CHAT.ask(stream=True, metadata={"k": "V"}))
        line = await one(tmp_path)
        assert (line.tier, line.served, line.degraded) == ("exact", "fast", True)
        assert line.because == "unavailable (degrade)"
        assert line.metadata == {"k": "v"}
        assert line.usage is not None
        assert line.usage.completion == CHAT.stream_usage.completion


async def test_a_pinned_request_has_a_line_without_signals(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}, decision_log=LOG) as served:
        await ask(served.port, CHAT.path, CHAT.ask(model="smollm2:fast"))
        line = await one(tmp_path)
        assert (line.rule, line.tier, line.signals, line.headers) == ("pinned", "fast", {}, {})


async def test_requests_that_end_otherwise_have_lines_too(tmp_path: Path) -> None:
    engine = FakeEngine(hang)
    options: dict[str, Any] = {"policy": POLICY, "keys": KEYS, "decision_log": LOG}
    async with engines(engine), serving(tmp_path, {"fast": engine}, **options) as served:
        headers = {"x-api-key": "sk-a"}
        async with await Wire.open(served.port) as wire:
            wire.send(CHAT.path, CHAT.ask(), headers=headers)
            await until(lambda: engine.generations == 1)
            wire.leave()
            await until(lambda: served.clean)
        await ask(served.port, CHAT.path, CHAT.ask(), headers={**headers, "x-criticality": "high"})
        await ask(served.port, CHAT.path, CHAT.ask(), headers={"x-api-key": "sk-tiny"})
        engine.script = reply({"error": {"message": "no"}}, 400)
        await ask(served.port, CHAT.path, CHAT.ask(), headers=headers)
        await until(lambda: len(logged(tmp_path)) == 4)
        assert [(line.outcome, line.status, line.engine) for line in logged(tmp_path)] == [
            ("cancelled", 0, "fast-0"),
            ("unavailable", 503, ""),
            ("limited", 429, ""),
            ("client_error", 400, "fast-0"),
        ]


async def test_what_is_not_decided_has_no_line(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    options: dict[str, Any] = {"policy": POLICY, "keys": KEYS, "decision_log": LOG}
    async with engines(engine), serving(tmp_path, {"fast": engine}, **options) as served:
        await ask(served.port, CHAT.path, CHAT.ask())  # no key
        await ask(served.port, CHAT.path, b"{", headers={"x-api-key": "sk-a"})
        await get(served.port, "/v1/models", {"x-api-key": "sk-a"})
        await ask(
            served.port, "/tokenize", {"model": "smollm2", "prompt": "x"}, headers={"x-api-key": "sk-a"}
        )
        await a(served)
        line = await one(tmp_path)
        assert line.rule == "everything else"


async def test_without_the_key_nothing_is_written(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        await ask(served.port, CHAT.path, CHAT.ask())
        assert served.gateway.decisions is None
    assert [file.name for file in tmp_path.iterdir()] == ["policy.yaml"]


async def test_no_line_is_lost_at_reloads_rotations_and_the_end(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    count = 400
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}, policy=POLICY, decision_log=LOG) as served,
    ):

        async def some(number: int) -> list[str]:
            async with await Wire.open(served.port) as wire:
                ids = []
                for _ in range(number):
                    wire.send(CHAT.path, CHAT.ask())
                    ids.append((await wire.reply()).headers["x-request-id"])
                return ids

        asking = [asyncio.create_task(some(count // 4)) for _ in range(4)]
        for number in range(20):
            other = POLICY.replace("high", f"high{number}")
            (tmp_path / "policy.yaml").write_text(other)
            await ask(served.admin, "/admin/reload")
            await asyncio.sleep(0.01)
        ids = {id_ for found in await asyncio.gather(*asking) for id_ in found}
    files = whole(tmp_path / LOG["path"])
    assert len(files) > 2
    assert {line.id for line in logged(tmp_path)} == ids
    assert len(logged(tmp_path)) == count
    for file in files:
        known: set[str] = set()
        for placed in lines([file], lambda _: None):
            line = decode(placed.data or b"")
            if isinstance(line, FieldsLine):
                known.add(line.id)
            else:
                assert line.fields in known


async def test_a_log_that_cannot_be_written_does_not_disturb_requests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision_log, "MAX_QUEUE", 3)
    monkeypatch.setattr(decision_log, "BATCH", 2)
    monkeypatch.setattr(decision_log, "AGAIN_SECONDS", 0.01)
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}, decision_log=LOG) as served:
        with monkeypatch.context() as full:
            full.setattr(decision_log.os, "write", _full)
            for _ in range(10):
                assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 200
                await asyncio.sleep(0.02)
            dropped = "dualgauge_decision_log_dropped_total"
            text = served.metrics().decode()
            (value,) = [float(row.split()[1]) for row in text.splitlines() if row.startswith(dropped + " ")]
            assert value > 0
        await until(lambda: "is written again" in caplog.text)
        await until(lambda: len(logged(tmp_path)) == 10 - value)
    assert caplog.text.count("No space left on device; it is tried again") == 1


def _full(_fd: int, _data: bytes) -> int:
    raise OSError(28, "No space left on device")


async def test_a_line_that_cannot_be_made_is_told_once_and_disturbs_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}, decision_log=LOG) as served:
        monkeypatch.setattr(served.gateway.decisions, "_line", None)
        with caplog.at_level(logging.ERROR):
            for _ in range(3):
                assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 200
        assert caplog.text.count("cannot be put into the decision log") == 1
        assert "dualgauge_decision_log_dropped_total 3.0" in served.metrics().decode()


async def test_explain_shows_the_last_decisions_while_the_gateway_runs_and_sigterm_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine):
        with process(tmp_path, {"fast": engine}, decision_log=LOG, policy=POLICY) as served:
            async with asyncio.timeout(5):
                while (await ask(served.port, CHAT.path, CHAT.ask())).status != 200:
                    await asyncio.sleep(0.02)
            answer = await ask(served.port, CHAT.path, CHAT.ask())
            id_ = answer.headers["x-request-id"]
            await until(lambda: any(line.id == id_ for line in logged(tmp_path)))
            monkeypatch.chdir(tmp_path)
            shown = CliRunner().invoke(explain_command, ["--last", "1", "--json"])
            assert shown.exit_code == 0, shown.output
            (found,) = json.loads(shown.stdout)
            assert (found["made"]["id"], found["rule"], found["lacking"]) == (id_, "everything else", [])
            last = (await ask(served.port, CHAT.path, CHAT.ask())).headers["x-request-id"]
            served.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(served.process.wait, 10)
            assert logged(tmp_path)[-1].id == last


async def test_a_log_that_cannot_be_opened_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where a folder should be")
    told = r"decision_log\.path: .* cannot be written: (Not a|File exists)"
    down = {"fast": "http://127.0.0.1:9"}
    with pytest.raises(AssertionError, match=told), process(tmp_path, down, decision_log=LOG):
        pass
