"""How an engine's state follows probes and requests."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from engines.fleet import Fleet
from engines.health import Figures, Schedule, Watch, read_figures
from engines.spec import EngineSpec
from tests.support.client import ask, until
from tests.support.engine import FakeEngine, close, engines, hang, reply, reset
from tests.support.serving import serving
from tests.support.shapes import CHAT, check_error

OFTEN = {"every": "20ms", "down_after": 3, "up_after": 1}
VLLM = b"""# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="a"} 3.0
vllm:num_requests_running{engine="1",model_name="a"} 1.0
vllm:num_requests_waiting{engine="0",model_name="a"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="a",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="a"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a"} 0.125
vllm:num_preemptions_total{engine="0",model_name="a"} 5.0
vllm:num_preemptions_created{engine="0",model_name="a"} 1.7e9
"""
COUNTERS = b"""vllm:generation_tokens_total{engine="0",model_name="a"} %d.0
vllm:prompt_tokens_total{engine="0",model_name="a"} 40.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="a"} %d.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="a"} 0.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="a"} 1.5
vllm:request_prefill_kv_computed_tokens_sum{engine="0",model_name="a"} 30.0
"""
SLEEP = """vllm:num_requests_running 0
vllm:engine_sleep_state{engine="0",model_name="a",sleep_state="awake"} %d
vllm:engine_sleep_state{engine="0",model_name="a",sleep_state="weights_offloaded"} %d
"""
ASLEEP, AWAKE = (SLEEP % (0, 1)).encode(), (SLEEP % (1, 0)).encode()


class Answers:
    """What an engine answers to its probes, one after the other; the last one for ever."""

    def __init__(self, *health: int | Exception, metrics: bytes | int | Exception = VLLM) -> None:
        self.health = list(health)
        self.metrics = metrics

    async def __call__(self, spec: EngineSpec, path: str, seconds: float) -> tuple[int, bytes]:
        answer = self.metrics
        if path == "/health":
            answer = self.health.pop(0) if len(self.health) > 1 else self.health[0]
        if isinstance(answer, Exception):
            raise answer
        return (200, answer) if isinstance(answer, bytes) else (answer, b"")


def fleet() -> Fleet:
    return Fleet([EngineSpec("e", "fast", "external", "http://h:1", "m", "awq")], ["fast"])


def states(answers: Answers, probes: int, *, down_after: int = 3, up_after: int = 1) -> list[str]:
    some = fleet()
    watch = Watch(some, answers, Schedule(1, down_after, up_after), lambda: 7.0)

    async def run() -> list[str]:
        seen = []
        for _ in range(probes):
            await watch.probe(some.engines[0])
            seen.append(some.engines[0].state)
        return seen

    return asyncio.run(run())


REFUSED = ConnectionRefusedError("refused")


@pytest.mark.parametrize(
    ("health", "expected"),
    [
        ([200], ["ready", "ready"]),
        ([503, 503, 503, 503, 200], ["starting"] * 4 + ["ready"]),
        ([REFUSED, TimeoutError(), 200], ["starting", "starting", "ready"]),
        ([200, 503, 200], ["ready", "ready", "ready"]),
        ([200, 503, REFUSED, 503, 503], ["ready", "ready", "ready", "down", "down"]),
        ([200, 503, 503, 200, 503, 503, 200], ["ready"] * 7),
        ([200, 503, 503, 503, 200], ["ready", "ready", "ready", "down", "ready"]),
    ],
)
def test_probes_turn_an_engine_down_after_three_and_up_after_one(
    health: list[int | Exception], expected: list[str]
) -> None:
    assert states(Answers(*health), len(expected)) == expected


def test_up_after_counts_in_a_row() -> None:
    health = Answers(200, 503, 200, 200)
    assert states(health, 4, up_after=2) == ["starting", "starting", "starting", "ready"]


def test_a_suspect_engine_is_ready_again_after_a_good_probe_and_down_after_bad_ones() -> None:
    some = fleet()
    engine = some.engines[0]
    answers = Answers(200)
    watch = Watch(some, answers, Schedule(1, 3, 1), lambda: 7.0)
    asyncio.run(watch.probe(engine))
    some.failed(engine, "broke off")
    assert (engine.state, engine.reason) == ("suspect", "broke off")
    asyncio.run(watch.probe(engine))
    assert engine.state == "ready"
    some.failed(engine, "broke off")
    answers.health = [503]
    asyncio.run(watch.probe(engine))
    assert engine.state == "suspect"
    asyncio.run(watch.probe(engine))
    assert engine.state == "down"


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        (VLLM, Figures("vllm", 4, 2, 0.25, 5, False)),
        (
            VLLM + COUNTERS % (90, 7),
            Figures("vllm", 4, 2, 0.25, 5, False, (90.0, 40.0, 0.25), 7.0, 1.5, 30.0),
        ),
        (
            b"llamacpp:requests_processing 2\nllamacpp:n_decode_total 9\nllamacpp:prompt_tokens_total 4\n",
            Figures("llama.cpp", 2, 0, None, pulse=(4.0, 9.0, 0.0)),
        ),
        (
            b"llamacpp:requests_processing 2\nllamacpp:requests_deferred 1\n",
            Figures("llama.cpp", 2, 1, None, None, False),
        ),
        (
            b"llamacpp:requests_processing 2\nllamacpp:kv_cache_usage_ratio 0.5\n",
            Figures("llama.cpp", 2, 0, 0.5, None, False),
        ),
        (
            b"vllm:num_requests_running 1\nvllm:gpu_cache_usage_perc 0.5\n",
            Figures("vllm", 1, 0, 0.5, None, False),
        ),
        (b"vllm:num_requests_running NaN\nvllm:num_requests_waiting +Inf\n", None),
        (
            b"vllm:num_requests_running 2\nvllm:num_requests_waiting NaN\n",
            Figures("vllm", 2, 0, None, None, False),
        ),
        (ASLEEP, Figures("vllm", 0, 0, None, None, True)),
        (AWAKE, Figures("vllm", 0, 0, None, None, False)),
        (ASLEEP + AWAKE, Figures("vllm", 0, 0, None, None, False)),
        (b"vllm:num_requests_running\nvllm:num_requests_running x\n", None),
        (b"process_cpu_seconds_total 1\n", None),
        (b"", None),
        (b"\xff\xfe", None),
    ],
)
def test_figures_of_an_engine(text: bytes, figures: Figures | None) -> None:
    assert read_figures(text) == figures


def test_an_engine_that_sleeps_takes_no_request_until_it_is_awake() -> None:
    some = fleet()
    engine = some.engines[0]
    answers = Answers(200, metrics=ASLEEP)
    watch = Watch(some, answers, Schedule(), lambda: 7.0)
    asyncio.run(watch.probe(engine))
    assert (engine.state, some.pick("fast")) == ("asleep", None)
    answers.metrics = AWAKE
    asyncio.run(watch.probe(engine))
    assert (engine.state, some.pick("fast")) == ("ready", engine)


@pytest.mark.parametrize(
    "metrics", [404, b"", b"nothing of ours", TimeoutError(), ConnectionResetError()], ids=str
)
def test_figures_are_forgotten_where_no_new_ones_come(metrics: bytes | int | Exception) -> None:
    some = fleet()
    engine = some.engines[0]
    answers = Answers(200)
    watch = Watch(some, answers, Schedule(), lambda: 7.0)
    asyncio.run(watch.probe(engine))
    assert (engine.running, engine.waiting, engine.kv, engine.sampled_at) == (4, 2, 0.25, 7.0)
    answers.metrics = metrics
    asyncio.run(watch.probe(engine))
    assert engine.state == "ready"
    assert (engine.running, engine.waiting, engine.kv, engine.sampled_at) == (0, 0, None, None)


class Probed:
    """One engine of several, with a clock of its own and figures that a test sets."""

    def __init__(self, *, up_after: int = 1) -> None:
        specs = [EngineSpec(name, "fast", "external", "http://h:1", "m", "awq") for name in ("e", "other")]
        self.fleet = Fleet(specs, ["fast"])
        self.engine, self.other = self.fleet.engines
        self.fleet.set_state(self.other, "ready", "the test says so")
        self.now = 0.0
        self.answers = Answers(200)
        self.watch = Watch(self.fleet, self.answers, Schedule(2, 3, up_after, 30), lambda: self.now)

    def probe(
        self, seconds: float, tokens: int | None, running: int = 1, waiting: int = 0, kv: float = 0.25
    ) -> str:
        """Figures after so many seconds; None: `/metrics` is waited for in vain."""
        self.now += seconds
        gauges = b"vllm:num_requests_running %d\nvllm:num_requests_waiting %d\n" % (running, waiting)
        cache = b"vllm:kv_cache_usage_perc %f\n" % kv
        self.answers.metrics = TimeoutError() if tokens is None else gauges + cache + COUNTERS % (tokens, 0)
        asyncio.run(self.watch.probe(self.engine))
        return self.engine.state


def test_c31_an_engine_that_has_requests_and_makes_no_token_is_suspect() -> None:
    some = Probed()
    assert [some.probe(seconds, 5) for seconds in (0, 10, 10, 9)] == ["ready"] * 4
    assert some.probe(2, 5) == "suspect"
    assert some.engine.reason == "no new token for 31 s with 1 requests"
    assert {some.fleet.pick("fast") for _ in range(20)} == {some.other}
    assert [some.probe(60, 5) for _ in range(40)] == ["suspect"] * 40
    assert some.fleet.pick("fast") is some.other


def test_one_that_makes_tokens_again_is_ready_again() -> None:
    some = Probed(up_after=2)
    for seconds in (0, 2, 31):
        some.probe(seconds, 5)
    assert [some.probe(2, tokens) for tokens in (6, 7)] == ["suspect", "ready"]
    assert some.probe(29, 7) == "ready"


def test_one_that_lost_its_requests_is_tried_with_one() -> None:
    some = Probed()
    for seconds in (0, 31):
        some.probe(seconds, 5)
    assert some.fleet.pick("fast") is some.other
    assert some.probe(2, 5, running=0) == "suspect"
    assert some.fleet.pick("fast") is some.engine
    some.engine.breaker.trial = "a request"
    assert some.fleet.pick("fast") is some.other
    some.fleet.succeeded(some.engine)
    assert some.engine.state == "ready"


def test_the_trial_of_one_that_still_hangs_ends_in_suspicion() -> None:
    some = Probed()
    for seconds in (0, 31):
        some.probe(seconds, 5)
    some.probe(2, 5, running=0)
    some.probe(2, 5, running=1)
    assert some.probe(31, 5, running=1) == "suspect"
    some.fleet.faulted(some.engine, "timeout")
    some.probe(2, 5, running=0)
    assert some.fleet.pick("fast") is some.other
    some.probe(2, 5, running=0)
    assert some.fleet.pick("fast") is some.engine


@pytest.mark.parametrize(
    "figures",
    [{"running": 0}, {"tokens": 6}, {"kv": 0.26}, {"running": 0, "waiting": 0, "kv": 0.1}],
    ids=str,
)
def test_what_is_no_stall(figures: dict[str, Any]) -> None:
    """Nothing to do; tokens; a long prompt that is computed chunk by chunk."""
    some = Probed()
    some.probe(0, 5)
    some.probe(20, **{"tokens": 5, **figures})
    assert some.probe(20, **{"tokens": 5, **figures}) == "ready"


def test_a_queue_that_nothing_leaves_is_a_stall() -> None:
    some = Probed()
    some.probe(0, 5, running=0, waiting=3)
    assert some.probe(31, 5, running=0, waiting=3) == "suspect"


def test_figures_that_are_waited_for_in_vain_are_no_progress() -> None:
    some = Probed()
    some.probe(0, 5)
    some.engine.in_flight = 2
    assert some.probe(20, None) == "ready"
    assert some.probe(20, None) == "suspect"
    assert some.engine.reason == "no new token for 40 s with 2 requests"


def test_an_idle_engine_may_be_slow_to_tell_its_figures() -> None:
    some = Probed()
    some.probe(0, 5)
    assert [some.probe(20, None) for _ in range(4)] == ["ready"] * 4


def test_an_engine_without_counters_is_never_called_stalled() -> None:
    some = Probed()
    for _ in range(5):
        some.now += 60
        asyncio.run(some.watch.probe(some.engine))
    assert (some.engine.state, some.engine.running) == ("ready", 4)


def test_what_failed_requests_needs_good_probes_before_it_is_tried() -> None:
    some = Probed()
    some.probe(0, 5)
    for _ in range(3):
        some.fleet.faulted(some.engine, "500")
    assert {some.fleet.pick("fast") for _ in range(20)} == {some.other}
    assert some.probe(2, 6) == "suspect"
    assert some.fleet.pick("fast") is some.engine


def test_an_engine_that_went_down_comes_back_without_a_trial() -> None:
    some = Probed()
    some.probe(0, 5)
    for _ in range(3):
        some.fleet.faulted(some.engine, "500")
    some.answers.health = [503]
    assert [some.probe(2, 5) for _ in range(3)] == ["suspect", "suspect", "down"]
    some.answers.health = [200]
    assert some.probe(2, 0) == "ready"
    assert not some.engine.breaker.open


def test_rates_are_read_from_the_counters() -> None:
    some = Probed()
    told = b"vllm:num_requests_running 1\nvllm:request_success_total %d\n"
    told += b"vllm:request_prefill_time_seconds_sum %f\nvllm:request_prefill_kv_computed_tokens_sum %d\n"
    for figures in ((0, 0.0, 0), (4, 1.0, 1000), (4, 1.0, 1000), (2, 0.5, 100)):
        some.answers.metrics = told % figures
        asyncio.run(some.watch.probe(some.engine))
        some.now += 2
    progress = some.engine.progress
    assert progress.finishing.value == pytest.approx(1.0, rel=0.05)  # 4 in 4 s; then it began anew
    assert progress.prefill.value == pytest.approx(0.001)


async def test_an_engine_that_could_not_be_reached_is_asked_at_once() -> None:
    some = fleet()
    watch = Watch(some, Answers(200), Schedule(3600), lambda: 7.0)
    task = asyncio.create_task(watch.run())
    await until(lambda: some.engines[0].ready)
    some.failed(some.engines[0], "a moment's trouble")
    assert some.engines[0].state == "suspect"
    await until(lambda: some.engines[0].ready)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not some.doubters


async def test_a_probe_that_fails_in_its_own_way_does_not_end_the_watch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    some = fleet()
    watch = Watch(some, Answers(ZeroDivisionError("odd"), 200), Schedule(0.001), lambda: 7.0)
    task = asyncio.create_task(watch.run())
    with caplog.at_level(logging.ERROR):
        await until(lambda: some.engines[0].ready)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert "the probe of engine e failed" in caplog.text


async def test_an_engine_that_goes_and_comes_back(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}, health=OFTEN) as served:
        await engine.stop()
        await until(lambda: served.engine("fast-0").state == "down")
        check_error(await ask(served.port, CHAT.path, CHAT.ask()), 503)
        await engine.start()
        await until(lambda: served.engine("fast-0").state == "ready")
        assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 200
        assert b'dualgauge_engine_state{engine="fast-0",state="ready"} 1.0' in served.metrics()


async def test_one_flapping_probe_does_not_remove_an_engine(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}, health=OFTEN) as served:
        seen: set[str] = set()
        healthy, engine.health_script = engine.health_script, reply({}, 503)
        probes = len(engine.probes)
        await until(lambda: len(engine.probes) > probes)
        engine.health_script = healthy
        probes = len(engine.probes)
        while len(engine.probes) < probes + 4:
            seen.add(served.engine("fast-0").state)
            assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 200
        assert seen == {"ready"}


async def test_the_only_engine_is_not_left_for_long(tmp_path: Path) -> None:
    """What a request met makes it suspect until the next probe."""
    engine = FakeEngine(reset)
    async with engines(engine), serving(tmp_path, {"fast": engine}, health=OFTEN) as served:
        assert (await ask(served.port, CHAT.path, CHAT.ask())).status in (502, 503)
        engine.script = reply(CHAT.reply)
        await until(lambda: served.engine("fast-0").state == "ready")
        assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 200


async def test_client_errors_do_not_count_against_an_engine(tmp_path: Path) -> None:
    engine = FakeEngine(reply({"error": {"message": "no"}}, 400))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        for _ in range(10):
            assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 400
        assert (served.engine("fast-0").state, served.engine("fast-0").failures) == ("ready", 0)


@pytest.mark.parametrize("script", [hang, reset, close, reply({}, 500), reply(b"x" * (9 << 20))])
async def test_a_probe_of_an_odd_engine_leaves_no_connection(tmp_path: Path, script: object) -> None:
    engine = FakeEngine()
    engine.health_script = script  # type: ignore[assignment]
    async with engines(engine), serving(tmp_path, {"fast": engine}, health=OFTEN, wait=False) as served:
        await until(lambda: len(engine.probes) >= 1)
        pool = served.gateway.upstreams["fast-0"].pool
        if script is not hang:
            await until(lambda: len(engine.probes) >= 3)
        assert served.engine("fast-0").state == "starting"
        assert len(pool.lent) <= 1
    await until(lambda: not engine.open)


STALLED = {"every": "20ms", "down_after": 3, "stalled_after": "100ms"}
HUNG = b"vllm:num_requests_running %d\n" + COUNTERS % (5, 0)
CRITICAL = {"x-criticality": "high"}


async def test_c31_traffic_leaves_an_engine_that_hangs_behind_a_good_health(tmp_path: Path) -> None:
    hung, well, fast = FakeEngine(hang), FakeEngine(reply(CHAT.reply)), FakeEngine(reply(CHAT.reply))
    hung.metrics = HUNG % 1
    tiers = {"fast": fast, "exact": [hung, well]}
    async with engines(hung, well, fast), serving(tmp_path, tiers, health=STALLED) as served:
        engine = served.engine("exact-0")
        asking = [
            asyncio.create_task(ask(served.port, CHAT.path, CHAT.ask(), headers=CRITICAL)) for _ in range(3)
        ]
        await until(lambda: engine.state == "suspect")
        assert "no new token" in engine.reason
        probes, asked = len(hung.probes), hung.generations
        for _ in range(20):
            answer = await ask(served.port, CHAT.path, CHAT.ask(), headers=CRITICAL)
            assert answer.headers["x-dualgauge-engine"] == "exact-1"
        await until(lambda: len(hung.probes) > probes + 6)
        assert (engine.state, hung.generations) == ("suspect", asked)
        hung.metrics = (b"vllm:num_requests_running 1\n") + COUNTERS % (6, 1)
        await until(lambda: engine.state == "ready")
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await until(lambda: served.clean)
        assert fast.generations == 0


async def test_a_critical_request_is_refused_where_the_only_exact_engine_hangs(tmp_path: Path) -> None:
    hung, fast = FakeEngine(hang), FakeEngine(reply(CHAT.reply))
    hung.metrics = HUNG % 1
    async with (
        engines(hung, fast),
        serving(tmp_path, {"fast": fast, "exact": hung}, health=STALLED) as served,
    ):
        waiting = asyncio.create_task(ask(served.port, CHAT.path, CHAT.ask(), headers=CRITICAL))
        await until(lambda: served.engine("exact-0").state == "suspect")
        asked = hung.generations
        for _ in range(5):
            answer = await ask(served.port, CHAT.path, CHAT.ask(), headers=CRITICAL)
            message = check_error(answer, 503, code="no_engine_ready")
            assert "no new token" in message
        assert (hung.generations, fast.generations) == (asked, 0)
        # It has lost its requests: one at a time may try it.
        hung.metrics = HUNG % 0
        hung.script = reply(CHAT.reply)
        await until(lambda: served.engine("exact-0").on_trial)
        answer = await ask(served.port, CHAT.path, CHAT.ask(), headers=CRITICAL)
        assert answer.headers["x-dualgauge-engine"] == "exact-0"
        assert served.engine("exact-0").state == "ready"
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await until(lambda: served.clean)
