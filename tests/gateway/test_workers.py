"""Several gateway processes behind one port: who answers, what they know of each other, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.telemetry.decision_files import lines, whole
from tests.support.client import Reply, Wire, ask, get, until
from tests.support.engine import FakeEngine, engines, reply, stream
from tests.support.redis import needs_redis, server
from tests.support.serving import PLAIN, ServedProcess, process
from tests.support.shapes import CHAT, SHAPES, check_error

pytestmark = needs_redis

MANY = 40
"""Connections of which none goes to the one of two workers in one of 2 ** 40 runs."""
STREAM = CHAT.ask(stream=True, stream_options={"include_usage": True})
SHORT = b"data: {}\n\n"


async def eventually(condition: Callable[[], Any], seconds: float = 30) -> Any:
    """Wait for something that another process brings about; `condition` may be asked often."""
    async with asyncio.timeout(seconds):
        while not (found := await condition()):
            await asyncio.sleep(0.02)
        return found


async def pids(served: ServedProcess, state: str = "serving") -> list[int]:
    status = await get(served.admin, "/admin/status")
    if status.status != 200:
        return []
    return [worker["pid"] for worker in status.json["workers"] if worker["state"] == state]


async def ready(served: ServedProcess, count: int) -> list[int]:
    async def all_serve() -> list[int]:
        found = await pids(served)
        good = (await get(served.admin, "/readyz")).status == 200
        return found if good and len(found) == count else []

    found: list[int] = await eventually(all_serve)
    return found


@contextlib.asynccontextmanager
async def workers(
    folder: Path, engine: FakeEngine, count: int = 2, **settings: Any
) -> AsyncIterator[ServedProcess]:
    with server() as redis:
        settings = {
            "workers": count,
            "limits": {"store": redis.url},
            "health": {"every": "100ms"},
            **settings,
        }
        async with engines(engine):
            with process(folder, {"fast": engine, "exact": engine}, **settings) as served:
                await ready(served, count)
                yield served
                # Nothing may outlive a test.
                served.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(served.process.wait, 30)


def owner(wire: Wire, port: int) -> int:
    """The process that has accepted this connection."""
    mine = wire._writer.get_extra_info("sockname")[1]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if (int(fields[1][-4:], 16), int(fields[2][-4:], 16)) == (port, mine):
            wanted = f"socket:[{fields[9]}]"
            for entry in Path("/proc").iterdir():
                with contextlib.suppress(OSError):
                    if entry.name.isdigit() and any(
                        str(fd.readlink()) == wanted for fd in (entry / "fd").iterdir()
                    ):
                        return int(entry.name)
    raise AssertionError("nobody has accepted it yet")


async def asked(served: ServedProcess, count: int = MANY, **headers: str) -> list[Reply]:
    """So many requests, each on a connection of its own."""
    answers = await asyncio.gather(
        *(ask(served.port, CHAT.path, CHAT.ask(), headers=headers) for _ in range(count))
    )
    return list(answers)


async def value(served: ServedProcess, name: str) -> float:
    text = (await get(served.admin, "/metrics")).body.decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    )


async def test_clients_are_spread_over_processes(tmp_path: Path) -> None:
    async with (
        workers(tmp_path, FakeEngine(reply(CHAT.reply))) as served,
        contextlib.AsyncExitStack() as stack,
    ):
        found = set()
        for _ in range(MANY):
            wire = await stack.enter_async_context(await Wire.open(served.port))
            wire.send(CHAT.path, CHAT.ask())
            assert (await wire.reply()).status == 200
            found.add(owner(wire, served.port))
        assert found == set(await pids(served))
        assert served.process.pid not in found


async def test_metrics_are_those_of_all(tmp_path: Path) -> None:
    async with workers(tmp_path, FakeEngine(reply(CHAT.reply))) as served:
        assert {answer.status for answer in await asked(served)} == {200}
        assert await value(served, "dualgauge_requests_total") == MANY
        assert await value(served, "dualgauge_request_seconds_count") == MANY
        assert await value(served, "dualgauge_tokens_total") == MANY * sum(
            (CHAT.reply_usage.prompt, CHAT.reply_usage.completion, CHAT.reply_usage.cached)
        )
        assert await value(served, "dualgauge_store_up") == 1
        assert await value(served, "dualgauge_workers") == 2


async def test_figures_of_the_console_are_those_of_all(tmp_path: Path) -> None:
    async with workers(tmp_path, FakeEngine(reply(CHAT.reply))) as served:
        await get(served.admin, "/admin/live")
        await asked(served)

        async def shown() -> Any:
            state = (await get(served.admin, "/admin/live")).json
            (rule,) = (rule for rule in state["state"]["rules"] if rule["name"] == "everything else")
            return state if rule["requests"] == MANY else None

        state = await eventually(shown)
        assert len(state["decisions"]) > 20, "no process explains more than 20 between two looks"
        one = await get(served.admin, f"/admin/decisions/{state['decisions'][0]['id']}")
        assert one.json["rule"] == "everything else"
        (tenant,) = (await get(served.admin, "/admin/tenants")).json["tenants"]
        assert tenant["requests"] == MANY


async def test_a_worker_that_is_killed_is_replaced_while_others_serve(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with workers(tmp_path, engine) as served:
        await asked(served)
        engine.script = stream(SHORT, CHAT.stream, between=3)
        before = await pids(served)
        async with contextlib.AsyncExitStack() as stack:
            wires: dict[int, Wire] = {}
            while len(wires) < 2:
                wire = await stack.enter_async_context(await Wire.open(served.port))
                wire.send(CHAT.path, STREAM)
                await wire.until(SHORT)
                wires[owner(wire, served.port)] = wire
            victim, other = before
            # What it has counted is asked for every two seconds.
            await value(served, "dualgauge_requests_total")
            os.kill(victim, signal.SIGKILL)
            engine.script = reply(CHAT.reply)
            assert {answer.status for answer in await asked(served)} == {200}
            assert (await wires[other].reply()).body == SHORT + CHAT.stream
        after = await ready(served, 2)
        assert victim not in after
        assert other in after
        assert await value(served, "dualgauge_worker_deaths_total") == 1
        assert await value(served, "dualgauge_requests_total") >= 2 * MANY
        await until(lambda: f"(pid {victim}) was ended by SIGKILL" in served.log.read_text())


async def test_others_take_the_clients_of_a_worker_that_does_not_come_up(tmp_path: Path) -> None:
    async with workers(tmp_path, FakeEngine(reply(CHAT.reply))) as served:
        (tmp_path / "policy.yaml").write_text("version: nonsense")
        victim, other = await pids(served)
        os.kill(victim, signal.SIGKILL)

        async def given_up() -> bool:
            return "worker 0 could not be started" in served.log.read_text()

        await eventually(given_up)
        assert await pids(served) == [other]
        assert {answer.status for answer in await asked(served)} == {200}
        (tmp_path / "policy.yaml").write_text(PLAIN)
        await ready(served, 2)
        assert {answer.status for answer in await asked(served)} == {200}


async def test_a_reload_reaches_all(tmp_path: Path) -> None:
    async with workers(tmp_path, FakeEngine(reply(CHAT.reply))) as served:
        (tmp_path / "policy.yaml").write_text(PLAIN.replace("everything else", "all the rest"))
        told = await ask(served.admin, "/admin/reload")
        assert told.status == 200
        rules = {answer.headers["x-dualgauge-rule"] for answer in await asked(served)}
        assert rules == {"all the rest"}
        (tmp_path / "policy.yaml").write_text("version: 2")
        assert (await ask(served.admin, "/admin/reload")).status == 400


async def test_keys_reach_all(tmp_path: Path) -> None:
    keys = "keys: [{name: a, key: sk-a}%s]"
    async with workers(tmp_path, FakeEngine(reply(CHAT.reply)), keys=keys % "") as served:
        assert {answer.status for answer in await asked(served, **{"x-api-key": "sk-b"})} == {401}
        (tmp_path / "keys.yaml").write_text(keys % ", {name: b, key: sk-b}")
        served.process.send_signal(signal.SIGHUP)

        async def known() -> bool:
            return {answer.status for answer in await asked(served, **{"x-api-key": "sk-b"})} == {200}

        await eventually(known)


async def streams(stack: contextlib.AsyncExitStack, port: int, count: int) -> list[Wire]:
    """So many streams under way, until the stack is closed."""
    wires = []
    for _ in range(count):
        wires.append(await stack.enter_async_context(await Wire.open(port)))
        wires[-1].send(CHAT.path, STREAM)
        await wires[-1].until(SHORT)
    return wires


async def test_a_hold_reaches_all_and_tells_what_runs_on_all(tmp_path: Path) -> None:
    engine = FakeEngine(stream(SHORT, CHAT.stream, between=3))
    async with workers(tmp_path, engine) as served, contextlib.AsyncExitStack() as stack:
        wires = await streams(stack, served.port, MANY)
        held = await ask(served.admin, "/admin/engines/fast-0/hold", {"reason": "draining"})
        assert held.json == {"engine": "fast-0", "held": "draining", "in_flight": MANY}
        demand = (await get(served.admin, "/admin/demand")).json["tiers"]["fast"]
        assert demand["running"] == MANY
        (fast,) = (
            one
            for one in (await get(served.admin, "/admin/status")).json["engines"]
            if one["name"] == "fast-0"
        )
        assert fast["in_flight"] == MANY
        assert {answer.status for answer in await asked(served)} == {503}
        for wire in wires:
            assert (await wire.reply()).complete
        engine.script = reply(CHAT.reply)
        await ask(served.admin, "/admin/engines/fast-0/hold", {"reason": ""})
        assert {answer.status for answer in await asked(served)} == {200}


async def test_a_replaced_worker_knows_what_is_held(tmp_path: Path) -> None:
    async with workers(tmp_path, FakeEngine(reply(CHAT.reply))) as served:
        await ask(served.admin, "/admin/engines/fast-0/hold", {"reason": "draining"})
        before = set(await pids(served))
        for pid in before:
            os.kill(pid, signal.SIGKILL)

        async def replaced() -> bool:
            found = set(await pids(served))  # for a moment still those that were killed
            return len(found) == 2 and not found & before

        await eventually(replaced)
        assert {answer.status for answer in await asked(served)} == {503}


async def test_an_engine_that_is_not_there_cannot_be_held(tmp_path: Path) -> None:
    async with workers(tmp_path, FakeEngine(reply(CHAT.reply))) as served:
        assert (await ask(served.admin, "/admin/engines/none/hold", {"reason": "x"})).status == 404


async def test_a_plans_limit_holds_across_the_workers(tmp_path: Path) -> None:
    policy = PLAIN + "plans:\n  default: {requests: 10/h}\n"
    async with workers(tmp_path, FakeEngine(reply(CHAT.reply)), policy=policy) as served:
        statuses = [answer.status for answer in await asked(served)]
        assert sorted(set(statuses)) == [200, 429]
        assert statuses.count(200) == 10


async def test_all_know_whose_a_stored_reply_is(tmp_path: Path) -> None:
    (shape,) = (shape for shape in SHAPES if shape.name == "responses")
    name = json.loads(shape.reply)["id"]
    engine = FakeEngine(reply(shape.reply))
    keys = "keys: [{name: a, key: sk-a}, {name: b, key: sk-b}]"
    async with workers(tmp_path, engine, keys=keys) as served:
        made = await ask(served.port, shape.path, shape.ask(), headers={"x-api-key": "sk-a"})
        assert made.status == 200
        await asyncio.sleep(0.5)  # told by way of the parent
        for _ in range(MANY):
            answer = await get(served.port, f"/v1/responses/{name}", {"x-api-key": "sk-b"})
            check_error(answer, 404)
        assert engine.generations == 1
        for _ in range(MANY):
            answer = await get(served.port, f"/v1/responses/{name}", {"x-api-key": "sk-a"})
            assert answer.status == 200


async def test_each_decision_is_logged_once(tmp_path: Path) -> None:
    log = {"path": "decisions.jsonl"}
    async with workers(tmp_path, FakeEngine(reply(CHAT.reply)), decision_log=log) as served:
        answers = await asked(served)
    placed = lines(whole(tmp_path / "decisions.jsonl"), lambda _: None)
    found = [json.loads(one.data or b"{}") for one in placed]
    ids = sorted(line["id"] for line in found if "tier" in line)
    assert ids == sorted(answer.headers["x-request-id"] for answer in answers)


async def test_sigterm_drains_all(tmp_path: Path) -> None:
    engine = FakeEngine(stream(SHORT, CHAT.stream, between=1))
    async with workers(tmp_path, engine) as served, contextlib.AsyncExitStack() as stack:
        wires = await streams(stack, served.port, MANY)
        served.process.send_signal(signal.SIGTERM)
        for wire in wires:
            assert (await wire.reply()).body == SHORT + CHAT.stream
        assert await asyncio.to_thread(served.process.wait, 10) == 0
    assert "Traceback" not in served.log.read_text()


async def test_a_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    engine = FakeEngine(stream(SHORT, end="hang"))
    async with workers(tmp_path, engine) as served, await Wire.open(served.port) as wire:
        found = await pids(served)
        wire.send(CHAT.path, STREAM)
        await wire.until(SHORT)
        served.process.send_signal(signal.SIGTERM)

        async def draining() -> bool:
            return "draining" in served.log.read_text()

        await eventually(draining)
        served.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(served.process.wait, 10) == 130
        await eventually(gone(found))


def gone(found: list[int]) -> Callable[[], Any]:
    async def check() -> bool:
        return not any(Path(f"/proc/{pid}").exists() for pid in found)

    return check


async def test_workers_end_after_their_streams_when_their_parent_is_killed(tmp_path: Path) -> None:
    engine = FakeEngine(stream(SHORT, CHAT.stream, between=1))
    async with workers(tmp_path, engine) as served, await Wire.open(served.port) as wire:
        found = await pids(served)
        wire.send(CHAT.path, STREAM)
        await wire.until(SHORT)
        served.process.kill()
        assert (await wire.reply()).body == SHORT + CHAT.stream
        await eventually(gone(found))


async def test_a_start_that_fails_is_one_message(tmp_path: Path) -> None:
    settings = {"workers": 3, "limits": {"store": "redis://127.0.0.1:9"}}

    def start() -> int:
        with process(tmp_path, {"fast": "http://127.0.0.1:9"}, keys="keys: 7", **settings) as served:
            return served.process.wait(30)

    # The admin port may have answered before.
    with contextlib.suppress(AssertionError):
        assert await asyncio.to_thread(start) == 1
    said = (tmp_path / "gateway.log").read_text()
    assert said.count("keys.yaml:1:7: error") == 1
    assert "the gateway does not come up: it ended with exit code 1 before it was ready" in said


async def test_a_port_in_use_is_told(tmp_path: Path) -> None:
    async with workers(tmp_path, FakeEngine(reply(CHAT.reply))) as served:
        (tmp_path / "other").mkdir()
        settings = {"workers": 2, "limits": {"store": "redis://127.0.0.1:9"}}
        with (
            pytest.raises(AssertionError, match="in use by another process: change `listen`"),
            process(tmp_path / "other", {"fast": "http://127.0.0.1:9"}, port=served.port, **settings),
        ):
            pass
