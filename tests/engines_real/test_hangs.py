"""The exact engine stops working while it lives: its server is stopped, or what computes behind a server that
still answers `/health`. Nothing critical may land on 4 bits meanwhile, and nothing of it may be left."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest

from engines.runfile import UnitState
from tests.engines_real.asks import CODE, CRITICAL, LONG, chat
from tests.engines_real.pair import MODEL, Pair, samples, until

pytestmark = pytest.mark.engines
RESTART_SECONDS = 600
PATIENCE = 5
NOTICED_SECONDS = 90
"""`health.stalled_after` is 30 s by default; a machine with two cores is slow beside that."""


@dataclass
class Critical:
    """Critical requests, one after the other, until it is told to stop. Their client does not wait for long:
    one that an engine keeps is given up."""

    pair: Pair
    stop: threading.Event = field(default_factory=threading.Event)
    replies: list[httpx2.Response] = field(default_factory=list)

    def run(self) -> None:
        while not self.stop.is_set():
            with self.pair.client(**CRITICAL) as client, contextlib.suppress(httpx2.TimeoutException):
                self.replies.append(client.post("/v1/chat/completions", json=chat(), timeout=PATIENCE))
            self.stop.wait(0.2)

    def got(self, status: int) -> bool:
        return any(reply.status_code == status for reply in self.replies)


@contextlib.contextmanager
def asking(pair: Pair) -> Iterator[Critical]:
    critical = Critical(pair)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(critical.run)
        try:
            yield critical
        finally:
            critical.stop.set()
            running.result()


def core_of(pid: int) -> int:
    """The process of a vLLM server that computes."""
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    (core,) = [c for c in children if b"EngineCore" in Path(f"/proc/{c}/cmdline").read_bytes()]
    return core


def degraded(pair: Pair) -> bool:
    """Whether a request for code is answered by fast, and says so."""
    with pair.client() as client:
        reply = client.post("/v1/chat/completions", json=chat(CODE))
    return reply.status_code == 200 and reply.headers.get("x-dualgauge-degraded") == "true"


def left(pair: Pair) -> float:
    """Leases and requests that the gateway still has."""
    names = ("dualgauge_leases", "dualgauge_in_flight")
    return sum(sample.value for sample in samples(pair.admin) if sample.name in names)


@dataclass(frozen=True)
class Seen:
    """What was seen until the exact engine was ready again."""

    before: UnitState
    told: str
    health: int
    degraded: bool
    critical: list[httpx2.Response]
    after: UnitState


@pytest.fixture(scope="module")
def stopped(pair: Pair) -> Seen:
    """The server is stopped (SIGSTOP), and goes on before anybody restarts it."""
    before = pair.state("exact")
    assert before.pid is not None
    with asking(pair) as critical:
        os.kill(before.pid, signal.SIGSTOP)
        try:
            until("the gateway leaves it", lambda: pair.ready()["exact"] != "ready", NOTICED_SECONDS)
            told, moved = pair.ready()["exact"], degraded(pair)
            until("one is refused", lambda: critical.got(503), 3 * PATIENCE)
        finally:
            os.kill(before.pid, signal.SIGCONT)
        until("the engine is back", lambda: pair.ready()["exact"] == "ready", RESTART_SECONDS)
        first = len(critical.replies)
        until("one more is answered", lambda: len(critical.replies) > first + 1, 120)
    until("nothing is left", lambda: left(pair) == 0, 60)
    return Seen(before, told, 0, moved, critical.replies, pair.state("exact"))


@pytest.fixture(scope="module")
def hung(pair: Pair, stopped: Seen) -> Seen:
    """What computes is stopped while it has a request; the server answers on."""
    assert stopped.after.pid is not None
    before = pair.state("exact")
    assert before.pid is not None
    body = chat(model=f"{MODEL}:exact", max_tokens=LONG, ignore_eos=True, stream=True)
    with asking(pair) as critical, pair.client() as client:
        with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            parts = reply.iter_text()
            next(parts)
            os.kill(core_of(before.pid), signal.SIGSTOP)
            health = httpx2.get(f"{pair.engines['exact']}/health", timeout=5, trust_env=False).status_code
            until("it is restarted", lambda: "no new token" in (pair.state("exact").error or ""), 240)
            for _ in parts:
                pass
        told, moved = pair.state("exact").error or "", degraded(pair)
        until("one is refused", lambda: critical.got(503), 3 * PATIENCE)
        until("the engine is back", lambda: pair.ready()["exact"] == "ready", RESTART_SECONDS)
        until("`up` calls it ready", lambda: pair.state("exact").state == "ready", RESTART_SECONDS)
        first = len(critical.replies)
        until("one more is answered", lambda: len(critical.replies) > first + 1, 120)
    until("nothing is left", lambda: left(pair) == 0, 60)
    return Seen(before, told, health, moved, critical.replies, pair.state("exact"))


@pytest.fixture(params=["stopped", "hung"])
def seen(request: pytest.FixtureRequest) -> Seen:
    found: Seen = request.getfixturevalue(request.param)
    return found


def test_no_critical_request_lands_on_4_bits(seen: Seen) -> None:
    for reply in seen.critical:
        if reply.status_code == 200:
            assert reply.headers["x-dualgauge-tier"] == "exact"
        else:
            assert reply.status_code in (502, 503)
    assert {200, 503} <= {reply.status_code for reply in seen.critical}


def test_critical_requests_are_served_again(seen: Seen) -> None:
    assert seen.critical[-1].status_code == 200


def test_code_is_degraded_meanwhile(seen: Seen) -> None:
    assert seen.degraded


def test_a_stopped_server_is_left_and_taken_back(stopped: Seen) -> None:
    assert stopped.told.startswith("exact-0: ")
    assert (stopped.after.pid, stopped.after.restarts) == (stopped.before.pid, stopped.before.restarts)


def test_c31_one_that_hangs_behind_a_good_health_is_restarted(hung: Seen) -> None:
    assert hung.health == 200
    assert "no new token for" in hung.told
    assert hung.after.restarts == hung.before.restarts + 1
    assert hung.after.pid not in (None, hung.before.pid)
