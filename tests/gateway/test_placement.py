"""Where decided requests go when their tier is busy, overloaded or down: the contracts, and what is told."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import Reply, ask, until
from tests.support.engine import FakeEngine, engines, hang, reply, stream
from tests.support.serving import Served, serving
from tests.support.shapes import ANTHROPIC, CHAT, IDS, SHAPES, Shape, check_error
from tests.support.spans import Recorder

CRITICAL = {"x-criticality": "high"}
BUGGY = """Fix this Python function, it raises a TypeError:
```python
def add(a, b):
    return a + str(b)
```"""
CODE = [{"role": "user", "content": BUGGY}]
FULL = reply({"error": {"message": "full"}}, 503)
KEYS = "keys: [{name: fast, key: sk-fast, tiers: [fast]}, {name: exact, key: sk-exact, tiers: [exact]}]"


def policy(contract: str, **more: str) -> str:
    extra = "".join(f", {name}: {value}" for name, value in more.items())
    return f"version: 1\nrules: [{{name: to exact, send: exact, if_unavailable: {contract}{extra}}}]\n"


def moved(answer: Reply) -> tuple[str, str | None, str | None]:
    """Engine, whether degraded, and why."""
    headers = answer.headers
    return (
        headers["x-dualgauge-engine"],
        headers.get("x-dualgauge-degraded"),
        headers.get("x-dualgauge-reason"),
    )


def metric(served: Served, name: str, labels: str = "") -> float:
    """The value of the one series that has these labels, 0 where there is none."""
    lines = served.metrics().decode().splitlines()
    found = [line for line in lines if line.startswith(name) and labels in line]
    assert len(found) <= 1
    return float(found[0].rsplit(" ", 1)[1]) if found else 0.0


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_c17_a_critical_request_is_never_answered_by_fast(tmp_path: Path, shape: Shape) -> None:
    fast, exact = FakeEngine(reply(shape.reply)), FakeEngine()
    tiers = {"fast": fast, "exact": exact}
    async with engines(fast, exact), serving(tmp_path, tiers, policy=None, wait=True) as served:
        await exact.stop()
        for state in ("ready", "suspect", "down", "starting"):
            served.mark("exact-0", state)
            answer = await ask(served.port, shape.path, shape.ask(), headers=CRITICAL)
            check_error(answer, 503, shape=shape, code="no_engine_ready")
            assert answer.headers["x-dualgauge-rule"] == "critical stays exact"
        assert fast.generations == 0


async def test_c18_a_code_request_is_degraded_and_it_is_told(tmp_path: Path) -> None:
    recorder = Recorder.make()
    fast, exact = FakeEngine(reply(CHAT.reply)), FakeEngine(reply(CHAT.reply))
    tiers = {"fast": fast, "exact": exact}
    async with (
        engines(fast, exact),
        serving(tmp_path, tiers, policy=None, tracer=recorder.tracer) as served,
    ):
        served.mark("exact-0", "down")
        answer = await ask(served.port, CHAT.path, CHAT.ask(messages=CODE))
        assert answer.status == 200
        assert moved(answer) == ("fast-0", "true", "unavailable (degrade)")
        assert answer.headers["x-dualgauge-tier"] == "fast"
        assert answer.headers["x-dualgauge-precision"] == "awq"
        assert answer.headers["x-dualgauge-rule"] == "code"
        assert metric(served, "dualgauge_degraded_total{", 'rule="code"') == 1
        attributes = recorder.server().attributes
        assert attributes is not None
        assert attributes["dualgauge.degraded"] is True
        assert attributes["dualgauge.tier"] == "fast"
        assert attributes["dualgauge.rule"] == "code"


async def test_by_default_code_goes_to_exact_and_prose_to_fast(tmp_path: Path) -> None:
    fast, exact = FakeEngine(reply(CHAT.reply)), FakeEngine(reply(CHAT.reply))
    async with engines(fast, exact), serving(tmp_path, {"fast": fast, "exact": exact}, policy=None) as served:
        prose = await ask(served.port, CHAT.path, CHAT.ask())
        code = await ask(served.port, CHAT.path, CHAT.ask(messages=CODE))
        critical = await ask(served.port, CHAT.path, CHAT.ask(), headers=CRITICAL)
        assert [moved(a) for a in (prose, code, critical)] == [
            ("fast-0", None, None),
            ("exact-0", None, None),
            ("exact-0", None, None),
        ]
        assert metric(served, "dualgauge_degraded_total{") == 0


@pytest.mark.parametrize("state", ["down", "suspect", "starting", "overloaded", "refuses"])
@pytest.mark.parametrize(
    ("contract", "expected"),
    [
        ("degrade", ("fast-0", "true", "unavailable (degrade)")),
        ("{use: fast}", ("fast-0", "true", "unavailable (use)")),
        ("{wait: 50ms, then: degrade}", ("fast-0", "true", "unavailable (degrade)")),
        ("fail", None),
        ("{wait: 50ms}", None),
    ],
)
async def test_contracts(tmp_path: Path, contract: str, expected: Any, state: str) -> None:
    fast, exact = FakeEngine(reply(CHAT.reply)), FakeEngine(FULL)
    tiers = {"fast": fast, "exact": exact}
    async with engines(fast, exact), serving(tmp_path, tiers, policy=policy(contract)) as served:
        if state == "refuses":
            await exact.stop()
        elif state != "overloaded":
            served.mark("exact-0", state)
        answer = await ask(served.port, CHAT.path, CHAT.ask())
        if expected is None:
            check_error(answer, 503)
            assert fast.generations == 0
        else:
            assert answer.status == 200
            assert moved(answer) == expected
        assert served.clean


async def test_use_of_a_more_precise_tier_is_not_degraded(tmp_path: Path) -> None:
    text = "version: 1\nrules: [{name: all, send: fast, if_unavailable: {use: exact}}]"
    fast, exact = FakeEngine(), FakeEngine(reply(CHAT.reply))
    async with engines(fast, exact), serving(tmp_path, {"fast": fast, "exact": exact}, policy=text) as served:
        served.mark("fast-0", "down")
        answer = await ask(served.port, CHAT.path, CHAT.ask())
        assert moved(answer) == ("exact-0", None, "unavailable (use)")
        assert metric(served, "dualgauge_degraded_total{") == 0


async def test_degrade_takes_the_nearest_less_precise_tier(tmp_path: Path) -> None:
    some = {tier: FakeEngine(reply(CHAT.reply)) for tier in ("tiny", "small", "exact")}
    async with (
        engines(*some.values()),
        serving(tmp_path, some, tiers=list(some), policy=policy("degrade")) as served,
    ):
        served.mark("exact-0", "down")
        assert moved(await ask(served.port, CHAT.path, CHAT.ask()))[0] == "small-0"
        served.mark("small-0", "down")
        assert moved(await ask(served.port, CHAT.path, CHAT.ask()))[0] == "tiny-0"
        served.mark("tiny-0", "down")
        check_error(await ask(served.port, CHAT.path, CHAT.ask()), 503)


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_a_wait_ends_when_the_tier_is_ready(tmp_path: Path, shape: Shape) -> None:
    exact = FakeEngine(reply(shape.reply))
    async with engines(exact), serving(tmp_path, {"exact": exact}, policy=policy("{wait: 20s}")) as served:
        served.mark("exact-0", "down")
        asking = asyncio.create_task(ask(served.port, shape.path, shape.ask()))
        await until(lambda: served.leases == 1)
        await asyncio.sleep(0.05)
        assert not asking.done()
        served.mark("exact-0", "ready")
        answer = await asking
        assert answer.status == 200
        assert moved(answer) == ("exact-0", None, None)
        waited = metric(served, "dualgauge_queue_seconds_sum{", 'tier="exact"')
        assert 0.05 <= waited < 5


async def test_a_wait_ends_when_its_time_is_over(tmp_path: Path) -> None:
    exact = FakeEngine()
    async with engines(exact), serving(tmp_path, {"exact": exact}, policy=policy("{wait: 100ms}")) as served:
        served.mark("exact-0", "down", "it burns")
        message = check_error(await ask(served.port, CHAT.path, CHAT.ask()), 503)
        assert metric(served, "dualgauge_queue_seconds_count{") == 1
        assert "it burns" in message


async def test_an_engine_that_breaks_off_is_not_waited_for(tmp_path: Path) -> None:
    exact = FakeEngine(reply({}, 500))
    async with engines(exact), serving(tmp_path, {"exact": exact}, policy=policy("{wait: 20s}")) as served:
        check_error(await ask(served.port, CHAT.path, CHAT.ask()), 502)


@pytest.mark.parametrize("contract", ["fail", "degrade", "{use: fast}", "{wait: 20s, then: degrade}"])
async def test_a_pinned_name_never_leaves_its_tier(tmp_path: Path, contract: str) -> None:
    fast, exact = FakeEngine(reply(CHAT.reply)), FakeEngine(reply(CHAT.reply))
    tiers = {"fast": fast, "exact": exact}
    async with engines(fast, exact), serving(tmp_path, tiers, policy=policy(contract)) as served:
        for tier in tiers:
            answer = await ask(served.port, CHAT.path, CHAT.ask(model=f"smollm2:{tier}"))
            assert answer.headers["x-dualgauge-tier"] == tier
            assert answer.headers["x-dualgauge-rule"] == "pinned"
            served.mark(f"{tier}-0", "down")
            answer = await ask(served.port, CHAT.path, CHAT.ask(model=f"smollm2:{tier}"))
            check_error(answer, 503, code="no_engine_ready")
            assert answer.headers["x-dualgauge-rule"] == "pinned"
            served.mark(f"{tier}-0", "ready")
        assert (fast.generations, exact.generations) == (1, 1)


GAUGES = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="smollm2"} %d.0
vllm:num_requests_waiting{engine="0",model_name="smollm2"} %d.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="smollm2",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="smollm2"} %f
"""


