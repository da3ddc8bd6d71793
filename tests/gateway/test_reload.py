"""Policies and keys are read again while requests run; a broken file changes nothing."""

import asyncio
import logging
import shutil
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gateway import config, snapshots
from gateway.cli.serve import reload_command
from tests.support.client import Wire, ask, get, until
from tests.support.engine import FakeEngine, engines, reply, stream
from tests.support.serving import PLAIN, Served, process, serving
from tests.support.shapes import CHAT, check_error

RENAMED = PLAIN.replace("everything else", "all the rest")
BROKEN = """version: 1
rules:
  - {name: all, send: fast, if_unavailabel: fail}
"""
KEYS = "keys: [{name: a, key: sk-a}]"


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "FILE_POLL_SECONDS", 0.02)


async def rule(served: Served, **headers: str) -> str:
    answer = await ask(served.port, CHAT.path, CHAT.ask(), headers=headers)
    assert answer.status == 200
    return answer.headers["x-dualgauge-rule"]


def failures(served: Served) -> float:
    lines = served.metrics().decode().splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("dualgauge_reload_failures_total{")
    )


async def test_an_edited_policy_is_read(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        assert await rule(served) == "everything else"
        before = served.gateway.snapshot.policy.hash
        (tmp_path / "policy.yaml").write_text(RENAMED)
        await until(lambda: served.gateway.snapshot.policy.hash != before)
        assert await rule(served) == "all the rest"
        info = [
            line
            for line in served.metrics().decode().splitlines()
            if line.startswith("dualgauge_policy_info{")
        ]
        assert info == [f'dualgauge_policy_info{{hash="{served.gateway.snapshot.policy.hash}"}} 1.0']


async def test_a_replaced_policy_file_is_read(tmp_path: Path) -> None:
    """As editors and config management write it: a new file renamed over the old."""
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        (tmp_path / "new.yaml").write_text(RENAMED)
        (tmp_path / "new.yaml").replace(tmp_path / "policy.yaml")
        await until(lambda: served.gateway.snapshot.policy.rules[-1].name == "all the rest")


async def test_edited_keys_are_read(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}, keys=KEYS) as served:
        await rule(served, **{"x-api-key": "sk-a"})
        (tmp_path / "keys.yaml").write_text(
            "keys: [{name: a, key: sk-a, disabled: true}, {name: b, key: sk-b}]"
        )
        await until(lambda: len(served.gateway.snapshot.keyring.tenants) == 2)
        check_error(await ask(served.port, CHAT.path, CHAT.ask(), headers={"x-api-key": "sk-a"}), 401)
        await rule(served, **{"x-api-key": "sk-b"})


def mount(volume: Path, number: int, **files: str) -> None:
    """As Kubernetes keeps a volume: links into `..data`, which itself leads to another folder each time."""
    folder, data = volume / f"..{number}", volume / "..data"
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / f"{name}.yaml").write_text(content)
        if number == 1:
            (volume / f"{name}.yaml").symlink_to(f"..data/{name}.yaml")
    before = data.resolve()
    (volume / "..new").symlink_to(folder.name)
    (volume / "..new").replace(data)
    if number > 1:
        shutil.rmtree(before)


def test_what_kubernetes_replaces_is_read(tmp_path: Path) -> None:
    volume = tmp_path / "etc"
    deployment = (
        "{model: m, policy: ./policy.yaml, keys: keys.yaml, engines: "
        "[{name: a, tier: fast, kind: external, url: 'http://127.0.0.1:1', precision: awq}]}"
    )
    mount(volume, 1, dualgauge=deployment, policy=PLAIN, keys=KEYS)
    read = config.read(volume / "dualgauge.yaml")
    before, _ = snapshots.read_snapshot(read)
    mount(volume, 2, dualgauge=deployment, policy=RENAMED, keys="keys: [{name: b, key: sk-b}]")
    assert read.path.exists()
    after, _ = snapshots.read_snapshot(read)
    assert [tenant.name for snapshot in (before, after) for tenant in snapshot.keyring.tenants] == ["a", "b"]
    assert after.policy.rules[-1].name == "all the rest"


async def test_c19_a_broken_policy_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(stream(b"data: {}\n\n", CHAT.stream, between=0.3))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.send(CHAT.path, CHAT.ask(stream=True, stream_options={"include_usage": True}))
        await wire.until(b"data: {}\n\n")
        snapshot = served.gateway.snapshot
        (tmp_path / "policy.yaml").write_text(BROKEN)
        with caplog.at_level(logging.ERROR):
            await until(lambda: served.gateway.reload_error is not None)
        for message in (served.gateway.reload_error or "", caplog.text):
            assert f"{tmp_path}/policy.yaml:3:29: error: unknown key `if_unavailabel`" in message
            assert "did you mean `if_unavailable`?" in message
        assert served.gateway.snapshot is snapshot
        assert failures(served) == 1
        assert "if_unavailabel" in (await get(served.port, "/readyz")).json["reload_error"]
        status = (await get(served.admin, "/admin/status")).json
        assert "if_unavailabel" in status["policy"]["reload_error"]
        answer = await wire.reply()
        assert answer.complete
        assert answer.body == b"data: {}\n\n" + CHAT.stream

        (tmp_path / "policy.yaml").write_text(RENAMED)
        await until(lambda: served.gateway.reload_error is None)
        assert served.gateway.snapshot.policy.rules[-1].name == "all the rest"
        assert "reload_error" not in (await get(served.port, "/readyz")).json


