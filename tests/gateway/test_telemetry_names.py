"""Telemetry that operators build upon: names of metrics, the pace of streams, why an answer moved."""

import asyncio
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.telemetry.counters import Buckets, pace
from gateway.telemetry.lag import EVERY_SECONDS, watch_lag
from tests.support.client import ask, until
from tests.support.engine import FakeEngine, engines, reply, stream
from tests.support.serving import Served, serving
from tests.support.shapes import CHAT
from tests.support.spans import Recorder

NAMES = {
    "dualgauge_requests": {"dialect", "tier", "rule", "outcome"},
    "dualgauge_time_to_first_token_seconds": {"tier"},
    "dualgauge_inter_token_seconds": {"tier"},
    "dualgauge_request_seconds": {"dialect", "tier"},
    "dualgauge_overhead_seconds": set(),
    "dualgauge_decision_seconds": set(),
    "dualgauge_tokens": {"tier", "kind"},
    "dualgauge_store_up": set(),
    "dualgauge_store_fallback": set(),
    "dualgauge_leases": set(),
    "dualgauge_in_flight": {"tier"},
    "dualgauge_engine_state": {"engine", "state"},
    "dualgauge_engine_info": {"engine", "tier", "precision"},
    "dualgauge_engine_running": {"engine"},
    "dualgauge_engine_waiting": {"engine"},
    "dualgauge_policy_info": {"hash"},
    "dualgauge_config_info": {"hash"},
    "dualgauge_spans_sent": set(),
    "dualgauge_spans_dropped": set(),
    "dualgauge_access_log_dropped": set(),
    "dualgauge_file_refused": {"file"},
    "dualgauge_tenant_requests": {"tenant", "tier", "outcome"},
    "dualgauge_tenant_request_seconds": {"tenant"},
    "dualgauge_tenant_tokens": {"tenant", "tier", "kind"},
    "dualgauge_loop_lag_seconds": set(),
    "dualgauge_shadow_failures": set(),
    "dualgauge_decision_log_dropped": set(),
}
# Without a series until the first of their kind happens.
RARE = {
    "dualgauge_degraded",
    "dualgauge_limited",
    "dualgauge_queue_seconds",
    "dualgauge_reload_failures",
    "dualgauge_retries",
    "dualgauge_shadow_decisions",
    "dualgauge_shadow_rollout",
    "dualgauge_tenant_degraded",
    "dualgauge_tenant_limited",
    "dualgauge_engine_kv_usage",
    "dualgauge_engine_preemptions",
}
DEGRADES = """
version: 1
rules: [{name: best, send: exact, if_unavailable: degrade}]
"""


def families(served: Served) -> dict[str, list[tuple[str, dict[str, str], float]]]:
    text = served.metrics().decode()
    return {
        family.name: [(s.name, dict(s.labels), s.value) for s in family.samples]
        for family in text_string_to_metric_families(text)
    }


def intervals(served: Served) -> float:
    found = families(served)["dualgauge_inter_token_seconds"]
    return sum(value for name, _, value in found if name.endswith("_count"))


async def test_every_metric_has_its_name_and_labels(tmp_path: Path) -> None:
    engine = FakeEngine(stream(CHAT.stream))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        await ask(served.port, CHAT.path, CHAT.ask(stream=True))
        await until(lambda: served.clean)
        found = families(served)
        assert found.keys() == NAMES.keys() | RARE
        for name, labels in NAMES.items():
            assert {k for _, own, _ in found[name] for k in own if k != "le"} == labels, name
        assert found["dualgauge_store_up"] == [("dualgauge_store_up", {}, 1.0)]
        assert found["dualgauge_store_fallback"] == [("dualgauge_store_fallback_total", {}, 0.0)]


async def test_the_intervals_of_a_stream_are_observed(tmp_path: Path) -> None:
    parts = [b'data: {"choices":[{"index":0,"delta":{"content":"%d"}}]}\n\n' % n for n in range(4)]
    engine = FakeEngine(stream(*parts, between=0.05))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        await ask(served.port, CHAT.path, CHAT.ask(stream=True))
        assert intervals(served) == 3
        total = [v for n, _, v in families(served)["dualgauge_inter_token_seconds"] if n.endswith("_sum")]
        assert sum(total) >= 0.14


async def test_a_part_of_an_event_is_no_beat(tmp_path: Path) -> None:
    engine = FakeEngine(stream(b'data: {"a":', b"1}", b"\n\n", b"data: [DONE]\n\n", between=0.02))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        await ask(served.port, CHAT.path, CHAT.ask(stream=True))
        assert intervals(served) == 1


async def test_a_whole_reply_has_no_intervals(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        await ask(served.port, CHAT.path, CHAT.ask())
        assert intervals(served) == 0


def test_a_pace_begins_with_its_second_beat() -> None:
    buckets, moments = Buckets((1.0, 2.0)), iter([0.0, 0.5, 2.0])
    beat = pace(buckets, lambda: next(moments))
    for _ in range(3):
        beat()
    assert buckets.counts == [1, 1, 0]
    assert buckets.sum == 2.0


async def test_a_blocked_loop_is_seen() -> None:
    seen: list[float] = []
    task = asyncio.create_task(watch_lag(seen.append, time.monotonic))
    await asyncio.sleep(0)
    time.sleep(EVERY_SECONDS + 0.2)  # the fault that is to be seen
    await until(lambda: bool(seen))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen[0] >= 0.19


async def test_a_span_says_why_its_answer_moved(tmp_path: Path) -> None:
    recorder = Recorder.make(sample=1)
    engine = FakeEngine(reply(CHAT.reply))
    tiers: dict[str, FakeEngine | str] = {"fast": engine, "exact": "http://127.0.0.1:9"}
    async with (
        engines(engine),
        serving(tmp_path, tiers, policy=DEGRADES, tracer=recorder.tracer, wait=False) as served,
    ):
        served.mark("fast-0", "ready")
        answer = await ask(served.port, CHAT.path, CHAT.ask())
        assert answer.headers["x-dualgauge-reason"] == "unavailable (degrade)"
        attributes = recorder.server().attributes
        assert attributes is not None
        assert attributes["dualgauge.reason"] == "no rule before it held; unavailable (degrade)"