@pytest.mark.parametrize(
    ("rule", "running", "waiting", "kv", "busy"),
    [
        ("fast", 4, 7, 0.9, False),
        ("fast", 4, 8, 0.1, True),
        ("fast", 0, 0, 0.95, True),
        ("{use: fast, waiting: 2}", 9, 1, 0.9, False),
        ("{use: fast, waiting: 2}", 0, 2, 0.0, True),
        ("{use: fast, kv: 0.5}", 0, 0, 0.5, True),
        ("{use: fast, kv: 0.5}", 0, 7, 0.49, False),
    ],
)
async def test_if_busy(tmp_path: Path, rule: str, running: int, waiting: int, kv: float, busy: bool) -> None:
    fast, exact = FakeEngine(reply(CHAT.reply)), FakeEngine(reply(CHAT.reply))
    exact.metrics = GAUGES % (running, waiting, kv)
    text = policy("fail", if_busy=rule)
    async with engines(fast, exact), serving(tmp_path, {"fast": fast, "exact": exact}, policy=text) as served:
        await until(lambda: served.engine("exact-0").sampled_at is not None)
        answer = await ask(served.port, CHAT.path, CHAT.ask())
        assert moved(answer) == (("fast-0", "true", "busy") if busy else ("exact-0", None, None))