@pytest.mark.parametrize(
    "text", [b"", b"\xff\xfe", b"keys: 5", b"keys: [{name: a}]", b"keys: [{name: a, key: x, tiers: [fats]}]"]
)
async def test_broken_keys_keep_the_old_ones_and_the_old_policy(tmp_path: Path, text: bytes) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}, keys=KEYS) as served:
        snapshot = served.gateway.snapshot
        (tmp_path / "keys.yaml").write_bytes(text)
        (tmp_path / "policy.yaml").write_text(RENAMED)
        await until(lambda: served.gateway.reload_error is not None)
        assert served.gateway.snapshot is snapshot
        assert await rule(served, **{"x-api-key": "sk-a"}) == "everything else"


async def test_a_file_that_is_gone_keeps_the_old_one_until_it_is_back(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        (tmp_path / "policy.yaml").unlink()
        await until(lambda: served.gateway.reload_error is not None)
        assert await rule(served) == "everything else"
        (tmp_path / "policy.yaml").write_text(RENAMED)
        await until(lambda: served.gateway.reload_error is None)
        assert await rule(served) == "all the rest"


async def test_the_admin_port_reloads_and_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "FILE_POLL_SECONDS", 3600)
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        (tmp_path / "policy.yaml").write_text(BROKEN)
        answer = await ask(served.admin, "/admin/reload")
        assert answer.status == 400
        assert "policy.yaml:3:29" in answer.json["error"]["message"]
        assert await rule(served) == "everything else"
        (tmp_path / "policy.yaml").write_text(RENAMED)
        answer = await ask(served.admin, "/admin/reload")
        assert answer.json["policy"] == served.gateway.snapshot.policy.hash
        assert await rule(served) == "all the rest"


async def test_a_request_in_flight_finishes_on_its_own_snapshot(tmp_path: Path) -> None:
    text = "version: 1\nrules: [{name: old, send: fast, if_unavailable: {wait: 20s}}]"
    new = "version: 1\nrules: [{name: new, send: exact, if_unavailable: fail}]"
    engine, exact = FakeEngine(reply(CHAT.reply)), FakeEngine(reply(CHAT.reply))
    tiers = {"fast": engine, "exact": exact}
    async with engines(engine, exact), serving(tmp_path, tiers, policy=text) as served:
        served.mark("fast-0", "down")
        asking = asyncio.create_task(ask(served.port, CHAT.path, CHAT.ask()))
        await until(lambda: served.leases == 1)
        (tmp_path / "policy.yaml").write_text(new)
        await until(lambda: served.gateway.snapshot.policy.rules[0].name == "new")
        served.mark("fast-0", "ready")
        assert (await asking).headers["x-dualgauge-rule"] == "old"
        assert await rule(served) == "new"


async def test_reloads_leave_no_task_behind(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        before = len(asyncio.all_tasks())
        for _ in range(20):
            await ask(served.admin, "/admin/reload")
        await until(lambda: len(asyncio.all_tasks()) <= before)


async def test_sighup_reloads(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine):
        with process(tmp_path, {"fast": engine}) as served:

            async def rules() -> list[str]:
                return list((await get(served.admin, "/admin/status")).json["policy"]["rules"])

            assert await rules() == ["critical", "everything else"]
            (tmp_path / "policy.yaml").write_text(RENAMED)
            served.process.send_signal(signal.SIGHUP)
            async with asyncio.timeout(5):
                while await rules() != ["critical", "all the rest"]:
                    await asyncio.sleep(0.01)
            (tmp_path / "policy.yaml").write_text(BROKEN)
            served.process.send_signal(signal.SIGHUP)
            async with asyncio.timeout(5):
                while "policy.yaml:3:29" not in served.log.read_text():
                    await asyncio.sleep(0.01)
            assert served.process.poll() is None


async def test_the_reload_command_says_what_is_in_force_and_what_is_wrong(tmp_path: Path) -> None:
    def run() -> Result:
        return CliRunner().invoke(reload_command, ["--config", str(tmp_path / "dualgauge.yaml")])

    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine):
        with process(tmp_path, {"fast": engine}) as served:
            (tmp_path / "policy.yaml").write_text(RENAMED + "shadow: strict\n")
            done = await asyncio.to_thread(run)
            policy = (await get(served.admin, "/admin/status")).json["policy"]
            told = (
                f"policy {policy['hash']} is in force, beside it the candidate {policy['shadow']['hash']}\n"
            )
            assert (done.exit_code, done.stdout) == (0, told)
            (tmp_path / "policy.yaml").write_text(BROKEN)
            done = await asyncio.to_thread(run)
            assert done.exit_code == 1
            assert "policy.yaml:3:29: error: unknown key `if_unavailabel`" in done.stderr
        done = await asyncio.to_thread(run)
        assert done.exit_code == 1
        assert "no gateway answers at http://127.0.0.1:" in done.stderr


async def test_a_changed_deployment_file_needs_a_restart(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    (tmp_path / "dualgauge.yaml").write_text("# as it was\n")
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        assert (await get(served.admin, "/admin/status")).json["restart_needed"] is False
        await asyncio.sleep(0.05)
        (tmp_path / "dualgauge.yaml").write_text("# changed since\n")
        await until(lambda: served.gateway.restart_needed)
        assert (await get(served.admin, "/admin/status")).json["restart_needed"] is True
