"""`dualgauge engine restart` of a real engine in the middle of streams, and of requests for its tier."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx2
import pytest

from engines import runfile
from engines.runfile import UnitState
from tests.engines_real.asks import chat, events
from tests.engines_real.pair import MODEL, Pair, until

pytestmark = pytest.mark.engines
STREAMS = 8
# Long enough that all still run when the command has started, on a machine of any speed.
STREAMED = 800
RESTART_SECONDS = 600


@dataclass(frozen=True)
class Restart:
    """What was seen of it. `meanwhile` is the answer to a request for the tier while the engine was away."""

    said: str
    code: int
    texts: list[str]
    meanwhile: httpx2.Response
    before: UnitState
    after: UnitState


@pytest.fixture(scope="module")
def restart(pair: Pair) -> Restart:
    run = runfile.read(pair.paths.state)
    assert run is not None
    begun = threading.Barrier(STREAMS + 1, timeout=120)

    def read(_: int) -> str:
        body = chat(model=f"{MODEL}:fast", max_tokens=STREAMED, ignore_eos=True, stream=True)
        with pair.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as reply:
            parts = reply.iter_text()
            first = next(parts)
            begun.wait()
            return first + "".join(parts)

    before = pair.state("fast")
    command = [sys.executable, "-m", "gateway.cli", "engine", "restart", before.name, "--config", run.config]
    with ThreadPoolExecutor(STREAMS) as pool:
        reading = [pool.submit(read, index) for index in range(STREAMS)]
        begun.wait()
        restarting = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True
        )
        until("it is ended", lambda: pair.state("fast").pid != before.pid, RESTART_SECONDS)
        with pair.client() as client:
            meanwhile = client.post("/v1/chat/completions", json=chat(model=f"{MODEL}:fast"))
        said, _ = restarting.communicate(timeout=RESTART_SECONDS)
        texts = [task.result() for task in reading]
    until("it serves again", lambda: pair.ready()["fast"] == "ready", 60)
    return Restart(said, restarting.returncode, texts, meanwhile, before, pair.state("fast"))


def test_no_stream_breaks(restart: Restart) -> None:
    for text in restart.texts:
        sent, done = events(text)
        assert done
        assert not any("error" in event for event in sent)
        assert sent[-1]["choices"][0]["finish_reason"] == "length"


def test_it_tells_what_it_waits_for_and_what_came_of_it(restart: Restart) -> None:
    assert restart.code == 0, restart.said
    assert f"requests still run on {restart.before.name}" in restart.said
    assert restart.said.endswith(f"{restart.before.name} was restarted and serves\n")


def test_meanwhile_its_tier_is_not_ready(restart: Restart) -> None:
    assert restart.meanwhile.status_code == 503
    assert "by `dualgauge up`" in restart.meanwhile.json()["error"]["message"]


def test_it_is_another_process_that_was_proven(restart: Restart) -> None:
    assert restart.after.state == "ready"
    assert restart.after.pid not in (None, restart.before.pid)
    assert restart.after.restarts == restart.before.restarts + 1
    assert any(note.startswith("KV cache: ") for note in restart.after.notes)