async def test_if_busy_counts_what_this_gateway_has_sent_since(tmp_path: Path) -> None:
    fast, exact = FakeEngine(reply(CHAT.reply)), FakeEngine(hang)
    text = policy("fail", if_busy="{use: fast, waiting: 2}")
    async with engines(fast, exact), serving(tmp_path, {"fast": fast, "exact": exact}, policy=text) as served:
        asking = [asyncio.create_task(ask(served.port, CHAT.path, CHAT.ask())) for _ in range(5)]
        await until(lambda: fast.generations == 3)
        assert exact.generations == 2
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def test_a_tier_is_busy_when_each_of_its_ready_engines_is(tmp_path: Path) -> None:
    fast, full, free = (FakeEngine(reply(CHAT.reply)) for _ in range(3))
    full.metrics = GAUGES % (1, 20, 0.5)
    text = policy("fail", if_busy="fast")
    tiers = {"fast": fast, "exact": [full, free]}
    async with engines(fast, full, free), serving(tmp_path, tiers, policy=text) as served:
        await until(lambda: served.engine("exact-0").sampled_at is not None)
        assert moved(await ask(served.port, CHAT.path, CHAT.ask()))[0] == "exact-1"
        served.mark("exact-1", "down")
        assert moved(await ask(served.port, CHAT.path, CHAT.ask())) == ("fast-0", "true", "busy")
        served.mark("fast-0", "down")
        assert moved(await ask(served.port, CHAT.path, CHAT.ask())) == ("exact-0", None, None)


