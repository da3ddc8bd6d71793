"""Limits: what is reserved, what a refused request costs, and what is given back, through the gateway and in
the store alone."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from policies.document import ProblemsError
from policies.signals.tokens import estimate_prompt
from tests.support.client import Reply, Wire, ask, until
from tests.support.engine import FakeEngine, engines, hang, reply, reset, stream
from tests.support.redis import needs_redis
from tests.support.redis import server as redis_server
from tests.support.serving import Served, make, serving
from tests.support.shapes import CHAT, COMPLETIONS, IDS, SHAPES, Shape, check_error, events


def policy(plan: str) -> str:
    rules = "rules: [{name: all, send: fast, if_unavailable: fail}]"
    return f"version: 1\n{rules}\nplans: {{default: {{{plan}}}}}\n"


def left(served: Served) -> dict[str, float]:
    return dict(served.gateway.store.usage()["anonymous"])


def prompt(tokens: int) -> list[dict[str, str]]:
    """A conversation that is estimated at so many tokens."""
    text = next(t for n in range(10_000) if estimate_prompt([t := "word " * n]) >= tokens)
    assert estimate_prompt([text]) == tokens
    return [{"role": "user", "content": text}]


def used(prompt_tokens: int, completion_tokens: int) -> Any:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return reply({"choices": [], "usage": usage})


# through the gateway


async def test_c08_of_ten_parallel_requests_four_fit(tmp_path: Path) -> None:
    """In one process; each reserves 50 + 200 of 1000 tokens."""
    go = asyncio.Event()

    async def later(exchange: Any) -> None:
        await go.wait()
        await used(50, 20)(exchange)

    engine = FakeEngine(later)
    body = CHAT.ask(messages=prompt(50), max_tokens=200)
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}, policy=policy("tokens: 1000/min")) as served,
    ):
        asking = [asyncio.create_task(ask(served.port, CHAT.path, body)) for _ in range(10)]
        await until(lambda: sum(task.done() for task in asking) == 6)
        await until(lambda: engine.generations == 4)
        for task in asking:
            if task.done():
                check_error(task.result(), 429, code="rate_limit_exceeded")
        go.set()
        answers = await asyncio.gather(*asking)
        assert sorted(answer.status for answer in answers) == [200] * 4 + [429] * 6
        # 16.7 tokens are refilled each second meanwhile.
        assert 720 <= left(served)["tokens"] < 720 + 17 * 10
        assert served.clean


@needs_redis
async def test_c08_over_two_gateways_on_one_redis(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def later(exchange: Any) -> None:
        await go.wait()
        await used(50, 20)(exchange)

    engine = FakeEngine(later)
    body = CHAT.ask(messages=prompt(50), max_tokens=200)
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    with redis_server() as redis:
        options: dict[str, Any] = {"policy": policy("tokens: 1000/min")}
        options["limits"] = {"store": redis.url, "timeout": "10s"}
        async with (
            engines(engine),
            serving(folders[0], {"fast": engine}, **options) as one,
            serving(folders[1], {"fast": engine}, **options) as other,
        ):
            ports = [one.port, other.port] * 5
            asking = [asyncio.create_task(ask(port, CHAT.path, body)) for port in ports]
            await until(lambda: sum(task.done() for task in asking) == 6)
            await until(lambda: engine.generations == 4)
            for task in asking:
                if task.done():
                    check_error(task.result(), 429, code="rate_limit_exceeded")
                    assert int(task.result().headers["retry-after"]) >= 1
            go.set()
            answers = await asyncio.gather(*asking)
            assert sorted(answer.status for answer in answers) == [200] * 4 + [429] * 6
            await until(lambda: one.clean and other.clean)
            with redis.client() as client:
                # A gateway is clean once it has sent what settles its leases.
                await until(lambda: client.zcard("dualgauge:{t:anonymous}:t:anonymous:leases") == 0)
            answer = await ask(one.port, CHAT.path, body)
            left_of_720 = int(answer.headers["x-ratelimit-remaining-tokens"]) + 250
            assert 720 <= left_of_720 < 720 + 17 * 10


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_c09_a_second_at_once_is_refused_and_costs_no_request(tmp_path: Path, shape: Shape) -> None:
    engine = FakeEngine(hang)
    plan = policy("requests: 10/min, concurrent: 1")
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}, policy=plan) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.send(shape.path, shape.ask())
        await until(lambda: engine.generations == 1)
        answer = await ask(served.port, shape.path, shape.ask())
        check_error(answer, 429, shape=shape, code="concurrency_exceeded")
        assert 9 <= left(served)["requests"] < 10
        wire.leave()
        await until(lambda: served.clean)
        engine.script = reply(shape.reply)
        assert (await ask(served.port, shape.path, shape.ask())).status == 200


async def test_c10_without_a_bound_the_reservation_is_bounded(tmp_path: Path) -> None:
    engine = FakeEngine(used(50, 30))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}, policy=policy("tokens: 500/min")) as served,
    ):
        answer = await ask(served.port, CHAT.path, CHAT.ask(messages=prompt(50)))
        assert answer.status == 200
        assert 0 < int(answer.headers["x-ratelimit-remaining-tokens"]) < 450
        assert "max_tokens" not in engine.last.json
        assert 420 <= left(served)["tokens"] < 420 + 9 * 10


async def test_c11_the_larger_of_two_bounds_counts(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}, policy=policy("tokens: 2000/min")) as served,
    ):
        body = CHAT.ask(max_tokens=1, max_completion_tokens=10_000)
        answer = await ask(served.port, CHAT.path, body)
        message = check_error(answer, 429, code="request_exceeds_limit")
        assert "2000" in message
        assert "retry-after" not in answer.headers
        assert left(served)["tokens"] == 2000
        assert engine.generations == 0


@pytest.mark.parametrize("ask_for", [{"prompt": ["Hi"] * 4}, {"prompt": [[1], [2]], "best_of": 2}], ids=str)
async def test_each_answer_that_the_engine_makes_is_reserved(tmp_path: Path, ask_for: dict[str, Any]) -> None:
    engine = FakeEngine()
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}, policy=policy("tokens: 399/min")) as served,
    ):
        answer = await ask(served.port, COMPLETIONS.path, COMPLETIONS.ask(max_tokens=100, **ask_for))
        check_error(answer, 429, code="request_exceeds_limit")
        assert engine.generations == 0


@pytest.mark.parametrize("tokens", [-500, 10**30, 10**400], ids=["negative", "large", "no double"])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_an_engines_absurd_usage_gives_nothing_back_and_breaks_nothing(
    tmp_path: Path, shape: Shape, tokens: int
) -> None:
    names = ("prompt_tokens", "input_tokens", "completion_tokens", "output_tokens", "cache_read_input_tokens")
    engine = FakeEngine(reply({"usage": dict.fromkeys(names, tokens)}))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}, policy=policy("tokens: 1000/day")) as served,
    ):
        assert (await ask(served.port, shape.path, shape.ask(**{shape.cap: 5}))).status == 200
        await until(lambda: served.clean)
        assert left(served)["tokens"] <= 1000
        answer = await ask(served.port, shape.path, shape.ask(**{shape.cap: 5}))
        assert answer.status == (200 if tokens < 0 else 429)


@pytest.mark.parametrize(
    ("script", "status", "tokens"),
    [
        (used(30, 5), 200, 35),
        (reply({"choices": []}), 200, 50),
        (reply({}, 400), 400, 0),
        (reply({}, 500), 502, 50),
        (reply({}, 503), 503, 0),
        (reset, 502, 50),
    ],
    ids=["usage", "no usage", "engine 400", "engine 500", "engine 503", "broke off"],
)
async def test_what_a_request_costs(tmp_path: Path, script: Any, status: int, tokens: int) -> None:
    engine = FakeEngine(script)
    plan = policy("tokens: 10k/day, requests: 100/day")
    async with engines(engine), serving(tmp_path, {"fast": engine}, policy=plan) as served:
        answer = await ask(served.port, CHAT.path, CHAT.ask(messages=prompt(50), max_tokens=1000))
        assert answer.status == status
        assert math.floor(left(served)["tokens"]) in (10_000 - tokens, 10_000 - tokens + 1)
        assert math.floor(left(served)["requests"]) == 99
        assert served.clean


async def test_a_streams_usage_settles_it(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}, policy=policy("tokens: 100k/day")) as served,
    ):
        expected = 100_000.0
        for shape in SHAPES:
            engine.script = stream(shape.stream)
            await ask(served.port, shape.path, shape.ask(stream=True, **{shape.cap: 500}))
            expected -= shape.stream_usage.prompt + shape.stream_usage.completion
            await until(lambda: served.clean)
            assert expected <= left(served)["tokens"] < expected + 40


async def test_tokens_are_reserved_while_a_request_runs(tmp_path: Path) -> None:
    engine = FakeEngine(stream(events(CHAT.stream)[0], end="hang"))
    plan = policy("tokens: 10k/day, concurrent: 5")
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}, policy=plan) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.send(CHAT.path, CHAT.ask(stream=True, messages=prompt(50), max_tokens=1000))
        await wire.until(b"\n\n")
        assert 8950 <= left(served)["tokens"] < 8952
        assert left(served)["concurrent"] == 1
        assert b"dualgauge_leases 1.0" in served.metrics()
        wire.leave()
        await until(lambda: served.clean)
        assert 9949 <= left(served)["tokens"] < 9952
        assert b"dualgauge_leases 0.0" in served.metrics()


async def test_a_limit_of_one_tier(tmp_path: Path) -> None:
    fast, exact = FakeEngine(used(1, 1)), FakeEngine(used(1, 1))
    tiers = {"fast": fast, "exact": exact}
    plan = policy("exact_tokens: 100/day, tokens: 100k/day")
    async with engines(fast, exact), serving(tmp_path, tiers, policy=plan) as served:
        pinned = CHAT.ask(model="smollm2:exact", max_tokens=80)
        assert (await ask(served.port, CHAT.path, {**pinned, "max_tokens": 200})).status == 429
        assert (await ask(served.port, CHAT.path, CHAT.ask(max_tokens=200))).status == 200
        assert (await ask(served.port, CHAT.path, pinned)).status == 200
        assert "x-ratelimit-limit-exact_tokens" not in (await ask(served.port, CHAT.path, pinned)).headers


async def test_a_request_refused_by_one_limit_is_not_charged_on_another(tmp_path: Path) -> None:
    engine = FakeEngine(used(1, 1))
    plan = policy("requests: 100/day, tokens: 1000/day, fast_tokens: 10/day")
    async with engines(engine), serving(tmp_path, {"fast": engine}, policy=plan) as served:
        answer = await ask(served.port, CHAT.path, CHAT.ask(max_tokens=500))
        check_error(answer, 429, code="request_exceeds_limit")
        assert (left(served)["requests"], left(served)["tokens"]) == (100, 1000)


async def test_headers_tell_limit_rest_and_reset(tmp_path: Path) -> None:
    engine = FakeEngine(used(10, 10))
    plan = policy("requests: 60/min, tokens: 6000/min")
    async with engines(engine), serving(tmp_path, {"fast": engine}, policy=plan) as served:
        headers = (await ask(served.port, CHAT.path, CHAT.ask(messages=prompt(50), max_tokens=1000))).headers
        assert headers["x-ratelimit-limit-requests"] == "60"
        assert headers["x-ratelimit-remaining-requests"] == "59"
        assert headers["x-ratelimit-reset-requests"] == "1s"
        assert headers["x-ratelimit-limit-tokens"] == "6000"
        assert headers["x-ratelimit-remaining-tokens"] == "4950"
        assert headers["x-ratelimit-reset-tokens"] == "10.5s"


async def test_a_429_says_when_to_come_back(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    plan = policy("requests: 1/h")
    async with engines(engine), serving(tmp_path, {"fast": engine}, policy=plan) as served:
        assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 200
        answer: Reply = await ask(served.port, CHAT.path, CHAT.ask())
        message = check_error(answer, 429, code="rate_limit_exceeded")
        assert 3590 < int(answer.headers["retry-after"]) <= 3600
        assert "1 requests in 3600 s" in message
        assert 'dualgauge_limited_total{kind="requests"} 1.0' in (served.metrics().decode())


async def test_who_comes_back_when_told_is_admitted(tmp_path: Path) -> None:
    engine = FakeEngine(used(50, 50))
    plan = policy("requests: 30/min, tokens: 150/2s")
    async with engines(engine), serving(tmp_path, {"fast": engine}, policy=plan) as served:
        body = CHAT.ask(messages=prompt(50), max_tokens=50)
        assert (await ask(served.port, CHAT.path, body)).status == 200
        answer = await ask(served.port, CHAT.path, body)
        check_error(answer, 429, code="rate_limit_exceeded")
        await asyncio.sleep(int(answer.headers["retry-after"]))
        assert (await ask(served.port, CHAT.path, body)).status == 200


async def test_keys_have_limits_of_their_own(tmp_path: Path) -> None:
    text = policy("requests: 1/day") + "  trial: {requests: 2/day}\n"
    text = text.replace("plans: {default: {requests: 1/day}}\n", "plans:\n  default: {requests: 1/day}\n")
    keys = "keys: [{name: a, key: sk-a}, {name: b, key: sk-b, plan: trial}, {name: c, key: sk-c}]"
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}, policy=text, keys=keys) as served:

        async def admitted(key: str) -> int:
            answers = [
                await ask(served.port, CHAT.path, CHAT.ask(), headers={"x-api-key": key}) for _ in range(4)
            ]
            return [answer.status for answer in answers].count(200)

        assert [await admitted(key) for key in ("sk-a", "sk-b", "sk-c")] == [1, 2, 1]


async def test_an_organisations_limit_is_shared_by_its_keys(tmp_path: Path) -> None:
    text = policy("requests: 9/day").replace("}}\n", "}, team: {requests: 3/day}}\n")
    keys = (
        "organisations: [{name: acme, plan: team}]\n"
        "keys:\n"
        "- {name: a, key: sk-a, organisation: acme}\n"
        "- {name: b, key: sk-b, organisation: acme}\n"
        "- {name: c, key: sk-c}\n"
    )
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}, policy=text, keys=keys) as served:

        async def asked(key: str) -> Reply:
            return await ask(served.port, CHAT.path, CHAT.ask(), headers={"x-api-key": key})

        statuses = [(await asked(key)).status for key in ("sk-a", "sk-b", "sk-a")]
        assert statuses == [200, 200, 200]
        assert "plan `team`" in check_error(await asked("sk-b"), 429, code="rate_limit_exceeded")
        assert (await asked("sk-c")).status == 200


async def test_a_limit_of_a_model_that_nobody_can_ask_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProblemsError) as caught:
        make(tmp_path, {"fast": "http://127.0.0.1:1"}, policy=policy("models: {smollm3: {requests: 1/min}}"))
    (problem,) = caught.value.diagnostics
    assert (problem.line, problem.column) == (3, 28)
    assert "did you mean `smollm2`?" in problem.message


async def test_a_pinned_name_has_a_limit_of_its_own(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    plan = policy('models: {"smollm2:fast": {requests: 1/day}}')
    async with engines(engine), serving(tmp_path, {"fast": engine}, policy=plan) as served:
        pinned = CHAT.ask(model="smollm2:fast")
        assert (await ask(served.port, CHAT.path, pinned)).status == 200
        check_error(await ask(served.port, CHAT.path, pinned), 429, code="rate_limit_exceeded")
        assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 200


async def test_a_degraded_answer_is_charged_as_what_it_was(tmp_path: Path) -> None:
    fast, exact = FakeEngine(used(100, 50)), FakeEngine()
    text = policy("tokens: 10k/day, exact_tokens: 1k/day, weights: {exact: 4}")
    text = text.replace("send: fast, if_unavailable: fail", "send: exact, if_unavailable: degrade")
    tiers = {"fast": fast, "exact": exact}
    async with engines(fast, exact), serving(tmp_path, tiers, policy=text) as served:
        served.mark("exact-0", "down")
        answer = await ask(served.port, CHAT.path, CHAT.ask(max_tokens=200))
        assert answer.headers["x-dualgauge-degraded"] == "true"
        await until(lambda: served.clean)
        assert 9850 <= left(served)["tokens"] < 9851
        assert left(served)["exact_tokens"] == 1000


async def test_a_request_over_a_whole_limit_is_told_what_is_left(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}, policy=policy("tokens: 2000/min")) as served,
    ):
        answer = await ask(served.port, CHAT.path, CHAT.ask(max_tokens=10_000))
        assert answer.headers["x-ratelimit-remaining-tokens"] == "2000"
