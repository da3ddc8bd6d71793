"""Metrics: every end is counted, and no series is made of what a client sends."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from gateway import snapshots
from gateway.snapshots import reload
from gateway.telemetry.metrics import MOST_TENANTS, OTHER_TENANTS
from tests.support.client import LOOP_TICK, Wire, ask, get, until
from tests.support.engine import FakeEngine, engines, hang, reply, reset, stream
from tests.support.serving import Served, deployment, serving
from tests.support.shapes import CHAT, IDS, SHAPES, Shape, check_error
from tests.support.spans import Recorder

POLICY = """
version: 1
rules: [{name: all, send: fast, if_unavailable: fail}]
plans: {default: {requests: 10k/day}, little: {requests: 1/day}}
"""


def samples(served: Served) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = served.metrics().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(served: Served, name: str, **labels: str) -> float:
    return samples(served).get((name, frozenset(labels.items())), 0.0)


async def test_c28_random_model_names_make_no_series(tmp_path: Path) -> None:
    rand = random.Random(28)

    async def lane(port: int, count: int) -> None:
        async with await Wire.open(port) as wire:
            for _ in range(count):
                wire.send(CHAT.path, CHAT.ask(model=f"model-{rand.getrandbits(64):x}"))
                assert (await wire.reply()).status == 404

    async with serving(tmp_path, {"fast": "http://127.0.0.1:9"}, wait=False) as served:
        await lane(served.port, 1)
        before = samples(served).keys()
        await asyncio.gather(*(lane(served.port, 2500) for _ in range(4)))
        assert samples(served).keys() == before
        counted = value(
            served,
            "dualgauge_requests_total",
            dialect="openai.chat",
            tier="none",
            rule="none",
            outcome="client_error",
        )
        assert counted == 10_001


async def test_other_things_that_clients_send_make_no_series(tmp_path: Path) -> None:
    keys = "keys: [{name: ci, key: sk-a}]"
    async with serving(tmp_path, {"fast": "http://127.0.0.1:9"}, wait=False, keys=keys) as served:

        async def odd(number: int) -> None:
            name = f"x{number}"
            await get(served.port, f"/{name}")
            await get(served.port, f"/v1/models/{name}", {"x-api-key": "sk-a"})
            await get(served.port, f"/v1/responses/{name}", {"x-api-key": "sk-a"})
            await ask(served.port, CHAT.path, {}, method="PUT")
            await ask(served.port, CHAT.path, {}, headers={"x-api-key": name})
            await ask(served.port, CHAT.path, {name: 1}, headers={"x-api-key": "sk-a", name: name})

        await odd(0)
        before = samples(served).keys()
        for number in range(1, 20):
            await odd(number)
        assert samples(served).keys() == before


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        (reply(CHAT.reply), "ok"),
        (reply({}, 400), "client_error"),
        (reply({}, 500), "engine_error"),
        (reply({}, 401), "engine_error"),
        (reply(b"null"), "engine_error"),
        (reset, "engine_error"),
        (stream(b"data: {}\n\n", end="reset"), "engine_error"),
        (reply({}, 503), "unavailable"),
        (hang, "timeout"),
    ],
    ids=["ok", "400", "500", "401", "null", "reset", "broken stream", "503", "hang"],
)
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_every_end_is_counted_once(tmp_path: Path, shape: Shape, script: Any, outcome: str) -> None:
    engine = FakeEngine(script)
    limits = {"first_byte": "50ms"}
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}, policy=POLICY, timeouts=limits) as served,
    ):
        await ask(served.port, shape.path, shape.ask())
        await until(lambda: served.clean)
        counted = {
            (dict(labels)["dialect"], dict(labels)["rule"], dict(labels)["outcome"]): count
            for (name, labels), count in samples(served).items()
            if name == "dualgauge_requests_total"
        }
        assert counted == {(shape.dialect.name, "all", outcome): 1}
        seconds = [v for (name, _), v in samples(served).items() if name == "dualgauge_request_seconds_count"]
        assert seconds == [1]


async def test_a_limited_request_is_counted_by_its_kind(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    keys = "keys: [{name: a, key: sk-a, plan: little}]"
    async with engines(engine), serving(tmp_path, {"fast": engine}, policy=POLICY, keys=keys) as served:
        for _ in range(3):
            answer = await ask(served.port, CHAT.path, CHAT.ask(), headers={"x-api-key": "sk-a"})
        check_error(answer, 429)
        assert value(served, "dualgauge_limited_total", kind="requests") == 2


LIMITS = """
version: 1
rules: [{{name: all, send: fast, if_unavailable: fail}}]
plans: {{default: {{{}}}}}
"""


@pytest.mark.parametrize(
    ("limit", "kind"),
    [
        ("requests: 1/day", "requests"),
        ("tokens: 400/day", "tokens"),
        ("fast_tokens: 400/day", "fast_tokens"),
        ("concurrent: 1", "concurrent"),
    ],
)
async def test_which_limit_refused(tmp_path: Path, limit: str, kind: str) -> None:
    engine = FakeEngine(hang)
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}, policy=LIMITS.format(limit)) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.send(CHAT.path, CHAT.ask(max_tokens=300))
        await until(lambda: engine.generations == 1)
        assert (await ask(served.port, CHAT.path, CHAT.ask(max_tokens=300))).status == 429
        assert value(served, "dualgauge_limited_total", kind=kind) == 1


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nope", 404), ("POST", "/healthz", 405)])
async def test_requests_for_nothing_are_counted(tmp_path: Path, method: str, path: str, status: int) -> None:
    async with serving(tmp_path, {"fast": "http://127.0.0.1:9"}, wait=False) as served:
        assert (await ask(served.port, path, method=method)).status == status
        for probe in ("/healthz", "/readyz"):
            await get(served.port, probe)
        labels = {"dialect": "none", "tier": "none", "rule": "none"}
        assert value(served, "dualgauge_requests_total", **labels, outcome="client_error") == 1
        assert value(served, "dualgauge_requests_total", **labels, outcome="ok") == 0


async def test_tokens_and_times_of_a_stream(tmp_path: Path) -> None:
    engine = FakeEngine(stream(CHAT.stream, first=0.06))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        await ask(served.port, CHAT.path, CHAT.ask(stream=True))
        usage = CHAT.stream_usage
        assert value(served, "dualgauge_tokens_total", tier="fast", kind="prompt") == usage.prompt
        assert value(served, "dualgauge_tokens_total", tier="fast", kind="completion") == usage.completion
        assert value(served, "dualgauge_time_to_first_token_seconds_count", tier="fast") == 1
        assert value(served, "dualgauge_time_to_first_token_seconds_sum", tier="fast") >= 0.06 - LOOP_TICK
        # Only the fast path from the body's last byte to the engine counts as overhead.
        assert value(served, "dualgauge_overhead_seconds_count") == 1
        assert value(served, "dualgauge_overhead_seconds_sum") < 0.06
        assert value(served, "dualgauge_decision_seconds_count") == 1


async def test_a_whole_reply_has_no_first_token_time(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        await ask(served.port, CHAT.path, CHAT.ask())
        assert value(served, "dualgauge_time_to_first_token_seconds_count", tier="fast") == 0


async def test_gauges_show_what_is_now(tmp_path: Path) -> None:
    engine = FakeEngine(hang)
    engine.metrics = (
        b"vllm:num_requests_running 5\nvllm:num_requests_waiting 2\nvllm:kv_cache_usage_perc 0.5\n"
        b"vllm:num_preemptions_total 3\n"
    )
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.send(CHAT.path, CHAT.ask())
        await until(lambda: engine.generations == 1)
        assert value(served, "dualgauge_in_flight", tier="fast") == 1
        assert value(served, "dualgauge_leases") == 1
        await until(lambda: served.engine("fast-0").sampled_at is not None)
        assert value(served, "dualgauge_engine_running", engine="fast-0") == 5
        assert value(served, "dualgauge_engine_waiting", engine="fast-0") == 2
        assert value(served, "dualgauge_engine_kv_usage", engine="fast-0") == 0.5
        assert value(served, "dualgauge_engine_state", engine="fast-0", state="ready") == 1
        assert value(served, "dualgauge_engine_state", engine="fast-0", state="down") == 0
        assert value(served, "dualgauge_engine_preemptions_total", engine="fast-0") == 3
        wire.leave()
        await until(lambda: value(served, "dualgauge_in_flight", tier="fast") == 0)
        assert value(served, "dualgauge_leases") == 0


async def test_no_name_collides_with_an_engines(tmp_path: Path) -> None:
    async with serving(tmp_path, {"fast": "http://127.0.0.1:9"}, wait=False) as served:
        assert all(name.startswith("dualgauge_") for name, _ in samples(served))


async def test_an_engine_that_sleeps_is_seen(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.metrics = b'vllm:num_requests_running 0\nvllm:engine_sleep_state{sleep_state="awake"} 0\n'
    async with engines(engine), serving(tmp_path, {"fast": engine}, wait=False) as served:
        await until(lambda: value(served, "dualgauge_engine_state", engine="fast-0", state="asleep") == 1)


OPENMETRICS = "application/openmetrics-text; version=1.0.0"


async def test_a_traced_request_is_an_exemplar_in_openmetrics(tmp_path: Path) -> None:
    recorder = Recorder.make(sample=1)
    engine = FakeEngine(stream(CHAT.stream))
    async with engines(engine), serving(tmp_path, {"fast": engine}, tracer=recorder.tracer) as served:
        await ask(served.port, CHAT.path, CHAT.ask(stream=True))
        answer = await get(served.admin, "/metrics", {"accept": OPENMETRICS})
        assert answer.headers["content-type"].startswith(OPENMETRICS)
        context = recorder.server().context
        assert context is not None
        shown = {
            family.name: sample.exemplar.labels["trace_id"]
            for family in openmetrics.text_string_to_metric_families(answer.body.decode())
            for sample in family.samples
            if sample.exemplar
        }
        traced = f"{context.trace_id:032x}"
        assert shown == {
            "dualgauge_request_seconds": traced,
            "dualgauge_time_to_first_token_seconds": traced,
        }


async def test_an_unsampled_request_is_no_exemplar(tmp_path: Path) -> None:
    recorder = Recorder.make(sample=0)
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}, tracer=recorder.tracer) as served:
        await ask(served.port, CHAT.path, CHAT.ask())
        assert b"trace_id" not in (await get(served.admin, "/metrics", {"accept": OPENMETRICS})).body


async def test_a_scraper_that_asks_for_nothing_gets_plain_text(tmp_path: Path) -> None:
    async with serving(tmp_path, {"fast": "http://127.0.0.1:9"}, wait=False) as served:
        answer = await get(served.admin, "/metrics")
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert answer.body == served.metrics()


async def test_a_mistake_in_the_deployment_file_is_seen_before_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "FILE_POLL_SECONDS", 0.02)
    file = tmp_path / "dualgauge.yaml"
    async with serving(tmp_path, {"fast": "http://127.0.0.1:9"}, wait=False) as served:
        await get(served.port, "/healthz")  # by now the file is watched
        file.write_text("model: [")
        await until(lambda: value(served, "dualgauge_file_refused", file="config") == 1)
        assert value(served, "dualgauge_reload_failures_total", file="config") == 1
        assert value(served, "dualgauge_config_info", hash=served.gateway.config.hash) == 1
        file.write_text(json.dumps(deployment({"fast": "http://127.0.0.1:9"})))
        await until(lambda: value(served, "dualgauge_file_refused", file="config") == 0)


async def test_histograms_are_well_formed(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        for _ in range(5):
            await ask(served.port, CHAT.path, CHAT.ask())
        series: dict[tuple[str, frozenset[tuple[str, str]]], list[tuple[float, float]]] = {}
        for (name, labels), count in samples(served).items():
            if name.endswith("_bucket"):
                bound = float(dict(labels)["le"])
                rest = frozenset(pair for pair in labels if pair[0] != "le")
                series.setdefault((name.removesuffix("_bucket"), rest), []).append((bound, count))
        assert series
        for (name, labels), buckets in series.items():
            counts = [count for _, count in sorted(buckets)]
            assert counts == sorted(counts)
            assert max(buckets) == (float("inf"), samples(served)[name + "_count", labels])


async def test_tenants_are_counted_by_their_keys_names(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    keys = "keys: [{name: a, key: sk-a}, {name: b, key: sk-b, plan: little}]"
    async with engines(engine), serving(tmp_path, {"fast": engine}, policy=POLICY, keys=keys) as served:
        for key in ("sk-a", "sk-a", "sk-b", "sk-b", "sk-unknown"):
            await ask(served.port, CHAT.path, CHAT.ask(), headers={"x-api-key": key})
        counted = {
            (dict(labels)["tenant"], dict(labels)["tier"], dict(labels)["outcome"]): count
            for (name, labels), count in samples(served).items()
            if name == "dualgauge_tenant_requests_total"
        }
        assert counted == {("a", "fast", "ok"): 2, ("b", "fast", "ok"): 1, ("b", "none", "limited"): 1}
        prompt = value(served, "dualgauge_tenant_tokens_total", tenant="a", tier="fast", kind="prompt")
        assert prompt == 2 * CHAT.reply_usage.prompt
        assert value(served, "dualgauge_tenant_request_seconds_total", tenant="a") > 0
        limited = value(served, "dualgauge_tenant_limited_total", tenant="b", kind="requests")
        assert limited == 1


async def test_tenants_beyond_the_bound_share_one_label(tmp_path: Path) -> None:
    count = MOST_TENANTS + 5
    keys = "keys:\n" + "".join(f"  - {{name: key-{n}, key: sk-{n}}}\n" for n in range(count))
    async with serving(tmp_path, {"fast": "http://127.0.0.1:9"}, wait=False, keys=keys) as served:
        async with await Wire.open(served.port) as wire:
            for number in range(count):
                wire.send(CHAT.path, CHAT.ask(), headers={"x-api-key": f"sk-{number}"})
                await wire.reply()
        counted = {
            dict(labels)["tenant"]: count
            for (name, labels), count in samples(served).items()
            if name == "dualgauge_tenant_requests_total"
        }
        assert len(counted) == MOST_TENANTS + 1
        assert counted[OTHER_TENANTS] == 5


async def test_a_refused_file_shows_until_it_is_mended(tmp_path: Path) -> None:
    async with serving(tmp_path, {"fast": "http://127.0.0.1:9"}, wait=False) as served:
        policy = (tmp_path / "policy.yaml").read_text()
        assert value(served, "dualgauge_file_refused", file="policy") == 0
        (tmp_path / "policy.yaml").write_text("version: 2")
        reload(served.gateway)
        assert value(served, "dualgauge_file_refused", file="policy") == 1
        assert value(served, "dualgauge_reload_failures_total", file="policy") == 1
        (tmp_path / "policy.yaml").write_text(policy)
        reload(served.gateway)
        assert value(served, "dualgauge_file_refused", file="policy") == 0
        assert value(served, "dualgauge_reload_failures_total", file="policy") == 1


async def test_a_store_of_limits_that_is_down_makes_requests_unavailable(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    limits = {"store": "redis://127.0.0.1:9/0", "on_store_failure": "closed"}
    async with engines(engine), serving(tmp_path, {"fast": engine}, policy=POLICY, limits=limits) as served:
        assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 503
        labels = {"dialect": "openai.chat", "tier": "none", "rule": "all"}
        assert value(served, "dualgauge_requests_total", **labels, outcome="unavailable") == 1
        assert value(served, "dualgauge_store_up") == 0