async def test_the_least_loaded_engine_takes_a_request(tmp_path: Path) -> None:
    some = [FakeEngine(stream(b"data: {}\n\n", end="hang")) for _ in range(2)]
    async with engines(*some), serving(tmp_path, {"fast": some}) as served:
        asking = [asyncio.create_task(ask(served.port, CHAT.path, CHAT.ask(stream=True))) for _ in range(8)]
        await until(lambda: sum(engine.generations for engine in some) == 8)
        assert [engine.generations for engine in some] == [4, 4]
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


@pytest.mark.parametrize(
    ("contract", "key", "expected"),
    [
        ("fail", "sk-fast", 403),
        ("degrade", "sk-fast", "fast-0"),
        ("{use: fast}", "sk-fast", "fast-0"),
        ("{wait: 5s}", "sk-fast", 403),
        ("{wait: 5s, then: degrade}", "sk-fast", "fast-0"),
        ("fail", "sk-exact", "exact-0"),
    ],
)
async def test_a_tier_that_a_key_may_not_use_counts_as_unavailable(
    tmp_path: Path, contract: str, key: str, expected: Any
) -> None:
    fast, exact = FakeEngine(reply(CHAT.reply)), FakeEngine(reply(CHAT.reply))
    tiers = {"fast": fast, "exact": exact}
    async with engines(fast, exact), serving(tmp_path, tiers, policy=policy(contract), keys=KEYS) as served:
        answer = await ask(served.port, CHAT.path, CHAT.ask(), headers={"authorization": f"Bearer {key}"})
        if expected == 403:
            check_error(answer, 403, code="tier_not_allowed")
            assert fast.generations + exact.generations == 0
        else:
            assert answer.headers["x-dualgauge-engine"] == expected
            assert ("x-dualgauge-degraded" in answer.headers) == (expected == "fast-0")


async def test_a_key_without_a_tier_is_not_degraded_to_it(tmp_path: Path) -> None:
    fast, exact = FakeEngine(reply(CHAT.reply)), FakeEngine()
    tiers = {"fast": fast, "exact": exact}
    async with engines(fast, exact), serving(tmp_path, tiers, policy=policy("degrade"), keys=KEYS) as served:
        served.mark("exact-0", "down")
        headers = {"authorization": "Bearer sk-exact"}
        check_error(await ask(served.port, CHAT.path, CHAT.ask(), headers=headers), 503)
        assert fast.generations == 0


async def test_rules_read_headers_metadata_tags_and_models(tmp_path: Path) -> None:
    text = """
version: 1
classes:
  chosen:
    any: [{header: {x-criticality: [high]}}, {metadata: {critical: "true"}}, {tenant_tag: critical}]
rules:
  - {name: chosen ones, when: chosen, send: exact, if_unavailable: fail}
  - {name: the rest, send: fast, if_unavailable: fail}
"""
    keys = "keys: [{name: a, key: sk-a, tags: [critical]}, {name: b, key: sk-b}]"
    fast, exact = FakeEngine(reply(CHAT.reply)), FakeEngine(reply(CHAT.reply))
    tiers = {"fast": fast, "exact": exact}
    async with engines(fast, exact), serving(tmp_path, tiers, policy=text, keys=keys) as served:

        async def rule(key: str, shape: Shape = CHAT, **options: Any) -> str:
            headers = {"x-api-key": key, **options.pop("headers", {})}
            answer = await ask(served.port, shape.path, shape.ask(**options), headers=headers)
            return answer.headers["x-dualgauge-rule"]

        assert await rule("sk-b") == "the rest"
        assert await rule("sk-a") == "chosen ones"
        for shape in (CHAT, ANTHROPIC):
            assert await rule("sk-b", shape, metadata={"critical": "true"}) == "chosen ones"
            assert await rule("sk-b", shape, metadata={"critical": True}) == "chosen ones"
            assert await rule("sk-b", shape, metadata={"critical": "no"}) == "the rest"
        assert await rule("sk-b", headers={"X-Criticality": "HIGH"}) == "chosen ones"
        assert await rule("sk-b", headers={"x-criticality": "low"}) == "the rest"


