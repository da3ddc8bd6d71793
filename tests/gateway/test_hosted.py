"""Hosted engines: the gateway, the real SDK in processes of its own, and a provider on a socket.

The SDK takes seconds to load, so most tests share two of its processes; the last have the gateway start one.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engines import hosted
from engines.runfile import started
from gateway.config import parse
from policies.document import ProblemsError
from tests.support import provider
from tests.support.client import Wire, ask, until
from tests.support.engine import FakeEngine, engines, hang, reply, stream
from tests.support.serving import free_port, process, serving
from tests.support.shapes import ANTHROPIC, CHAT, COMPLETIONS, RESPONSES, Shape
from tests.support.spans import Recorder

LOADING = 120.0
KEY = "sk-provider"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]


@dataclass(frozen=True)
class Host:
    """A process of the SDK, whose provider is expected at `port`."""

    socket: Path
    port: int

    @property
    def url(self) -> str:
        return f"unix:{self.socket}"

    def provider(self) -> FakeEngine:
        engine = FakeEngine()
        engine.port = self.port
        return engine


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Host]]:
    folder = tmp_path_factory.mktemp("sockets")
    found: dict[str, Host] = {}
    children = []
    for name, model, base in (
        ("openai", "openai/gpt-5", "/v1"),
        ("anthropic", "anthropic/claude-sonnet-5", ""),
    ):
        host = Host(folder / f"{name}.sock", free_port())
        settings = {
            "model": model,
            "api_key": KEY,
            "api_base": f"http://127.0.0.1:{host.port}{base}",
            "timeout": 60,
        }
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "engines.hosted_server", str(host.socket)],
            stdin=subprocess.PIPE,
            env=hosted.environment({}),
        )
        assert child.stdin is not None
        child.stdin.write(json.dumps(settings).encode() + b"\n")
        child.stdin.flush()
        children.append(child)
        found[name] = host
    end = time.monotonic() + LOADING
    while not all(host.socket.exists() for host in found.values()):
        assert time.monotonic() < end, "the SDK was not loaded in time"
        assert all(child.poll() is None for child in children), "a process of the SDK has ended"
        time.sleep(0.1)
    yield found
    for child in children:
        child.kill()
        child.wait()
        assert child.stdin is not None
        child.stdin.close()


@pytest.fixture
def openai(hosts: dict[str, Host]) -> Host:
    return hosts["openai"]


@pytest.fixture
def anthropic(hosts: dict[str, Host]) -> Host:
    return hosts["anthropic"]


# OpenAI's API at the provider


async def test_a_reply_has_the_providers_words_and_usage(tmp_path: Path, openai: Host) -> None:
    api, recorder = openai.provider(), Recorder.make()
    api.script = reply(provider.chat())
    async with engines(api), serving(tmp_path, {"fast": openai.url}, tracer=recorder.tracer) as served:
        answer = await ask(served.port, CHAT.path, CHAT.ask())
        assert answer.status == 200
        assert answer.json["choices"][0]["message"]["content"] == "Hello."
        assert (answer.json["usage"]["prompt_tokens"], answer.json["usage"]["completion_tokens"]) == (11, 3)
        attributes = recorder.client().attributes or {}
        assert attributes["gen_ai.usage.input_tokens"] == 11
        assert attributes["gen_ai.usage.output_tokens"] == 3
        assert served.clean
    assert api.last.path == "/v1/chat/completions"
    assert api.last.headers["authorization"] == f"Bearer {KEY}"
    assert api.last.json["model"] == "gpt-5"


@pytest.mark.parametrize("asked", [True, False])
async def test_a_stream_comes_as_events_and_is_counted(tmp_path: Path, openai: Host, asked: bool) -> None:
    api, recorder = openai.provider(), Recorder.make()
    api.script = provider.chat_stream()
    async with engines(api), serving(tmp_path, {"fast": openai.url}, tracer=recorder.tracer) as served:
        more = {"stream_options": {"include_usage": True}} if asked else {}
        answer = await ask(served.port, CHAT.path, CHAT.ask(stream=True, **more))
        events = [line.removeprefix("data: ") for line in answer.body.decode().split("\n\n") if line]
        assert events.pop() == "[DONE]"
        chunks = [json.loads(event) for event in events]
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
        assert text == "Hello."
        assert any(c["choices"] == [] and c["usage"]["prompt_tokens"] == 11 for c in chunks) is asked
        assert (recorder.client().attributes or {})["gen_ai.usage.input_tokens"] == 11
        assert served.clean


async def test_a_stream_arrives_while_the_provider_still_speaks(tmp_path: Path, openai: Host) -> None:
    api = openai.provider()
    api.script = stream(provider.chat_events(*provider.HELLO)[0], end="hang")
    async with (
        engines(api),
        serving(tmp_path, {"fast": openai.url}) as served,
        await Wire.open(served.port) as wire,
    ):
        wire.send(CHAT.path, CHAT.ask(stream=True))
        await wire.until(b"Hel")


@pytest.mark.parametrize("streamed", [False, True])
async def test_tools_are_called(tmp_path: Path, openai: Host, streamed: bool) -> None:
    api = openai.provider()
    begun = {"role": "assistant", "tool_calls": [{"index": 0, "id": "call_1", "type": "function"}]}
    begun["tool_calls"][0]["function"] = {"name": "weather", "arguments": ""}  # type: ignore[index]
    rest = {"tool_calls": [{"index": 0, "function": {"arguments": '{"city":"Oslo"}'}}]}
    if streamed:
        api.script = stream(*provider.chat_events(begun, rest, reason="tool_calls"))
    else:
        api.script = reply(provider.chat(None, tool=("weather", '{"city":"Oslo"}')))
    async with engines(api), serving(tmp_path, {"fast": openai.url}) as served:
        answer = await ask(served.port, CHAT.path, CHAT.ask(stream=streamed, tools=TOOLS))
        said = answer.body.decode().replace("\\", "")
        assert '"name":"weather"' in said
        assert '{"city":"Oslo"}' in said
        assert "tool_calls" in said
    assert api.last.json["tools"] == TOOLS


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_leaves_is_missed_by_the_provider(
    tmp_path: Path, openai: Host, streamed: bool
) -> None:
    api = openai.provider()
    api.script = stream(provider.chat_events(*provider.HELLO)[0], end="hang") if streamed else hang
    async with engines(api), serving(tmp_path, {"fast": openai.url}) as served:
        async with await Wire.open(served.port) as wire:
            wire.send(CHAT.path, CHAT.ask(stream=streamed))
            if streamed:
                await wire.until(b"Hel")
            else:
                await until(lambda: api.generations == 1)
            wire.leave()
        await until(lambda: api.exchanges[0].closed_at is not None and served.clean)
    assert api.generations == 1


async def test_a_stream_that_the_provider_cuts_ends_with_an_error_and_without_done(
    tmp_path: Path, openai: Host
) -> None:
    api = openai.provider()
    api.script = stream(*provider.chat_events(*provider.HELLO)[:2], end="reset")
    async with engines(api), serving(tmp_path, {"fast": openai.url}) as served:
        answer = await ask(served.port, CHAT.path, CHAT.ask(stream=True))
        assert b"Hel" in answer.body
        assert b'"error"' in answer.body
        assert b"[DONE]" not in answer.body


@pytest.mark.parametrize(
    ("status", "told", "code", "retry_after"),
    [
        (400, 400, None, None),
        (401, 502, "engine_broke_off", None),
        (403, 502, "engine_broke_off", None),
        (404, 404, None, None),
        (422, 422, None, None),
        (429, 503, "engine_overloaded", "7"),
        (500, 502, "engine_broke_off", None),
        (503, 503, "engine_overloaded", "7"),
        (529, 503, "engine_overloaded", "7"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_providers_error_becomes_ours(
    tmp_path: Path,
    openai: Host,
    streamed: bool,
    status: int,
    told: int,
    code: str | None,
    retry_after: str | None,
) -> None:
    api = openai.provider()
    api.script = provider.refusal(status, "the provider's words", retry_after="7")
    async with engines(api), serving(tmp_path, {"fast": openai.url}) as served:
        answer = await ask(served.port, CHAT.path, CHAT.ask(stream=streamed))
        assert answer.status == told
        error = answer.json["error"]
        assert error["code"] == code
        assert answer.headers.get("retry-after") == retry_after
        assert ("the provider's words" in error["message"]) is (told not in (502, 503) or status == 500)
        assert served.clean
    assert api.generations == 1, "one owner of retries"


async def test_a_provider_that_is_not_there_is_an_engine_that_is_not(tmp_path: Path, openai: Host) -> None:
    async with serving(tmp_path, {"fast": openai.url}) as served:
        answer = await ask(served.port, CHAT.path, CHAT.ask())
        assert answer.status == 503


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("api_base", "http://127.0.0.1:1/v1"),
        ("base_url", "http://127.0.0.1:1/v1"),
        ("api_key", "sk-mine"),
        ("extra_headers", {"x": "y"}),
        ("extra_body", {"x": "y"}),
        ("custom_llm_provider", "ollama"),
        ("mock_response", "free of charge"),
        ("fallbacks", ["openai/gpt-4"]),
        ("guided_json", {"type": "object"}),
    ],
)
async def test_what_is_for_the_sdk_is_not_for_clients(
    tmp_path: Path, openai: Host, field: str, value: Any
) -> None:
    api = openai.provider()
    async with engines(api), serving(tmp_path, {"fast": openai.url}) as served:
        answer = await ask(served.port, CHAT.path, CHAT.ask(**{field: value}))
        assert answer.status == 400
        assert answer.json["error"]["param"] == field
    assert api.generations == 0


async def test_who_asks_is_not_told_to_the_provider(tmp_path: Path, openai: Host) -> None:
    api = openai.provider()
    api.script = reply(provider.chat())
    async with engines(api), serving(tmp_path, {"fast": openai.url}) as served:
        body = CHAT.ask(user="alice", metadata={"team": "blue"}, store=True)
        headers = {"authorization": "Bearer sk-of-the-client", "x-criticality": "low"}
        assert (await ask(served.port, CHAT.path, body, headers=headers)).status == 200
    sent = json.dumps(api.last.headers) + api.last.body.decode()
    for secret in ("alice", "blue", "sk-of-the-client", "x-criticality", "store"):
        assert secret not in sent


# Anthropic's API at the provider, and other APIs at the gateway


@pytest.mark.parametrize("streamed", [False, True])
async def test_openais_dialect_reaches_another_providers_api(
    tmp_path: Path, anthropic: Host, streamed: bool
) -> None:
    api, recorder = anthropic.provider(), Recorder.make()
    api.script = provider.message_stream() if streamed else reply(provider.message())
    async with engines(api), serving(tmp_path, {"fast": anthropic.url}, tracer=recorder.tracer) as served:
        answer = await ask(served.port, CHAT.path, CHAT.ask(stream=streamed, max_tokens=9))
        assert answer.status == 200
        assert "Hel" in answer.body.decode()
        attributes = recorder.client().attributes or {}
        assert attributes["gen_ai.usage.input_tokens"] == 12
        assert attributes["gen_ai.usage.output_tokens"] == 4
    assert api.last.path == "/v1/messages"
    assert api.last.headers["x-api-key"] == KEY
    assert api.last.json["max_tokens"] == 9


@pytest.mark.parametrize("streamed", [False, True])
async def test_anthropics_dialect_is_passed_to_its_own_api(
    tmp_path: Path, anthropic: Host, streamed: bool
) -> None:
    api, recorder = anthropic.provider(), Recorder.make()
    api.script = provider.message_stream() if streamed else reply(provider.message())
    async with engines(api), serving(tmp_path, {"fast": anthropic.url}, tracer=recorder.tracer) as served:
        answer = await ask(served.port, ANTHROPIC.path, ANTHROPIC.ask(stream=streamed))
        assert answer.status == 200
        if streamed:
            assert b"event: message_start" in answer.body
            assert b"event: message_stop" in answer.body
        else:
            assert answer.json["content"][0]["text"] == "Hello."
        attributes = recorder.client().attributes or {}
        assert attributes["gen_ai.usage.input_tokens"] == 12
        assert attributes["gen_ai.usage.output_tokens"] == 4


@pytest.mark.parametrize("shape", [ANTHROPIC, RESPONSES], ids=lambda shape: shape.name)
async def test_every_dialect_reaches_every_provider(
    tmp_path: Path, openai: Host, anthropic: Host, shape: Shape
) -> None:
    host = openai if shape is ANTHROPIC else anthropic
    api = host.provider()
    api.script = reply(provider.chat() if shape is ANTHROPIC else provider.message())
    async with engines(api), serving(tmp_path, {"fast": host.url}) as served:
        answer = await ask(served.port, shape.path, shape.ask())
        assert answer.status == 200
        assert "Hello." in answer.body.decode()


async def test_a_reply_that_the_sdk_cannot_read_is_not_quoted(tmp_path: Path, openai: Host) -> None:
    api = openai.provider()
    broken = {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"text": "secret words"}],
    }
    api.script = reply(broken)
    async with engines(api), serving(tmp_path, {"fast": openai.url}) as served:
        answer = await ask(served.port, CHAT.path, CHAT.ask())
        assert answer.status == 502
        assert b"secret words" not in answer.body


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_of_messages_that_leaves_is_missed_by_the_provider(
    tmp_path: Path, anthropic: Host, streamed: bool
) -> None:
    api = anthropic.provider()
    api.script = stream(*provider.message_events("Hel")[:3], end="hang") if streamed else hang
    async with engines(api), serving(tmp_path, {"fast": anthropic.url}) as served:
        async with await Wire.open(served.port) as wire:
            wire.send(ANTHROPIC.path, ANTHROPIC.ask(stream=streamed))
            if streamed:
                await wire.until(b"Hel")
            else:
                await until(lambda: api.generations == 1)
            wire.leave()
        await until(lambda: api.exchanges[0].closed_at is not None and served.clean)


async def test_plain_completions_work_too(tmp_path: Path, openai: Host) -> None:
    api = openai.provider()
    api.script = reply(provider.chat())
    async with engines(api), serving(tmp_path, {"fast": openai.url}) as served:
        answer = await ask(served.port, COMPLETIONS.path, COMPLETIONS.ask())
        assert answer.status == 200
        assert answer.json["choices"][0]["text"] == "Hello."


# the process of an engine


def hosted_part(api: FakeEngine, **fields: Any) -> dict[str, Any]:
    return {
        "name": "overflow-0",
        "tier": "fast",
        "kind": "hosted",
        "precision": "hosted",
        "model": "openai/gpt-5",
        "url": f"http://127.0.0.1:{api.port}/v1",
        "api_key": KEY,
        **fields,
    }


async def test_the_gateway_runs_the_sdk_as_a_process_that_it_ends(tmp_path: Path) -> None:
    api = FakeEngine(reply(provider.chat()))
    health = {"every": "100ms", "down_after": 1000}
    async with engines(api):
        parts = [hosted_part(api)]
        async with serving(tmp_path, {}, engines=parts, health=health, wait=False) as served:
            await until(lambda: served.engine("overflow-0").ready, 50)
            answer = await ask(served.port, CHAT.path, CHAT.ask())
            assert answer.status == 200
            assert answer.headers["x-dualgauge-engine"] == "overflow-0"
            folder = served.gateway.sockets
            assert folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()
    assert api.last.headers["authorization"] == f"Bearer {KEY}"


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in listed.split()]


def test_no_process_outlives_a_gateway_that_is_killed(tmp_path: Path) -> None:
    parts = [hosted_part(FakeEngine(), url="http://127.0.0.1:1/v1")]
    with process(tmp_path, {}, engines=parts) as served:
        (child,) = children(served.process.pid)
        began = started(child)
        command = Path(f"/proc/{child}/cmdline").read_bytes()
        assert b"engines.hosted_server" in command
        assert KEY.encode() not in command
        served.process.kill()
        served.process.wait()
        end = time.monotonic() + 30
        while started(child) == began:
            assert time.monotonic() < end, "it still runs"
            time.sleep(0.05)


def test_a_provider_that_the_sdk_does_not_know_is_told_at_the_start(tmp_path: Path) -> None:
    settings = {"model": "frobnicate/x", "api_key": KEY, "api_base": "http://127.0.0.1:1/v1", "timeout": 60}
    command = [sys.executable, "-P", "-m", "engines.hosted_server", str(tmp_path / "s.sock")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stderr=pipe, env=hosted.environment({})) as child:
        assert child.stdin is not None
        assert child.stderr is not None
        child.stdin.write(json.dumps(settings).encode() + b"\n")
        child.stdin.flush()  # its end would end the process
        said = child.stderr.read()
        assert child.wait(LOADING) == 1
    assert said.startswith(b"LiteLLM knows no provider of `frobnicate/x`: ")


def test_the_gateway_itself_never_loads_the_sdk(tmp_path: Path) -> None:
    file = {"model": "m", "policy": "default", "engines": [hosted_part(FakeEngine(), url="http://h:1")]}
    code = (
        "import sys, json, pathlib; from gateway.config import parse; from gateway.app import build;"
        f"build(parse({json.dumps(json.dumps(file))}, pathlib.Path({str(tmp_path / 'd.yaml')!r}), {{}}));"
        "import gateway.server; sys.exit('litellm' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": None}, "which `model`"),
        ({"model": "gpt-5"}, "which `model`"),
        ({"args": ["--x"]}, "leave this out"),
        ({"gpu": 0}, "leave this out"),
        ({"url": "provider.example"}, "an engine's url"),
        ({"api_key": "${NO_SUCH_KEY}"}, "NO_SUCH_KEY is not set"),
    ],
)
def test_what_a_hosted_engine_cannot_have_is_refused(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    part = {key: value for key, value in hosted_part(FakeEngine(), **fields).items() if value is not None}
    if "url" not in fields:
        del part["url"]
    with pytest.raises(ProblemsError, match=said):
        parse(json.dumps({"model": "m", "engines": [part]}), tmp_path / "dualgauge.yaml", {})


def test_without_the_package_it_is_said_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted, "missing", lambda: True)
    file = {"model": "m", "engines": [hosted_part(FakeEngine(), url="http://h:1")]}
    with pytest.raises(ProblemsError, match=r"pip install 'dualgauge\[hosted\]'"):
        parse(json.dumps(file), tmp_path / "dualgauge.yaml", {})


async def test_a_child_that_ends_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[int] = []

    async def run(*_: object) -> str:
        starts.append(len(starts))
        return "ended"

    monkeypatch.setattr(hosted, "_run", run)
    monkeypatch.setattr(hosted, "FIRST_DELAY", 0.01)
    file = {"model": "m", "engines": [hosted_part(FakeEngine(), url="http://h:1")]}
    config = parse(json.dumps(file), tmp_path / "dualgauge.yaml", {})
    async with hosted.running(config.engines, tmp_path / "sockets"):
        await until(lambda: len(starts) >= 3)
    await asyncio.sleep(0)


STAND_IN = """
import asyncio, sys
async def serve(reader, writer):
    await reader.readuntil(b"\\r\\n\\r\\n")
    writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: 0\\r\\n\\r\\n")
    writer.close()
