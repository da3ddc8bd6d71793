"""Prometheus scrapes a running gateway: every query of the dashboards finds data, every rule is sound."""

from __future__ import annotations

import asyncio
from pathlib import Path

import yaml

from tests.support import dashboards
from tests.support.client import Wire, ask
from tests.support.dashboards import NAMES
from tests.support.engine import FakeEngine, engines, reply, reset, stream
from tests.support.prometheus import FOLDER, Prometheus, needs_prometheus, prometheus
from tests.support.serving import Served, serving
from tests.support.shapes import CHAT, events

POLICY = """
version: 1
shadow: candidate.yaml
rules:
  - {name: critical, when: {header: {x-criticality: high}}, send: exact, if_unavailable: fail}
  - name: best
    when: {header: {x-team: research}}
    send: exact
    if_busy: {use: fast, waiting: 1}
    if_unavailable: degrade
  - {name: patient, when: {header: {x-team: night}}, send: exact, if_unavailable: {wait: 10s}}
  - {name: everything else, send: fast, if_unavailable: fail}
plans:
  default: {requests: 1M/min, tokens: 1G/min}
  little: {requests: 1/day}
"""
CANDIDATE = """
version: 1
rules: [{name: all, send: exact, if_unavailable: degrade}]
"""
KEYS = "keys: [{name: shop, key: sk-shop}, {name: trial, key: sk-trial, plan: little}]"
FIGURES = b"""\
vllm:num_requests_running 3
vllm:num_requests_waiting 9
vllm:kv_cache_usage_perc 0.4
vllm:num_preemptions_total 2
"""


async def round_of_requests(served: Served, fast: FakeEngine) -> None:
    """One of every kind of end that has a metric of its own."""

    async def say(key: str = "sk-shop", streamed: bool = True, **headers: str) -> None:
        named = {"x-api-key": key, **{name.replace("_", "-"): value for name, value in headers.items()}}
        await ask(served.port, CHAT.path, CHAT.ask(stream=streamed), headers=named)

    await asyncio.gather(
        say(), say(x_criticality="high"), say(x_team="research"), say("sk-trial"), say("sk-trial")
    )
    for broken in (reset, reply({}, 500)):
        fast.scripts.append(broken)
        await say(streamed=False)
        served.mark("fast-0", "ready")
    served.mark("exact-0", "down")
    async with await Wire.open(served.port) as wire:
        night = {"x-api-key": "sk-shop", "x-team": "night"}
        wire.send(CHAT.path, CHAT.ask(), headers=night)
        await asyncio.sleep(0.1)
        served.mark("exact-0", "ready")
        await wire.reply()


def filled(expression: str, page: str) -> list[str]:
    """An expression for each tier, with what Grafana puts for its variables."""
    variables = {
        "$job": "dualgauge",
        "$tenant": "shop|trial" if page == "tenants" else "",
        "$__rate_interval": "4s",
        "$__range": "30s",
    }
    for name, value in variables.items():
        expression = expression.replace(name, value)
    tiers = ("fast", "exact") if "$tier" in expression else ("",)
    return [expression.replace("$tier", tier) for tier in tiers]


async def unanswered(server: Prometheus, expressions: set[str]) -> set[str]:
    return {expression for expression in expressions if not await server.values(expression)}


@needs_prometheus
async def test_every_query_finds_data(tmp_path: Path) -> None:
    (tmp_path / "candidate.yaml").write_text(CANDIDATE)
    answer = stream(*events(CHAT.stream), between=0.01)
    fast, exact = FakeEngine(answer), FakeEngine(answer)
    fast.metrics = exact.metrics = FIGURES
    missing = {
        expression
        for name in NAMES
        for _, query in dashboards.queries(dashboards.load(name))
        for expression in filled(query, name)
    }
    assert len(missing) > 40
    async with (
        engines(fast, exact),
        serving(tmp_path, {"fast": fast, "exact": exact}, policy=POLICY, keys=KEYS) as served,
        prometheus(tmp_path, served.admin) as server,
    ):
        try:
            async with asyncio.timeout(45):
                while missing:
                    await round_of_requests(served, fast)
                    missing = await unanswered(server, missing)
        except TimeoutError:
            raise AssertionError("no data for\n" + "\n".join(sorted(missing))) from None
        for name in NAMES:
            for label, query in dashboards.variables(dashboards.load(name)).items():
                (metric,) = dashboards.metrics(query)
                assert query == f"label_values({metric}, {label})"
                assert await server.get(f"label/{label}/values", **{"match[]": metric})
        rules = (await server.get("rules"))["groups"]
        assert {rule["health"] for group in rules for rule in group["rules"]} == {"ok"}


async def test_rules_read_metrics_that_exist(tmp_path: Path) -> None:
    groups = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
    read = {name for group in groups for rule in group["rules"] for name in dashboards.metrics(rule["expr"])}
    async with serving(tmp_path, {"fast": "http://127.0.0.1:9"}, wait=False) as served:
        lines = served.metrics().decode().splitlines()
    exported = {line.split()[2] for line in lines if line.startswith("# TYPE ")}
    assert {name.removesuffix("_bucket") for name in read} <= exported