async def test_a_rule_may_bound_the_output(tmp_path: Path) -> None:
    text = """
version: 1
rules: [{name: short, send: fast, if_unavailable: fail, cap: {max_tokens: 100}, set: {temperature: 0}}]
"""
    engine = FakeEngine()
    async with engines(engine), serving(tmp_path, {"fast": engine}, policy=text) as served:
        for shape in SHAPES:
            engine.script = reply(shape.reply)
            for asked, sent in ((None, 100), (50, 50), (5000, 100)):
                await ask(served.port, shape.path, shape.ask(**{shape.cap: asked}))
                assert engine.last.json[shape.cap] == sent
                assert engine.last.json["temperature"] == 0


async def test_a_rules_name_is_a_header_as_it_is(tmp_path: Path) -> None:
    text = """version: 1
rules: [{name: "a: b; {c} (d) = 100 % \\"e\\" /?#", send: fast, if_unavailable: fail}]"""
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}, policy=text) as served:
        headers = (await ask(served.port, CHAT.path, CHAT.ask())).headers
        assert headers["x-dualgauge-rule"] == "a: b; {c} (d) = 100 %25 %22e%22 /?#"


# conversations

AFFINE = """
version: 1
affinity: conversation
rules:
  - {name: critical, when: {header: {x-criticality: [high]}}, send: exact, if_unavailable: fail}
  - {name: to exact, when: {header: {x-tier: [exact]}}, send: exact, if_unavailable: degrade}
  - {name: the rest, send: fast, if_unavailable: fail}
"""
TO_EXACT = {"x-tier": "exact"}


def talk(number: int, turns: int = 1) -> list[dict[str, str]]:
    """A conversation of so many turns of the user's."""
    said = [{"role": "user", "content": f"conversation {number}, turn 0"}]
    for turn in range(1, turns):
        said.append({"role": "assistant", "content": f"answer {turn}"})
        said.append({"role": "user", "content": f"turn {turn}"})
    return said


async def test_a_conversation_stays_on_one_engine_of_its_tier(tmp_path: Path) -> None:
    some = [FakeEngine(reply(CHAT.reply)) for _ in range(3)]
    async with engines(*some), serving(tmp_path, {"fast": some}, policy=AFFINE) as served:
        taken = set()
        for number in range(12):
            answers = [
                await ask(served.port, CHAT.path, CHAT.ask(messages=talk(number, turns)))
                for turns in (1, 2, 3, 4)
            ]
            (engine,) = {answer.headers["x-dualgauge-engine"] for answer in answers}
            taken.add(engine)
        assert len(taken) > 1


async def test_without_affinity_the_first_of_the_idle_engines_is_asked(tmp_path: Path) -> None:
    some = [FakeEngine(reply(CHAT.reply)) for _ in range(2)]
    async with engines(*some), serving(tmp_path, {"fast": some}) as served:
        for number in range(12):
            answer = await ask(served.port, CHAT.path, CHAT.ask(messages=talk(number)))
            assert answer.headers["x-dualgauge-engine"] == "fast-0"


async def test_two_keys_do_not_share_a_place(tmp_path: Path) -> None:
    some = [FakeEngine(reply(CHAT.reply)) for _ in range(2)]
    keys = "keys: [" + ", ".join(f"{{name: t{n}, key: sk-{n}}}" for n in range(16)) + "]"
    async with engines(*some), serving(tmp_path, {"fast": some}, policy=AFFINE, keys=keys) as served:
        found = [
            await ask(
                served.port,
                CHAT.path,
                CHAT.ask(messages=talk(0)),
                headers={"authorization": f"Bearer sk-{n}"},
            )
            for n in range(16)
        ]
        assert {answer.headers["x-dualgauge-engine"] for answer in found} == {"fast-0", "fast-1"}


