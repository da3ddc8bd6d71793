"""Stored responses: asked of the engine that made them, and only for the tenant whose they are."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import Reply, ask, get
from tests.support.engine import Exchange, FakeEngine, engines, reply, stream
from tests.support.serving import Served, serving
from tests.support.shapes import RESPONSES, check_error, events

KEYS = """
keys:
  - {name: a, key: sk-a}
  - {name: b, key: sk-b}
  - {name: fast, key: sk-fast, tiers: [fast]}
"""
ID = json.loads(RESPONSES.reply)["id"]


class Storing:
    """An engine's script that keeps its replies, as vLLM does where its store is on."""

    def __init__(self) -> None:
        self.kept: set[str] = set()

    async def __call__(self, exchange: Exchange) -> None:
        received = exchange.received
        if received.method == "POST" and received.path == RESPONSES.path:
            self.kept.add(ID)
            if received.json.get("stream"):
                mine = RESPONSES.stream.replace(b"resp_88091e5fd69c02e2", ID.encode())
                await stream(*events(mine))(exchange)
            else:
                await reply(RESPONSES.reply)(exchange)
        elif received.path.split("/")[3] in self.kept:
            await reply({"id": ID, "object": "response", "asked": received.path})(exchange)
        else:
            await reply({"error": {"message": "Response not found", "code": 404}}, 404)(exchange)


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer sk-{name}"}


async def make(served: Served, tier: str, **fields: Any) -> Reply:
    answer = await ask(
        served.port, RESPONSES.path, RESPONSES.ask(model=f"smollm2:{tier}", **fields), headers=key("a")
    )
    assert answer.status == 200
    return answer


@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "json"])
@pytest.mark.parametrize("tier", ["fast", "exact"])
async def test_a_reply_is_asked_of_the_engine_that_made_it(tmp_path: Path, tier: str, streamed: bool) -> None:
    some = {"fast": FakeEngine(Storing()), "exact": FakeEngine(Storing())}
    async with engines(*some.values()), serving(tmp_path, some, keys=KEYS) as served:
        await make(served, tier, stream=streamed)
        for method, path in (("GET", f"/v1/responses/{ID}"), ("POST", f"/v1/responses/{ID}/cancel")):
            answer = await ask(served.port, path, method=method, headers=key("a"))
            assert answer.status == 200
            assert answer.json["asked"] == path
            assert answer.headers["x-dualgauge-engine"] == f"{tier}-0"
        assert {name: engine.generations for name, engine in some.items()} == {
            tier: 3,
            "fast" if tier == "exact" else "exact": 0,
        }
        assert served.clean


async def test_another_tenants_reply_is_a_404(tmp_path: Path) -> None:
    engine = FakeEngine(Storing())
    async with engines(engine), serving(tmp_path, {"fast": engine}, keys=KEYS) as served:
        await make(served, "fast")
        for method, path in (("GET", f"/v1/responses/{ID}"), ("POST", f"/v1/responses/{ID}/cancel")):
            answer = await ask(served.port, path, method=method, headers=key("b"))
            check_error(answer, 404, code="response_not_found")
        assert engine.generations == 1


async def test_an_unknown_reply_is_asked_of_each_engine(tmp_path: Path) -> None:
    """As after a restart of the gateway."""
    some = {"fast": FakeEngine(Storing()), "exact": FakeEngine(Storing())}
    async with engines(*some.values()), serving(tmp_path, some) as served:
        assert isinstance(some["exact"].script, Storing)
        some["exact"].script.kept.add(ID)
        answer = await get(served.port, f"/v1/responses/{ID}")
        assert answer.status == 200
        assert answer.headers["x-dualgauge-engine"] == "exact-0"
        assert check_error(await get(served.port, "/v1/responses/resp_nope"), 404) == "Response not found"
        assert some["fast"].generations == some["exact"].generations == 2
        assert served.clean


async def test_engines_of_a_tier_that_a_key_may_not_use_are_not_asked(tmp_path: Path) -> None:
    some = {"fast": FakeEngine(Storing()), "exact": FakeEngine(Storing())}
    async with engines(*some.values()), serving(tmp_path, some, keys=KEYS) as served:
        check_error(await get(served.port, "/v1/responses/resp_1", key("fast")), 404)
        assert (some["fast"].generations, some["exact"].generations) == (1, 0)


async def test_a_reply_whose_engine_is_down_is_a_503(tmp_path: Path) -> None:
    some = {"fast": FakeEngine(Storing()), "exact": FakeEngine(Storing())}
    async with engines(*some.values()), serving(tmp_path, some, keys=KEYS) as served:
        await make(served, "exact")
        served.mark("exact-0", "down")
        check_error(await get(served.port, f"/v1/responses/{ID}", key("a")), 503)
        assert some["fast"].generations == 0


async def test_an_engine_that_refuses_connections_is_a_503(tmp_path: Path) -> None:
    engine = FakeEngine(Storing())
    async with engines(engine), serving(tmp_path, {"fast": engine}, keys=KEYS) as served:
        await make(served, "fast")
        await engine.stop()
        check_error(await get(served.port, f"/v1/responses/{ID}", key("a")), 503)
        assert served.clean


@pytest.mark.parametrize(
    "name", ["resp_1%2F..%2F..%2Fsleep", "%2e%2e", "resp 1", "resp_%C3%A9", "a?b", "%0d%0ax:1"]
)
async def test_an_id_cannot_leave_its_place(tmp_path: Path, name: str) -> None:
    engine = FakeEngine(Storing())
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        answer = await get(served.port, "/v1/responses/" + name.replace(" ", "%20"))
        check_error(answer, 404)
        for exchange in engine.exchanges:
            assert exchange.received.path.startswith("/v1/responses/")
            assert exchange.received.path.count("/") == 3
            assert ".." not in exchange.received.path
            assert "x" not in exchange.received.headers


async def test_old_replies_are_forgotten(tmp_path: Path) -> None:
    async with serving(tmp_path, {"fast": "http://127.0.0.1:9"}, wait=False) as served:
        stored = served.gateway.stored
        for number in range(10_050):
            stored.remember(f"resp_{number}", "fast-0", "a")
        assert stored.find("resp_0") is None
        assert stored.find("resp_10049") == ("resp_10049", "fast-0", "a", None)


async def test_another_tenants_reply_cannot_be_continued(tmp_path: Path) -> None:
    engine = FakeEngine(Storing())
    async with engines(engine), serving(tmp_path, {"fast": engine}, keys=KEYS) as served:
        await make(served, "fast")
        asked = RESPONSES.ask(previous_response_id=ID)
        answer = await ask(served.port, RESPONSES.path, asked, headers=key("b"))
        check_error(answer, 404, code="response_not_found")
        assert (await ask(served.port, RESPONSES.path, asked, headers=key("a"))).status == 200
