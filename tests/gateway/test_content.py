"""Prompts and replies in traces: only where an operator asks for it, and bounded."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.telemetry import content
from gateway.telemetry.content import MAX_REPLY, MAX_TEXT, ReplyCopy, prompt_attributes, reply_attributes
from policies.facts import Turn
from tests.support.client import ask, until
from tests.support.collector import over_http
from tests.support.engine import FakeEngine, engines, reply, stream
from tests.support.serving import serving
from tests.support.shapes import CHAT, IDS, SHAPES, Shape
from tests.support.spans import Recorder


def copy(*parts: bytes, events: bool = False) -> ReplyCopy:
    made = ReplyCopy()
    made.events = events
    for part in parts:
        made.add(part)
    return made


def texts(attributes: Any, name: str) -> list[str]:
    """What the messages of an attribute say; all have the shape of the conventions."""
    found = []
    for message in json.loads(attributes[name]):
        (part,) = message["parts"]
        assert part["type"] == "text"
        found.append(part["content"])
    return found


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_prompt_and_reply_are_in_the_engines_span(tmp_path: Path, shape: Shape, streamed: bool) -> None:
    recorder = Recorder.make(capture=True)
    engine = FakeEngine(stream(shape.stream) if streamed else reply(shape.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}, tracer=recorder.tracer) as served:
        answer = await ask(served.port, shape.path, shape.ask(stream=streamed))
        attributes = recorder.client().attributes
        asked = shape.body.get("input") or shape.body.get("prompt") or shape.body["messages"][0]["content"]
        assert texts(attributes, "gen_ai.input.messages") == [asked]
        (said,) = texts(attributes, "gen_ai.output.messages")
        assert said
        if not streamed:
            assert json.dumps(said)[1:-1] in answer.body.decode()
        assert not [name for name in recorder.server().attributes or {} if name.startswith("gen_ai.")]


async def test_it_is_asked_for_in_the_configuration(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), over_http() as collector:
        telemetry = {"otlp": collector.url, "sample": 1, "capture_content": True}
        async with serving(tmp_path, {"fast": engine}, telemetry=telemetry) as served:
            await ask(served.port, CHAT.path, CHAT.ask())
        (client,) = [span for span in collector.spans() if span.name == "chat smollm2"]
        names = {attribute.key for attribute in client.attributes}
        assert {"gen_ai.input.messages", "gen_ai.output.messages"} <= names


async def test_without_it_no_reply_is_copied(tmp_path: Path) -> None:
    recorder = Recorder.make()
    engine = FakeEngine(stream(CHAT.stream))
    async with engines(engine), serving(tmp_path, {"fast": engine}, tracer=recorder.tracer) as served:
        await ask(served.port, CHAT.path, CHAT.ask(stream=True))
        names = {name for span in recorder.spans() for name in span.attributes or {}}
        assert not {name for name in names if "messages" in name or "instructions" in name}


async def test_an_unsampled_request_that_failed_has_its_prompt_alone(tmp_path: Path) -> None:
    recorder = Recorder.make(sample=0, capture=True)
    engine = FakeEngine(stream(b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n', end="reset"))
    async with engines(engine), serving(tmp_path, {"fast": engine}, tracer=recorder.tracer) as served:
        await ask(served.port, CHAT.path, CHAT.ask(stream=True))
        attributes = recorder.client().attributes or {}
        assert "gen_ai.input.messages" in attributes
        assert "gen_ai.output.messages" not in attributes


async def test_a_text_that_cannot_be_written_down_costs_the_spans_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> bytes:
        raise UnicodeEncodeError("utf-8", "x", 0, 1, "surrogates not allowed")

    recorder = Recorder.make(capture=True)
    monkeypatch.setattr(content, "encode", fail)
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}, tracer=recorder.tracer) as served:
        assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 200
        await until(lambda: served.clean)
        assert recorder.spans() == []
        assert "has no spans" in caplog.text


def test_system_turns_are_instructions() -> None:
    turns = [Turn("system", "be brief"), Turn("user", "hi"), Turn("assistant", "hello"), Turn("user", "bye")]
    found = prompt_attributes(turns)
    assert json.loads(str(found["gen_ai.system_instructions"])) == [{"type": "text", "content": "be brief"}]
    assert [m["role"] for m in json.loads(str(found["gen_ai.input.messages"]))] == [
        "user",
        "assistant",
        "user",
    ]
    assert "dualgauge.content_cut" not in found


def test_a_long_prompt_is_cut() -> None:
    found = prompt_attributes([Turn("user", "a" * (MAX_TEXT - 1)), Turn("user", "bcd"), Turn("user", "e")])
    assert texts(found, "gen_ai.input.messages") == ["a" * (MAX_TEXT - 1), "b"]
    assert found["dualgauge.content_cut"] is True


def test_a_long_reply_is_cut() -> None:
    body = json.dumps({"choices": [{"message": {"content": "a" * (MAX_TEXT + 1)}}]}).encode()
    found = reply_attributes(copy(body))
    assert texts(found, "gen_ai.output.messages") == ["a" * MAX_TEXT]
    assert found["dualgauge.content_cut"] is True


def test_of_a_very_long_stream_the_beginning_is_kept() -> None:
    event = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}],"pad":"%b"}\n\n' % (b"x" * 10_000)
    held = copy(*[event] * 100, events=True)
    assert len(held.data()) == MAX_REPLY
    found = reply_attributes(held)
    assert texts(found, "gen_ai.output.messages") == ["a" * (MAX_REPLY // len(event))]
    assert found["dualgauge.content_cut"] is True


def test_several_answers_are_messages_of_their_own() -> None:
    deltas = ((1, "x"), (0, "a"), (1, "y"), (0, "b"))
    parts = [
        b"data: %b\n\n" % json.dumps({"choices": [{"index": i, "delta": {"content": text}}]}).encode()
        for i, text in deltas
    ]
    found = reply_attributes(copy(*parts, b"data: [DONE]\n\n", events=True))
    assert texts(found, "gen_ai.output.messages") == ["ab", "xy"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[1]",
        b'{"choices": 1, "content": 2, "output": [3]}',
        b'{"choices": [4, {"message": 5}, {"index": "x", "text": 6}]}',
        b'{"content": [{"text": 7}, 8]}',
        b'{"data": [{"embedding": [0.1]}]}',
        b"\xff" * 10,
        b"[" * 100_000,
    ],
)
@pytest.mark.parametrize("events", [False, True])
def test_what_has_no_text_has_no_attribute(body: bytes, events: bool) -> None:
    held = copy(b"data: %b\n\n" % body if events else body, events=events)
    assert reply_attributes(held) == {}