RESPONSES = next(shape for shape in SHAPES if shape.path == "/v1/responses")


def made(reply_id: str) -> dict[str, Any]:
    return {**json.loads(RESPONSES.reply), "id": reply_id}


async def follow_up(served: Served, **headers: str) -> Reply:
    """A second request that goes on with the reply to a first one, which went to exact with `TO_EXACT`."""
    return await ask(
        served.port, RESPONSES.path, RESPONSES.ask(previous_response_id="resp_1"), headers=headers
    )


async def test_a_reply_is_continued_by_the_engine_that_made_it(tmp_path: Path) -> None:
    some = [FakeEngine(reply(made(f"resp_{n}"))) for n in range(3)]
    async with engines(*some), serving(tmp_path, {"fast": some}, policy=AFFINE) as served:
        for name in ("fast-0", "fast-2"):
            served.mark(name, "down")
        await ask(served.port, RESPONSES.path, RESPONSES.ask())
        for name in ("fast-0", "fast-2"):
            served.mark(name, "ready")
        served.engine("fast-1").in_flight = 100
        for _ in range(4):
            assert moved(await follow_up(served)) == ("fast-1", None, None)
        served.engine("fast-1").in_flight = 0
        served.mark("fast-1", "down", "it burns")
        message = check_error(await follow_up(served), 503, code="no_engine_ready")
        assert "fast-1" in message
        assert "it burns" in message


@pytest.fixture
def pair() -> dict[str, FakeEngine]:
    return {tier: FakeEngine(reply(made("resp_1"))) for tier in ("fast", "exact")}


async def test_a_reply_of_exact_is_continued_there(tmp_path: Path, pair: dict[str, FakeEngine]) -> None:
    async with engines(*pair.values()), serving(tmp_path, pair, policy=AFFINE) as served:
        await ask(served.port, RESPONSES.path, RESPONSES.ask(), headers=TO_EXACT)
        assert moved(await follow_up(served)) == ("exact-0", None, "conversation")
        served.mark("exact-0", "down")
        check_error(await follow_up(served), 503, code="no_engine_ready")
        assert pair["fast"].generations == 0


async def test_a_reply_of_fast_is_continued_there_as_the_contract_allows(
    tmp_path: Path, pair: dict[str, FakeEngine]
) -> None:
    async with engines(*pair.values()), serving(tmp_path, pair, policy=AFFINE) as served:
        await ask(served.port, RESPONSES.path, RESPONSES.ask())
        assert moved(await follow_up(served)) == ("fast-0", None, None)
        assert moved(await follow_up(served, **TO_EXACT)) == ("fast-0", "true", "unavailable (degrade)")
        asked = pair["fast"].generations
        answer = await follow_up(served, **CRITICAL)
        message = check_error(answer, 404, code="response_not_found")
        assert "without `previous_response_id`" in message
        assert (pair["fast"].generations, pair["exact"].generations) == (asked, 0)


async def test_a_pinned_name_does_not_follow_a_reply(tmp_path: Path, pair: dict[str, FakeEngine]) -> None:
    async with engines(*pair.values()), serving(tmp_path, pair, policy=AFFINE) as served:
        await ask(served.port, RESPONSES.path, RESPONSES.ask(), headers=TO_EXACT)
        body = RESPONSES.ask(model="smollm2:fast", previous_response_id="resp_1")
        check_error(await ask(served.port, RESPONSES.path, body), 404, code="response_not_found")
        assert pair["fast"].generations == 0


BUSY_AFFINE = AFFINE.replace("if_unavailable: degrade}", "if_busy: {use: fast, waiting: 4}}")


