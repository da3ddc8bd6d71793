"""The admin port."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.client import ask, get, until
from tests.support.engine import FakeEngine, engines, hang, reply
from tests.support.serving import serving
from tests.support.shapes import CHAT, check_openai

TOKEN = {"authorization": "Bearer s3cret"}
DOWN = {"fast": "http://127.0.0.1:9", "exact": "http://127.0.0.1:9"}
GUARDED = [
    ("GET", "/metrics"),
    ("GET", "/admin/status"),
    ("GET", "/admin/demand"),
    ("POST", "/admin/reload"),
]


@pytest.mark.parametrize(("method", "path"), GUARDED)
async def test_a_token_is_asked_where_one_is_configured(tmp_path: Path, method: str, path: str) -> None:
    async with serving(tmp_path, DOWN, wait=False, admin_token="s3cret") as served:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Bearer "},
            {"x-api-key": "s3cret"},
        ):
            answer = await ask(served.admin, path, method=method, headers=headers)
            assert answer.status == 401
            check_openai(answer.json["error"])
        assert (await ask(served.admin, path, method=method, headers=TOKEN)).status == 200


@pytest.mark.parametrize(("method", "path"), GUARDED)
async def test_without_a_token_none_is_asked(tmp_path: Path, method: str, path: str) -> None:
    async with serving(tmp_path, DOWN, wait=False) as served:
        assert (await ask(served.admin, path, method=method)).status == 200


async def test_health_and_readiness_need_no_token(tmp_path: Path) -> None:
    async with serving(tmp_path, DOWN, wait=False, admin_token="s3cret") as served:
        assert (await get(served.admin, "/healthz")).status == 200
        assert (await get(served.admin, "/readyz")).status == 503


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("GET", "/v1/models", 404),
        ("POST", CHAT.path, 404),
        ("GET", "/admin/reload", 405),
        ("POST", "/metrics", 405),
        ("DELETE", "/admin/status", 405),
    ],
)
async def test_other_routes_and_methods(tmp_path: Path, method: str, path: str, status: int) -> None:
    async with serving(tmp_path, DOWN, wait=False) as served:
        answer = await ask(served.admin, path, method=method)
        assert answer.status == status
        check_openai(answer.json["error"])


async def test_status_shows_engines_tiers_and_policy(tmp_path: Path) -> None:
    fast, exact = FakeEngine(hang), FakeEngine()
    fast.metrics = (
        b"vllm:num_requests_running 3.0\nvllm:num_requests_waiting 2.0\nvllm:kv_cache_usage_perc 0.5\n"
    )
    async with engines(fast, exact), serving(tmp_path, {"fast": fast, "exact": exact}) as served:
        await until(lambda: served.engine("fast-0").sampled_at is not None)
        served.mark("exact-0", "down", "it does not answer")
        status: dict[str, Any] = (await get(served.admin, "/admin/status")).json
        assert status["model"] == "smollm2"
        assert status["draining"] is False
        assert status["leases"] == 0
        assert status["tiers"] == {"fast": "ready", "exact": "exact-0: down, it does not answer"}
        assert status["policy"]["rules"] == ["critical", "everything else"]
        assert status["policy"]["hash"] == served.gateway.snapshot.policy.hash
        assert status["policy"]["reload_error"] is None
        shown = status["engines"][0]
        assert shown["name"] == "fast-0"
        assert shown["state"] == "ready"
        assert (shown["running"], shown["waiting"], shown["kv_usage"]) == (3, 2, 0.5)


async def test_metrics_are_in_prometheus_text(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        await ask(served.port, CHAT.path, CHAT.ask())
        answer = await get(served.admin, "/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        families = {f.name: f for f in text_string_to_metric_families(answer.body.decode())}
        (sample,) = families["dualgauge_requests"].samples
        assert sample.labels == {
            "dialect": "openai.chat",
            "tier": "fast",
            "rule": "everything else",
            "outcome": "ok",
        }


HOLD = "/admin/engines/fast-0/hold"


async def test_an_engine_that_is_held_gets_nothing_until_it_is_let_go(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        answer = await ask(served.admin, HOLD, {"reason": "drained, by hand"})
        assert answer.json == {"engine": "fast-0", "held": "drained, by hand", "in_flight": 0}
        refused = await ask(served.port, CHAT.path, CHAT.ask())
        assert refused.status == 503
        assert "fast-0: drained, by hand" in refused.json["error"]["message"]
        assert (await ask(served.admin, HOLD, {"reason": ""})).json["held"] == ""
        assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 200


async def test_a_hold_tells_what_is_under_way(tmp_path: Path) -> None:
    engine = FakeEngine(hang)
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        asking = asyncio.create_task(ask(served.port, CHAT.path, CHAT.ask()))
        await until(lambda: served.engine("fast-0").in_flight == 1)
        assert (await ask(served.admin, HOLD, {"reason": "drained"})).json["in_flight"] == 1
        demand = (await get(served.admin, "/admin/demand")).json["tiers"]
        assert demand["fast"] == {"waiting": 0, "oldest": 0.0, "running": 1}
        asking.cancel()


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/admin/engines/other/hold", {"reason": ""}, 404),
        (HOLD, {}, 400),
        (HOLD, {"reason": 5}, 400),
        (HOLD, {"reason": "", "more": 1}, 400),
    ],
)
async def test_a_hold_that_is_none_is_refused(tmp_path: Path, path: str, body: object, status: int) -> None:
    async with serving(tmp_path, DOWN, wait=False) as served:
        answer = await ask(served.admin, path, body)
        assert answer.status == status
        check_openai(answer.json["error"])


async def test_a_hold_needs_the_token(tmp_path: Path) -> None:
    async with serving(tmp_path, DOWN, wait=False, admin_token="s3cret") as served:
        assert (await ask(served.admin, HOLD, {"reason": "x"})).status == 401
        assert served.engine("fast-0").held == ""


async def test_requests_that_wait_for_their_tiers_turn_are_told_and_served(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        served.gateway.fleet.turns = {"fast": 30.0}
        await ask(served.admin, HOLD, {"reason": "asleep"})
        asking = asyncio.create_task(ask(served.port, CHAT.path, CHAT.ask()))
        await until(lambda: served.gateway.tiers.oldest("fast")[0] == 1)
        waits = (await get(served.admin, "/admin/demand")).json["tiers"]["fast"]
        assert waits["waiting"] == 1
        assert waits["oldest"] >= 0
        await ask(served.admin, HOLD, {"reason": ""})
        assert (await asking).status == 200
        assert served.gateway.tiers.oldest("fast") == (0, 0.0)


async def test_an_engine_that_is_let_go_is_asked_at_once(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    settings = {"health": {"every": "1h"}}
    async with engines(engine), serving(tmp_path, {"fast": engine}, **settings) as served:
        await ask(served.admin, HOLD, {"reason": "asleep"})
        served.mark("fast-0", "asleep")
        await ask(served.admin, HOLD, {"reason": ""})
        await until(lambda: served.engine("fast-0").state == "ready")