async def main():
    async with await asyncio.start_unix_server(serve, sys.argv[1]):
        await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_a_child_that_hangs_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is stopped (SIGSTOP): its socket still takes connections."""
    pids: list[int] = []
    start = asyncio.create_subprocess_exec

    async def stand_in(*command: str, **how: Any) -> asyncio.subprocess.Process:
        started = await start(sys.executable, "-c", STAND_IN, command[-1], **how)
        pids.append(started.pid)
        return started

    monkeypatch.setattr(asyncio, "create_subprocess_exec", stand_in)
    monkeypatch.setattr(hosted, "FIRST_DELAY", 0.01)
    monkeypatch.setattr(hosted, "LOOK", 0.1)
    monkeypatch.setattr(hosted, "SILENT", 0.5)
    file = {"model": "m", "engines": [hosted_part(FakeEngine(), url="http://h:1")]}
    config = parse(json.dumps(file), tmp_path / "dualgauge.yaml", {})
    async with hosted.running(config.engines, tmp_path / "sockets"):
        socket = tmp_path / "sockets" / "0.sock"
        await until(socket.exists, 30)
        await asyncio.sleep(1)
        assert len(pids) == 1, "one that answers is left alone"
        os.kill(pids[0], signal.SIGSTOP)
        await until(lambda: len(pids) == 2, 30)
    assert "has not answered for" in caplog.text
    assert not Path(f"/proc/{pids[0]}").exists()