@pytest.mark.parametrize(
    ("turns", "finishing", "seconds_a_token", "expected"),
    [
        (3, 100, 0.1, ("exact-0", None, None)),
        (3, 0.1, 0.1, ("fast-0", "true", "busy")),
        (1, 100, 0.1, ("fast-0", "true", "busy")),
        (3, 100, 0.0001, ("fast-0", "true", "busy")),
        (3, 0, 0.1, ("fast-0", "true", "busy")),
        (3, 100, 0, ("fast-0", "true", "busy")),
    ],
    ids=[
        "short queue",
        "long queue",
        "no earlier turn",
        "quick prefill",
        "no pace known",
        "no prefill known",
    ],
)
async def test_a_conversation_leaves_a_busy_tier_where_that_is_quicker(
    tmp_path: Path, turns: int, finishing: float, seconds_a_token: float, expected: Any
) -> None:
    """Four requests wait at exact, which may have the earlier turns in its prefix cache."""
    fast, exact = FakeEngine(reply(CHAT.reply)), FakeEngine(reply(CHAT.reply))
    tiers = {"fast": fast, "exact": exact}
    async with engines(fast, exact), serving(tmp_path, tiers, policy=BUSY_AFFINE) as served:
        served.engine("exact-0").waiting = 4
        served.engine("exact-0").progress.finishing.add(finishing, 1, 1)
        served.engine("fast-0").progress.prefill.add(seconds_a_token, 1, 1)
        body = CHAT.ask(messages=talk(0, turns))
        assert moved(await ask(served.port, CHAT.path, body, headers=TO_EXACT)) == expected


async def test_if_busy_by_a_predicted_wait(tmp_path: Path) -> None:
    fast, exact = FakeEngine(reply(CHAT.reply)), FakeEngine(reply(CHAT.reply))
    text = policy("fail", if_busy="{use: fast, wait: 5s}")
    async with engines(fast, exact), serving(tmp_path, {"fast": fast, "exact": exact}, policy=text) as served:
        engine = served.engine("exact-0")
        engine.waiting = 4
        assert moved(await ask(served.port, CHAT.path, CHAT.ask())) == ("exact-0", None, None)
        engine.progress.finishing.add(1, 1, 1)
        assert moved(await ask(served.port, CHAT.path, CHAT.ask())) == ("exact-0", None, None)
        engine.waiting = 6
        assert moved(await ask(served.port, CHAT.path, CHAT.ask())) == ("fast-0", "true", "busy")


# engines that fail requests


async def test_an_engine_that_fails_requests_in_a_row_is_left_then_tried(tmp_path: Path) -> None:
    bad, good = FakeEngine(reply({}, 500)), FakeEngine(reply(CHAT.reply))
    async with engines(bad, good), serving(tmp_path, {"fast": [bad, good]}) as served:
        for _ in range(3):
            check_error(await ask(served.port, CHAT.path, CHAT.ask()), 502)
        assert served.engine("fast-0").state == "suspect"
        for _ in range(5):
            assert moved(await ask(served.port, CHAT.path, CHAT.ask()))[0] == "fast-1"
        bad.script = reply(CHAT.reply)
        served.engine("fast-0").breaker.probed()
        assert moved(await ask(served.port, CHAT.path, CHAT.ask()))[0] == "fast-0"
        assert served.engine("fast-0").state == "ready"


async def test_one_request_at_a_time_tries_a_suspect_engine(tmp_path: Path) -> None:
    bad, good = FakeEngine(reply({}, 500)), FakeEngine(reply(CHAT.reply))
    async with engines(bad, good), serving(tmp_path, {"fast": [bad, good]}) as served:
        for _ in range(3):
            await ask(served.port, CHAT.path, CHAT.ask())
        bad.script = hang
        breaker = served.engine("fast-0").breaker
        breaker.probed()
        trial = asyncio.create_task(ask(served.port, CHAT.path, CHAT.ask()))
        await until(lambda: bad.generations == 4)
        for _ in range(5):
            assert moved(await ask(served.port, CHAT.path, CHAT.ask()))[0] == "fast-1"
        trial.cancel()
        await asyncio.gather(trial, return_exceptions=True)
        await until(lambda: served.clean and breaker.trial is None)
        assert breaker.half_open


async def test_what_an_engine_refuses_is_an_answer(tmp_path: Path) -> None:
    bad, good = FakeEngine(reply({}, 500)), FakeEngine(reply(CHAT.reply))
    async with engines(bad, good), serving(tmp_path, {"fast": [bad, good]}) as served:
        for status in (500, 500, 404, 500, 500, 401, 500, 500, 422, 500, 500):
            bad.script = reply({"error": {"message": "no"}}, status)
            await ask(served.port, CHAT.path, CHAT.ask())
        assert (served.engine("fast-0").state, bad.generations) == ("ready", 11)


