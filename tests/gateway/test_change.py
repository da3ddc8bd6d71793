"""Engines that come and go while requests run."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engines.spec import EngineSpec
from gateway.app import change_engines
from tests.support.client import Wire, ask, until
from tests.support.engine import FakeEngine, engines, hang, reply, stream
from tests.support.serving import Served, serving
from tests.support.shapes import CHAT, RESPONSES, check_error, events

PATIENT = """
version: 1
rules: [{name: all, send: fast, if_unavailable: {wait: 5s}}]
"""


def specs(served: Served, *some: FakeEngine) -> Sequence[EngineSpec]:
    """One of the tier fast for each, named by its port."""
    (like,) = served.gateway.config.engines
    return [replace(like, name=f"fast-{one.port}", url=one.url) for one in some]


def answering() -> FakeEngine:
    return FakeEngine(reply(CHAT.reply))


async def test_one_that_comes_is_probed_and_takes_requests(tmp_path: Path) -> None:
    old, new = answering(), answering()
    async with engines(old, new), serving(tmp_path, {"fast": old}) as served:
        change_engines(served.gateway, specs(served, new))
        await until(lambda: served.gateway.fleet.engines[0].ready)
        answer = await ask(served.port, CHAT.path, CHAT.ask())
        assert (answer.status, answer.headers["x-dualgauge-engine"]) == (200, f"fast-{new.port}")


async def test_a_request_that_waits_is_taken_by_one_that_comes(tmp_path: Path) -> None:
    new = answering()
    async with (
        engines(new),
        serving(tmp_path, {"fast": "http://127.0.0.1:9"}, policy=PATIENT, wait=False) as served,
    ):
        change_engines(served.gateway, [])
        async with await Wire.open(served.port) as wire:
            wire.send(CHAT.path, CHAT.ask())
            await until(lambda: served.gateway.tiers.oldest("fast")[0] == 1)
            change_engines(served.gateway, specs(served, new))
            assert (await wire.reply()).status == 200


async def test_a_stream_on_one_that_goes_runs_to_its_end(tmp_path: Path) -> None:
    parts = events(CHAT.stream)
    old, new = FakeEngine(stream(*parts, between=0.05)), answering()
    async with engines(old, new), serving(tmp_path, {"fast": old}) as served:
        async with await Wire.open(served.port) as wire:
            wire.send(CHAT.path, CHAT.ask(stream=True, stream_options={"include_usage": True}))
            await wire.until(b"data: ")
            change_engines(served.gateway, specs(served, new))
            answer = await wire.reply()
        assert answer.complete
        assert answer.body == CHAT.stream
        await until(lambda: served.clean)


async def test_one_that_has_gone_is_asked_nothing_more(tmp_path: Path) -> None:
    old, new = answering(), answering()
    often = {"every": "10ms", "down_after": 1}
    async with engines(old, new), serving(tmp_path, {"fast": old}, health=often) as served:
        change_engines(served.gateway, specs(served, new))
        await until(lambda: served.gateway.fleet.engines[0].ready)
        asked = len(old.probes)
        new.probes.clear()
        await until(lambda: len(new.probes) > 6)
        assert (len(old.probes), old.generations) == (asked, 0)


async def test_one_that_stays_keeps_its_state(tmp_path: Path) -> None:
    old, new = answering(), answering()
    async with engines(old, new), serving(tmp_path, {"fast": old}) as served:
        kept = served.engine("fast-0")
        change_engines(served.gateway, [*served.gateway.config.engines, *specs(served, new)])
        assert served.engine("fast-0") is kept
        assert kept.ready


async def test_a_name_with_another_address_is_another_engine(tmp_path: Path) -> None:
    old, new = answering(), answering()
    async with engines(old, new), serving(tmp_path, {"fast": old}) as served:
        (spec,) = served.gateway.config.engines
        change_engines(served.gateway, [replace(spec, url=new.url)])
        await until(lambda: served.engine("fast-0").ready)
        await ask(served.port, CHAT.path, CHAT.ask())
        assert (old.generations, new.generations) == (0, 1)


async def test_a_reply_that_has_gone_with_its_engine(tmp_path: Path) -> None:
    old, new = FakeEngine(reply(RESPONSES.reply)), FakeEngine(reply({"error": {"message": "no"}}, status=404))
    async with engines(old, new), serving(tmp_path, {"fast": old}) as served:
        await ask(served.port, RESPONSES.path, RESPONSES.ask())
        change_engines(served.gateway, specs(served, new))
        await until(lambda: served.gateway.fleet.engines[0].ready)
        held = json.loads(RESPONSES.reply)["id"]
        answer = await ask(served.port, RESPONSES.path, RESPONSES.ask(previous_response_id=held))
        check_error(answer, 404, shape=RESPONSES)
        assert new.generations == 1


async def test_a_tier_without_engines_is_unavailable(tmp_path: Path) -> None:
    async with engines(old := FakeEngine(hang)), serving(tmp_path, {"fast": old}) as served:
        change_engines(served.gateway, [])
        answer = await ask(served.port, CHAT.path, CHAT.ask())
        assert answer.status == 503
        assert "no engine is configured" in answer.json["error"]["message"]
