"""Every kind under one `dualgauge up`: two vLLMs, a llama-server as a second fast engine, and a hosted engine
whose provider is a stand-in here; what they serve, and what happens as each of them fails.

Skipped where there is no llama-server (see `test_llamacpp`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest

from engines import runfile
from engines.hosted import LOOK
from tests.engines_real.asks import CRITICAL, LONG, chat, events
from tests.engines_real.pair import Pair, bring_up, free_port, samples, until
from tests.engines_real.test_llamacpp import TEMPLATE, TOOLS, server

pytestmark = pytest.mark.engines
RESTART_SECONDS = 300
OVERFLOW = {"x-overflow": "yes"}
FAST = ("fast-0", "fast-1")
POLICY = """
version: 1
classes:
  critical: {header: {x-criticality: high}}
  overflow: {header: {x-overflow: "yes"}}
rules:
  - {name: critical, when: critical, send: exact, if_unavailable: fail}
  - {name: overflow, when: overflow, send: overflow, if_unavailable: fail}
  - {name: all, send: fast, if_unavailable: {use: overflow}}
"""


class Provider(ThreadingHTTPServer):
    """Speaks as much of OpenAI's API as the SDK asks for. `left` counts readers that left a stream."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.left = 0
        self.bodies: list[dict[str, Any]] = []


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Provider

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        head = {"id": "c", "created": 1, "model": "gpt-5"}
        tool = {
            "id": "t",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city":"Oslo"}'},
        }
        said = {"role": "assistant", "content": None, "tool_calls": [tool]} if body.get("tools") else None
        said = said or {"role": "assistant", "content": "Hello."}
        usage = {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}
        if not body.get("stream"):
            choice = {"index": 0, "message": said, "finish_reason": "stop"}
            whole = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
            data = json.dumps(whole).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        chunk = {**head, "object": "chat.completion.chunk"}
        delta = {"index": 0, "delta": {"role": "assistant", "content": "word "}, "finish_reason": None}
        try:
            for _ in range(int(body.get("max_tokens") or 5)):
                self.event({**chunk, "choices": [delta]})
                time.sleep(0.02)
            self.event({**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            self.event({**chunk, "choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.server.left += 1
        self.close_connection = True

    def event(self, data: Mapping[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    with Provider() as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found
        found.shutdown()


@pytest.fixture(scope="module")
def site(provider: Provider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("kinds")
    (folder / "policy.yaml").write_text(POLICY)
    args = ["--enforce-eager", "--chat-template", str(TEMPLATE), "--enable-auto-tool-choice"]
    vllm = {"kind": "vllm", "args": [*args, "--tool-call-parser", "hermes"]}
    gguf = {"kind": "llama.cpp", "binary": str(server()), "model": "demo/smollm2-135m-gguf"}
    hosted = {"kind": "hosted", "model": "openai/gpt-5", "api_key": "sk-provider"}
    hosted |= {"url": f"http://127.0.0.1:{provider.server_port}/v1"}
    engines = [
        {"name": "exact-0", "tier": "exact", "precision": "bf16", "model": "demo/smollm2-135m-bf16", **vllm},
        {"name": "fast-0", "tier": "fast", "precision": "awq", "model": "demo/smollm2-135m-awq", **vllm},
        {"name": "fast-1", "tier": "fast", "precision": "q4_1", **gguf},
        {"name": "overflow-0", "tier": "overflow", "precision": "hosted", **hosted},
    ]
    for engine in engines[:3]:
        engine["port"] = free_port()
    engines[2]["args"] = ["--ctx-size", "8192", "--chat-template-file", str(TEMPLATE)]
    file = {"listen": f"127.0.0.1:{free_port()}", "admin": f"127.0.0.1:{free_port()}", "model": "smollm2"}
    file |= {"policy": "policy.yaml", "tiers": ["overflow", "fast", "exact"], "engines": engines}
    file |= {"health": {"stalled_after": "15s"}, "timeouts": {"first_byte": "20s"}}
    with bring_up(folder, json.dumps(file)) as found:
        until("the SDK is loaded", lambda: found.ready()["overflow"] == "ready", 120)
        yield found


def unit(site: Pair, name: str) -> runfile.UnitState:
    run = runfile.read(site.paths.state)
    assert run is not None
    return next(unit for unit in run.engines if unit.name == name)


def status(site: Pair) -> Mapping[str, Mapping[str, Any]]:
    with httpx2.Client(base_url=site.admin, timeout=10, trust_env=False) as client:
        return {engine["name"]: engine for engine in client.get("/admin/status").json()["engines"]}


@dataclass
class Load:
    """Requests of several clients, one after the other, until it is told to stop."""

    site: Pair
    stop: threading.Event = field(default_factory=threading.Event)
    replies: list[httpx2.Response] = field(default_factory=list)
    critical: list[httpx2.Response] = field(default_factory=list)

    def run(self, replies: list[httpx2.Response], headers: Mapping[str, str], stream: bool) -> None:
        with self.site.client(**headers) as client:
            while not self.stop.is_set():
                replies.append(client.post("/v1/chat/completions", json=chat(max_tokens=12, stream=stream)))

    def by(self, engine: str) -> int:
        return sum(r.headers.get("x-dualgauge-engine") == engine for r in list(self.replies))

    def more_by(self, engine: str, seconds: float = 120) -> None:
        """Wait until the engine has answered two more."""
        before = self.by(engine)
        until(f"{engine} answers", lambda: self.by(engine) >= before + 2, seconds)


@contextmanager
def load(site: Pair) -> Iterator[Load]:
    found = Load(site)
    with ThreadPoolExecutor(5) as pool:
        running = [pool.submit(found.run, found.replies, {}, stream) for stream in (False, True) * 2]
        running.append(pool.submit(found.run, found.critical, CRITICAL, False))
        try:
            yield found
        finally:
            found.stop.set()
            for one in running:
                one.result()
    until("nothing is left", lambda: left(site) == 0, 30)


def left(site: Pair) -> float:
    names = ("dualgauge_leases", "dualgauge_in_flight")
    return sum(sample.value for sample in samples(site.admin) if sample.name in names)


def child_of_gateway(site: Pair) -> int:
    """The process of the hosted engine."""
    run = runfile.read(site.paths.state)
    assert run is not None
    assert run.gateway is not None
    children = Path(f"/proc/{run.gateway.pid}/task/{run.gateway.pid}/children").read_text().split()
    (found,) = [c for c in map(int, children) if b"hosted_server" in Path(f"/proc/{c}/cmdline").read_bytes()]
    return found


def test_both_kinds_serve_one_tier(site: Pair) -> None:
    with load(site) as seen:
        for name in FAST:
            seen.more_by(name)
        until("a critical request is answered", lambda: bool(seen.critical), 60)
    assert {reply.status_code for reply in seen.replies} == {200}
    assert {reply.headers["x-dualgauge-engine"] for reply in seen.critical} == {"exact-0"}


def test_status_shows_every_engine(site: Pair) -> None:
    assert {name: engine["state"] for name, engine in status(site).items()} == dict.fromkeys(
        ("exact-0", *FAST, "overflow-0"), "ready"
    )


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
def test_a_rule_sends_to_a_provider(site: Pair, provider: Provider, stream: bool) -> None:
    before = site.counted("overflow", "prompt")
    with site.client(**OVERFLOW) as client:
        reply = client.post("/v1/chat/completions", json=chat(stream=stream))
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-dualgauge-engine"] == "overflow-0"
    assert "x-dualgauge-degraded" not in reply.headers
    until("it is counted", lambda: site.counted("overflow", "prompt") == before + 11, 10)


@pytest.mark.parametrize("headers", [OVERFLOW, {}], ids=["hosted", "engines"])
def test_tools_are_called(site: Pair, headers: Mapping[str, str]) -> None:
    with site.client(**headers) as client:
        body = chat("What is the weather in Oslo?", tools=TOOLS, max_tokens=96, tool_choice="required")
        reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    (call,) = reply.json()["choices"][0]["message"]["tool_calls"][:1]
    assert call["function"]["name"] == "weather"


def test_a_reader_of_a_hosted_stream_that_leaves_is_missed_by_the_provider(
    site: Pair, provider: Provider
) -> None:
    before = provider.left
    with (
        site.client(**OVERFLOW) as client,
        client.stream("POST", "/v1/chat/completions", json=chat(max_tokens=LONG, stream=True)) as reply,
    ):
        next(reply.iter_bytes())
    until("the provider is left", lambda: provider.left == before + 1, 10)
    until("nothing is left", lambda: left(site) == 0, 10)


@pytest.mark.parametrize(("name", "other"), [FAST, FAST[::-1]])
def test_one_of_a_tier_is_killed_and_the_other_takes_its_requests(site: Pair, name: str, other: str) -> None:
    before = unit(site, name)
    assert before.pid is not None
    with load(site) as seen:
        seen.more_by(name)
        os.kill(before.pid, signal.SIGKILL)
        seen.more_by(other)
        until("it is back", lambda: unit(site, name).state == "ready", RESTART_SECONDS)
        seen.more_by(name)
    assert unit(site, name).restarts == before.restarts + 1
    broken = [reply for reply in seen.replies if reply.status_code != 200 or '"error"' in reply.text]
    assert len(broken) <= 4, "no more than ran on it"
    for reply in seen.replies:
        if reply.status_code == 200 and "event-stream" in reply.headers["content-type"]:
            sent, done = events(reply.text)
            assert done or "error" in sent[-1]
    assert {(r.status_code, r.headers["x-dualgauge-engine"]) for r in seen.critical} == {(200, "exact-0")}


def test_a_llama_server_that_is_stopped_is_left_and_restarted(site: Pair) -> None:
    before = unit(site, "fast-1")
    assert before.pid is not None
    with load(site) as seen:
        seen.more_by("fast-1")
        os.kill(before.pid, signal.SIGSTOP)
        until("the gateway leaves it", lambda: status(site)["fast-1"]["state"] != "ready", 60)
        seen.more_by("fast-0")
        until("it is restarted", lambda: unit(site, "fast-1").restarts == before.restarts + 1, 120)
        until("it is back", lambda: unit(site, "fast-1").state == "ready", 120)
        seen.more_by("fast-1")
    assert {(r.status_code, r.headers["x-dualgauge-engine"]) for r in seen.critical} == {(200, "exact-0")}


def test_without_its_tier_a_rule_uses_the_provider_and_says_so(site: Pair) -> None:
    for name in FAST:
        engine(site, "drain", name)
    try:
        with site.client() as client:
            reply = client.post("/v1/chat/completions", json=chat())
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-dualgauge-engine"] == "overflow-0"
        assert reply.headers["x-dualgauge-degraded"] == "true"
        with site.client(**CRITICAL) as client:
            reply = client.post("/v1/chat/completions", json=chat())
        assert reply.headers["x-dualgauge-engine"] == "exact-0"
    finally:
        for name in FAST:
            engine(site, "resume", name)
    until("the tier is back", lambda: site.ready()["fast"] == "ready", 60)


def engine(site: Pair, order: str, name: str) -> None:
    command = [sys.executable, "-m", "gateway.cli", "engine", order, name]
    subprocess.run(command, cwd=site.paths.folder.parent, check=True, timeout=120)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_process_of_a_hosted_engine_that_fails_is_started_again(site: Pair, how: signal.Signals) -> None:
    before = child_of_gateway(site)
    os.kill(before, how)
    until("it is another", lambda: other(site, before), 120)
    until("it answers", lambda: answered(site), 120)
    time.sleep(LOOK + 1)  # that it answers is seen only now and then


def answered(site: Pair) -> bool:
    with site.client(**OVERFLOW) as client:
        return client.post("/v1/chat/completions", json=chat()).status_code == 200


def other(site: Pair, before: int) -> bool:
    try:
        return child_of_gateway(site) != before
    except (ValueError, OSError):
        return False