async def test_timeouts_count_where_the_engine_makes_no_tokens(tmp_path: Path) -> None:
    slow, good = FakeEngine(hang), FakeEngine(reply(CHAT.reply))
    timeouts = {"first_byte": "30ms"}
    async with (
        engines(slow, good),
        serving(tmp_path, {"fast": [slow, good]}, timeouts=timeouts) as served,
    ):
        engine = served.engine("fast-0")
        for _ in range(5):
            engine.progress.moved_at = served.gateway.clock() + 60
            check_error(await ask(served.port, CHAT.path, CHAT.ask()), 504)
        assert engine.state == "ready"
        engine.progress.moved_at = served.gateway.clock()
        for _ in range(3):
            check_error(await ask(served.port, CHAT.path, CHAT.ask()), 504)
        assert engine.state == "suspect"
        assert moved(await ask(served.port, CHAT.path, CHAT.ask()))[0] == "fast-1"


async def test_the_only_engine_of_a_tier_is_asked_however_often_it_fails(tmp_path: Path) -> None:
    engine = FakeEngine(reply({}, 500))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        for _ in range(9):
            check_error(await ask(served.port, CHAT.path, CHAT.ask()), 502)
        engine.script = reply(CHAT.reply)
        assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 200


async def test_a_tier_that_sleeps_in_turn_is_waited_for_whatever_the_contract(tmp_path: Path) -> None:
    fast, exact = FakeEngine(reply(CHAT.reply)), FakeEngine(reply(CHAT.reply))
    tiers = {"fast": fast, "exact": exact}
    for contract in ("fail", "degrade", "{use: fast}"):
        folder = tmp_path / contract[:4].strip("{")
        folder.mkdir()
        async with engines(fast, exact), serving(folder, tiers, policy=policy(contract)) as served:
            fleet = served.gateway.fleet
            fleet.turns = {"fast": 30.0, "exact": 30.0}
            fleet.hold(served.engine("exact-0"), "asleep")
            asking = asyncio.create_task(ask(served.port, CHAT.path, CHAT.ask()))
            await until(lambda served=served: served.gateway.tiers.oldest("exact")[0] == 1)
            fleet.hold(served.engine("exact-0"), "")
            assert moved(await asking)[:2] == ("exact-0", None)


@pytest.mark.parametrize(("contract", "engine"), [("fail", None), ("degrade", "fast-0")])
async def test_after_the_wait_for_its_turn_the_contract_holds(
    tmp_path: Path, contract: str, engine: str | None
) -> None:
    fast, exact = FakeEngine(reply(CHAT.reply)), FakeEngine()
    tiers = {"fast": fast, "exact": exact}
    async with engines(fast, exact), serving(tmp_path, tiers, policy=policy(contract)) as served:
        served.gateway.fleet.turns = {"fast": 0.1, "exact": 0.1}
        served.gateway.fleet.hold(served.engine("exact-0"), "asleep")
        answer = await ask(served.port, CHAT.path, CHAT.ask())
        assert answer.headers.get("x-dualgauge-engine") == engine
        assert answer.status == (503 if engine is None else 200)


async def test_a_more_precise_tier_that_is_awake_is_used_at_once(tmp_path: Path) -> None:
    text = "version: 1\nrules: [{name: to fast, send: fast, if_unavailable: {use: exact}}]\n"
    fast, exact = FakeEngine(), FakeEngine(reply(CHAT.reply))
    tiers = {"fast": fast, "exact": exact}
    async with engines(fast, exact), serving(tmp_path, tiers, policy=text) as served:
        served.gateway.fleet.turns = {"fast": 30.0, "exact": 30.0}
        served.gateway.fleet.hold(served.engine("fast-0"), "asleep")
        assert (await ask(served.port, CHAT.path, CHAT.ask())).headers["x-dualgauge-engine"] == "exact-0"
