"""What a rule changes in a request: the engine gets it, the client is told, the reservation counts it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.config import Bounds
from gateway.dialects import EMBEDDINGS
from gateway.dialects.base import Request
from gateway.dialects.body import Body
from policies.decision import Edits
from tests.support.client import ask
from tests.support.engine import FakeEngine, engines, reply
from tests.support.serving import serving
from tests.support.shapes import ANTHROPIC, CHAT, COMPLETIONS, IDS, RESPONSES, SHAPES, Shape
from tests.support.spans import Recorder


def policy(keys: str, plan: str = "") -> str:
    plans = f"plans: {{default: {{{plan}}}}}\n" if plan else ""
    return f"version: 1\nrules: [{{name: all, send: fast, if_unavailable: fail, {keys}}}]\n{plans}"


def edited(shape: Shape, edits: Edits, **fields: Any) -> tuple[Request, str]:
    request = shape.dialect.parse(Body(json.dumps(shape.ask(**fields)).encode()), Bounds())
    return request, shape.dialect.edit(request, edits)


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_a_cap_and_a_temperature_reach_the_engine(tmp_path: Path, shape: Shape) -> None:
    text = policy("cap: {max_tokens: 16}, set: {temperature: 0}")
    engine = FakeEngine(reply(shape.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}, policy=text) as served:
        answer = await ask(served.port, shape.path, shape.ask(**{shape.cap: 1000}))
        assert (engine.last.json[shape.cap], engine.last.json["temperature"]) == (16, 0)
        assert answer.headers["x-dualgauge-edited"] == f"{shape.cap}=16, temperature=0"


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_what_is_within_the_cap_passes_unchanged(tmp_path: Path, shape: Shape) -> None:
    engine = FakeEngine(reply(shape.reply))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}, policy=policy("cap: {max_tokens: 16}")) as served,
    ):
        body = shape.ask(**{shape.cap: 16})
        answer = await ask(served.port, shape.path, body)
        assert engine.last.json == body
        assert "x-dualgauge-edited" not in answer.headers


@pytest.mark.parametrize("shape", [CHAT, COMPLETIONS, RESPONSES], ids=["chat", "completions", "responses"])
def test_a_cap_bounds_a_request_that_has_no_bound(shape: Shape) -> None:
    request, told = edited(shape, Edits(max_tokens=16))
    assert told == f"{shape.cap}=16"
    assert request.output_tokens == 16


def test_a_cap_bounds_every_field_that_bounds_the_output() -> None:
    request, told = edited(
        CHAT, Edits(max_tokens=16), max_tokens=8, max_completion_tokens=32, min_tokens=20, n=2
    )
    fields = Body(request.body.encode())
    assert told == "max_completion_tokens=16"
    assert request.output_tokens == 32
    assert b'"max_tokens":8' in request.body.encode()
    assert b'"min_tokens":16' in request.body.encode()
    assert "max_completion_tokens" in fields


def test_several_answers_keep_their_temperature() -> None:
    # vLLM refuses n > 1 at temperature 0: what the operator wrote must not fail the client's request.
    assert edited(CHAT, Edits(temperature=0.0), n=2)[1] == ""
    assert edited(CHAT, Edits(temperature=0.5), n=2)[1] == "temperature=0.5"


def test_a_temperature_that_is_given_already_is_no_change() -> None:
    assert edited(CHAT, Edits(temperature=0.0), temperature=0)[1] == ""


def test_embeddings_are_not_edited() -> None:
    request = EMBEDDINGS.parse(Body(b'{"model":"m","input":"hi"}'), Bounds())
    assert EMBEDDINGS.edit(request, Edits(16, 0.0)) == ""
    assert request.body.encode() == b'{"model":"m","input":"hi"}'


async def test_the_reservation_is_of_the_capped_output(tmp_path: Path) -> None:
    text = policy("cap: {max_tokens: 10}", "tokens: 100/min")
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}, policy=text) as served:
        # 5,000 tokens would exceed the whole limit.
        answer = await ask(served.port, CHAT.path, CHAT.ask(max_tokens=5000))
        assert answer.status == 200


async def test_a_trace_tells_the_edits(tmp_path: Path) -> None:
    recorder = Recorder.make(sample=1)
    engine = FakeEngine(reply(CHAT.reply))
    async with (
        engines(engine),
        serving(
            tmp_path, {"fast": engine}, policy=policy("cap: {max_tokens: 10}"), tracer=recorder.tracer
        ) as served,
    ):
        await ask(served.port, CHAT.path, CHAT.ask())
        told = [span.attributes["dualgauge.edits"] for span in recorder.spans() if span.kind.name == "SERVER"]
        assert told == ["max_tokens=10"]


def with_priorities(engine: FakeEngine, name: str, priorities: bool) -> dict[str, Any]:
    return {
        "name": name,
        "tier": "fast",
        "kind": "external",
        "url": engine.url,
        "precision": "awq",
        "priorities": priorities,
    }


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_a_priority_reaches_engines_that_schedule_by_it(tmp_path: Path, shape: Shape) -> None:
    engine = FakeEngine(reply(shape.reply))
    async with engines(engine):
        parts = [with_priorities(engine, "fast-0", True)]
        async with serving(tmp_path, {}, policy=policy("priority: -3"), engines=parts) as served:
            await ask(served.port, shape.path, shape.ask())
            if shape is ANTHROPIC:
                assert engine.last.headers["x-vllm-priority"] == "-3"
                assert "priority" not in engine.last.json
            else:
                assert engine.last.json["priority"] == -3


async def test_a_client_cannot_choose_its_priority(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine):
        parts = [with_priorities(engine, "fast-0", True)]
        async with serving(tmp_path, {}, policy=policy("priority: 3"), engines=parts) as served:
            headers = {"x-vllm-priority": "-9"}
            await ask(served.port, CHAT.path, CHAT.ask(priority=-9), headers=headers)
            assert engine.last.json["priority"] == 3
            assert "x-vllm-priority" not in engine.last.headers


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_other_engines_are_sent_no_priority(tmp_path: Path, shape: Shape) -> None:
    engine = FakeEngine(reply(shape.reply))
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}, policy=policy("priority: -3")) as served,
    ):
        await ask(served.port, shape.path, shape.ask())
        assert engine.last.json == shape.ask()
        assert "x-vllm-priority" not in engine.last.headers


async def test_a_second_engine_that_knows_no_priorities_is_sent_zero(tmp_path: Path) -> None:
    first, second = FakeEngine(reply({"error": {}}, status=503)), FakeEngine(reply(CHAT.reply))
    async with engines(first, second):
        parts = [with_priorities(first, "fast-0", True), with_priorities(second, "fast-1", False)]
        async with serving(tmp_path, {}, policy=policy("priority: -3"), engines=parts) as served:
            served.engine("fast-1").running = 5
            answer = await ask(served.port, CHAT.path, CHAT.ask())
            assert answer.status == 200
            assert first.last.json["priority"] == -3
            assert second.last.json["priority"] == 0
