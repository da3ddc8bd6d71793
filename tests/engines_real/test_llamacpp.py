"""A real llama-server with the demo's GGUF file, brought up by `dualgauge up`.

It runs where the environment `llama.cpp` is installed (`dualgauge engines install --kind llama.cpp`, which
compiles for a quarter of an hour), or where LLAMA_SERVER names a server; else it is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from engines import environments, llamacpp, manifest
from engines.home import data_home
from engines.recipes import recipe
from tests.support.serving import free_port

pytestmark = pytest.mark.engines
SECONDS = 120
# Of an enum, since a small model may never end a string that it is free to choose.
CITY = {"type": "string", "enum": ["Oslo", "Rome"]}
PARAMETERS = {
    "type": "object",
    "properties": {"city": CITY},
    "required": ["city"],
    "additionalProperties": False,
}
# Strict, since vLLM else leaves the arguments to the model.
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}]
POLICY = "version: 1\nrules:\n  - {name: all, send: fast, if_unavailable: fail}\n"


# The demo's own knows no tools.
TEMPLATE = Path(__file__).with_name("tools.jinja")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def server() -> Path:
    own = os.environ.get("LLAMA_SERVER")
    if own:
        return Path(own)
    found = environments.find(recipe("llama.cpp"), data_home())
    if found is None:
        pytest.skip("no llama-server: set LLAMA_SERVER, or install the environment llama.cpp")
    return llamacpp.binary_in(found.python)


class Site:
    """A folder with a deployment of one llama-server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.listen, self.engine = free_port(), free_port()
        part = {
            "name": "fast-0",
            "tier": "fast",
            "kind": "llama.cpp",
            "precision": "q4_1",
            "port": self.engine,
        }
        part |= {
            "model": "demo/smollm2-135m-gguf",
            "binary": str(server()),
            "args": ["--ctx-size", "8192", "--chat-template-file", str(TEMPLATE)],
        }
        file = {"listen": f"127.0.0.1:{self.listen}", "admin": f"127.0.0.1:{free_port()}", "model": "smollm2"}
        file |= {"tiers": ["fast"], "policy": "policy.yaml", "engines": [part]}
        (folder / "policy.yaml").write_text(POLICY)
        (folder / "dualgauge.yaml").write_text(json.dumps(file))

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gateway.cli", *args]
        return subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, timeout=SECONDS, check=False
        )

    def figure(self, name: str) -> float:
        text = httpx2.get(f"http://127.0.0.1:{self.engine}/metrics", trust_env=False).text
        return float(next(line for line in text.splitlines() if line.startswith(f"{name} ")).split()[1])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("llamacpp"))
    result = site.run("up", "-d")
    assert result.returncode == 0, result.stdout + result.stderr
    yield site
    site.run("down", "--now")


@pytest.fixture
def client(site: Site) -> Iterator[httpx2.Client]:
    with httpx2.Client(
        base_url=f"http://127.0.0.1:{site.listen}", timeout=SECONDS, trust_env=False
    ) as client:
        yield client


def asked(text: str = "Say hello.", **fields: object) -> dict[str, object]:
    messages = [{"role": "user", "content": text}]
    return {"model": "smollm2", "messages": messages, "max_tokens": 24, "temperature": 0, **fields}


def test_it_answers_counts_and_names_its_model(client: httpx2.Client) -> None:
    reply = client.post("/v1/chat/completions", json=asked())
    body = reply.json()
    assert reply.status_code == 200
    assert body["choices"][0]["message"]["content"]
    assert body["usage"]["prompt_tokens"] > 0
    assert 0 < body["usage"]["completion_tokens"] <= 24
    folder = data_home() / "models" / "smollm2-135m-gguf"
    assert reply.headers["x-dualgauge-model-manifest"] == manifest.digest(folder)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_stream_has_its_usage_where_it_was_asked_for(client: httpx2.Client, wanted: bool) -> None:
    more = {"stream_options": {"include_usage": True}} if wanted else {}
    text = client.post("/v1/chat/completions", json=asked(stream=True, **more)).text
    events = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert any(chunk["choices"] == [] and chunk.get("usage") for chunk in chunks) is wanted
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called(client: httpx2.Client, stream: bool) -> None:
    body = asked(f"Repeat exactly this and nothing else:\n{CALL}", tools=TOOLS, stream=stream)
    reply = client.post("/v1/chat/completions", json=body | {"max_tokens": 96, "tool_choice": "required"})
    assert reply.status_code == 200, reply.text
    assert '"tool_calls"' in reply.text
    assert '"weather"' in reply.text


def test_anthropics_messages_are_answered(client: httpx2.Client) -> None:
    reply = client.post("/v1/messages", json=asked())
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["output_tokens"] > 0


def test_a_reader_that_leaves_ends_the_work(client: httpx2.Client, site: Site) -> None:
    body = asked("Write a very long story.", stream=True, ignore_eos=True) | {"max_tokens": 6000}
    with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        parts = reply.iter_bytes()  # which closes the stream when it is let go
        next(parts)
        assert site.figure("llamacpp:requests_processing") == 1
    end = time.monotonic() + 10
    while site.figure("llamacpp:requests_processing"):
        assert time.monotonic() < end, "it goes on for nobody"
        time.sleep(0.1)


def test_prompts_of_others_cannot_be_seen(site: Site) -> None:
    assert httpx2.get(f"http://127.0.0.1:{site.engine}/slots", trust_env=False).status_code != 200


def test_status_has_its_figures(site: Site) -> None:
    end = time.monotonic() + 10
    while True:  # they are as old as the last probe
        (engine,) = json.loads(site.run("status", "--json").stdout)["engines"]
        assert engine["state"] == "ready"
        if (engine["running"], engine["waiting"]) == (0, 0):
            return
        assert time.monotonic() < end, engine


def test_a_bad_request_keeps_the_engines_words_in_our_shape(client: httpx2.Client) -> None:
    reply = client.post("/v1/chat/completions", json=asked(grammar="this is no grammar"))
    assert reply.status_code == 400
    assert reply.json()["error"]["message"]
