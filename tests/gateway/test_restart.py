"""A restart that nobody notices: new processes take the port over while streams run and requests come."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
from click.testing import CliRunner

from gateway.cli.serve import restart_command
from gateway.crew import PLACE
from gateway.crew.worker import PROTOCOL
from tests.gateway.test_workers import SHORT, STREAM, eventually, gone, pids, streams, value, workers
from tests.support.client import Wire, ask, get, until
from tests.support.engine import Exchange, FakeEngine, Script, engines, hang, reply
from tests.support.redis import needs_redis
from tests.support.serving import PLAIN, ServedProcess, process
from tests.support.shapes import CHAT, check_error

STREAMS = 100
FEW = ("listen", "admin", "workers")


def until_released(release: asyncio.Event) -> Script:
    """A stream that ends when the test says so."""

    async def script(exchange: Exchange) -> None:
        exchange.head()
        exchange.chunk(SHORT)
        await release.wait()
        exchange.chunk(CHAT.stream)
        exchange.end()

    return script


class Answer(NamedTuple):
    status: int
    json: Any


@contextlib.asynccontextmanager
async def alone(folder: Path, engine: FakeEngine, **settings: Any) -> AsyncIterator[ServedProcess]:
    """A gateway without workers, in front of an engine that it has found ready."""
    settings = {"health": {"every": "100ms"}, **settings}
    async with engines(engine):
        with process(folder, {"fast": engine, "exact": engine}, **settings) as served:

            async def ready() -> bool:
                return (await get(served.admin, "/readyz")).status == 200

            await eventually(ready)
            yield served
            served.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(served.process.wait, 30)


def gateway(folder: Path, engine: FakeEngine, count: int) -> Any:
    return alone(folder, engine) if count == 1 else workers(folder, engine, count)


async def restart(served: ServedProcess) -> Answer:
    """Processes start slowly where many do."""
    url = f"http://127.0.0.1:{served.admin}/admin/restart"
    reply = await asyncio.to_thread(httpx2.post, url, timeout=50)
    return Answer(reply.status_code, reply.json())


async def serving(served: ServedProcess) -> set[int]:
    status = (await get(served.admin, "/admin/status")).json
    found = [one["pid"] for one in status.get("workers", ()) if one["state"] == "serving"]
    return set(found) or {served.process.pid}


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=needs_redis)])
async def test_100_streams_and_whoever_comes_meanwhile_notice_nothing(tmp_path: Path, count: int) -> None:
    release = asyncio.Event()
    engine = FakeEngine(until_released(release))
    async with gateway(tmp_path, engine, count) as served, contextlib.AsyncExitStack() as stack:
        wires = await streams(stack, served.port, STREAMS)
        engine.script = reply(CHAT.reply)
        idle = await stack.enter_async_context(await Wire.open(served.port))
        idle.send(CHAT.path, CHAT.ask())
        assert (await idle.reply()).headers.get("connection") is None
        before, statuses, done = await serving(served), [], asyncio.Event()

        async def come() -> None:
            while not done.is_set():
                statuses.append((await ask(served.port, CHAT.path, CHAT.ask())).status)
                await asyncio.sleep(0.01)

        coming = [asyncio.create_task(come()) for _ in range(2)]
        answer = await restart(served)
        after = await serving(served)
        await asyncio.sleep(0.2)
        done.set()
        await asyncio.gather(*coming)
        assert answer.status == 200, answer
        assert len(after) == count
        assert not before & after
        assert len(statuses) > 4
        assert set(statuses) == {200}
        idle.send(CHAT.path, CHAT.ask())
        last = await idle.reply()
        assert (last.status, last.headers["connection"]) == (200, "close")
        release.set()
        for wire in wires:
            streamed = await wire.reply()
            assert streamed.complete
            assert streamed.body == SHORT + CHAT.stream
        assert await value(served, "dualgauge_requests_total") == STREAMS + len(statuses) + 2
    assert "Traceback" not in served.log.read_text()


async def test_who_leaves_is_held_and_counted_until_it_has_ended(tmp_path: Path) -> None:
    release = asyncio.Event()
    engine = FakeEngine(until_released(release))
    async with alone(tmp_path, engine) as served, await Wire.open(served.port) as wire:
        wire.send(CHAT.path, STREAM)
        await wire.until(SHORT)
        assert (await restart(served)).status == 200
        held = await ask(served.admin, "/admin/engines/fast-0/hold", {"reason": "draining"})
        assert held.json["in_flight"] == 1
        assert await pids(served, "leaving") == [served.process.pid]
        release.set()
        assert (await wire.reply()).body == SHORT + CHAT.stream
        wire.leave()

        async def left() -> bool:
            return not await pids(served, "leaving")

        await eventually(left)
        held = await ask(served.admin, "/admin/engines/fast-0/hold", {"reason": ""})
        assert held.json["in_flight"] == 0


async def test_sigusr2_restarts_again_and_again_under_one_pid(tmp_path: Path) -> None:
    async with alone(tmp_path, FakeEngine(reply(CHAT.reply))) as served:
        seen = {served.process.pid}
        for _ in range(2):
            served.process.send_signal(signal.SIGUSR2)

            async def another(seen: set[int] = seen) -> bool:
                return not (await serving(served)) & seen

            await eventually(another)
            seen |= await serving(served)
            assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 200
        assert served.process.poll() is None
        served.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(served.process.wait, 10) == 0
        await eventually(gone(list(seen)))


async def test_a_restart_reads_the_configuration(tmp_path: Path) -> None:
    async with alone(tmp_path, FakeEngine(reply(CHAT.reply))) as served:
        file = tmp_path / "dualgauge.yaml"
        file.write_text(json.dumps({**json.loads(file.read_text()), "model": "renamed"}))
        done = await asyncio.to_thread(CliRunner().invoke, restart_command, ["--config", str(file)])
        assert done.exit_code == 0, done.output
        assert done.output.startswith("restarted: pid ")
        models = (await get(served.port, "/v1/models")).json["data"]
        assert models[0]["id"] == "renamed"
        assert (await get(served.admin, "/admin/status")).json["restart_needed"] is False


@pytest.mark.parametrize("file", ["policy.yaml", "dualgauge.yaml"])
async def test_a_replacement_that_does_not_come_up_changes_nothing(tmp_path: Path, file: str) -> None:
    async with alone(tmp_path, FakeEngine(reply(CHAT.reply))) as served:
        (tmp_path / file).write_text("version: nonsense")
        config = str(tmp_path / "dualgauge.yaml")
        answer = await restart(served)
        assert answer.status in (400, 500)
        await until(lambda: file in served.log.read_text())
        assert await serving(served) == {served.process.pid}
        assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 200
        if file == "policy.yaml":
            done = await asyncio.to_thread(CliRunner().invoke, restart_command, ["--config", config])
            assert done.exit_code == 1
            assert "worker 0 could not be replaced, all serve on as they did" in done.stderr


async def test_a_replacement_for_which_no_engine_is_ready_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with alone(tmp_path, engine, health={"every": "1h"}) as served:
        # To the one that runs it is ready still: nobody has asked since.
        engine.health_script = hang
        restarting = asyncio.create_task(restart(served))
        await asyncio.sleep(4)
        assert not restarting.done()
        assert await serving(served) == {served.process.pid}
        assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 200
        second = await restart(served)
        assert second.status == 409
        served.process.send_signal(signal.SIGTERM)
        assert (await restarting).status == 500


@pytest.mark.parametrize("name", FEW)
async def test_what_a_restart_cannot_change_is_told(tmp_path: Path, name: str) -> None:
    changed = {"listen": "127.0.0.1:1", "admin": "127.0.0.1:1", "workers": 2}
    async with alone(tmp_path, FakeEngine(reply(CHAT.reply))) as served:
        file = tmp_path / "dualgauge.yaml"
        more = {"limits": {"store": "redis://127.0.0.1:9"}, name: changed[name]}
        file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
        answer = await restart(served)
        assert answer.status == 409
        assert f"`{name}` was changed" in answer.json["error"]["message"]
        assert await serving(served) == {served.process.pid}


async def test_a_worker_that_took_over_is_replaced_when_it_dies(tmp_path: Path) -> None:
    async with alone(tmp_path, FakeEngine(reply(CHAT.reply))) as served:
        assert (await restart(served)).status == 200
        (pid,) = await serving(served)
        os.kill(pid, signal.SIGKILL)
        # Whoever comes meanwhile waits in the queue of a socket that is still there.
        assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 200
        assert await serving(served) != {pid}


async def test_whoever_runs_long_outlasts_several_restarts(tmp_path: Path) -> None:
    release = asyncio.Event()
    engine = FakeEngine(until_released(release))
    async with alone(tmp_path, engine) as served, await Wire.open(served.port) as wire:
        wire.send(CHAT.path, STREAM)
        await wire.until(SHORT)
        engine.script = reply(CHAT.reply)
        for _ in range(2):
            assert (await restart(served)).status == 200
            assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 200
        release.set()
        assert (await wire.reply()).body == SHORT + CHAT.stream


async def test_a_worker_of_another_version_than_its_parent_does_not_begin(tmp_path: Path) -> None:
    async with alone(tmp_path, FakeEngine(reply(CHAT.reply))) as served:
        place = {"protocol": PROTOCOL + 1, "number": 0, "listen": [0], "channel": 0}
        command = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(tmp_path / "dualgauge.yaml")]
        environment = {**os.environ, PLACE: json.dumps(place)}
        done = await asyncio.to_thread(
            subprocess.run, command, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert "the gateway that runs is of another version" in done.stderr
        assert served.process.poll() is None


async def test_what_was_held_stays_held(tmp_path: Path) -> None:
    async with alone(tmp_path, FakeEngine(reply(CHAT.reply))) as served:
        await ask(served.admin, "/admin/engines/fast-0/hold", {"reason": "draining"})
        (tmp_path / "policy.yaml").write_text(PLAIN)
        assert (await restart(served)).status == 200
        check_error(await ask(served.port, CHAT.path, CHAT.ask()), 503)


async def test_a_policy_that_was_reloaded_since_holds_after_a_restart(tmp_path: Path) -> None:
    async with alone(tmp_path, FakeEngine(reply(CHAT.reply))) as served:
        (tmp_path / "policy.yaml").write_text(PLAIN.replace("everything else", "all the rest"))
        assert (await restart(served)).status == 200
        answer = await ask(served.port, CHAT.path, CHAT.ask())
        assert answer.headers["x-dualgauge-rule"] == "all the rest"
