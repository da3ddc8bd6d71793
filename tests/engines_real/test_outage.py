"""The exact engine is killed in the middle of a stream: what clients get meanwhile, and its return."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx2
import pytest

from engines.runfile import UnitState
from tests.engines_real.asks import CODE, CRITICAL, LONG, SHAPES, Json, chat, events
from tests.engines_real.pair import MODEL, Pair, until

pytestmark = pytest.mark.engines
RESTART_SECONDS = 600
STREAMED = 40


@dataclass
class Reader:
    """Streams from the fast engine, one after the other, until it is told to stop."""

    pair: Pair
    begun: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)
    texts: list[str] = field(default_factory=list)
    """Every stream, whole."""

    def run(self) -> None:
        body = chat(model=f"{MODEL}:fast", max_tokens=STREAMED, ignore_eos=True, stream=True)
        with self.pair.client() as client:
            while not self.stop.is_set():
                with client.stream("POST", "/v1/chat/completions", json=body) as reply:
                    parts = []
                    for part in reply.iter_text():
                        parts.append(part)
                        self.begun.set()
                    self.texts.append("".join(parts))


@dataclass(frozen=True)
class Outage:
    """What was seen from the kill to the return."""

    before: UnitState
    meanwhile: UnitState
    after: UnitState
    broken: str
    beside: list[str]
    beside_by_return: int
    degraded: httpx2.Response
    critical: httpx2.Response
    pinned: httpx2.Response
    message: httpx2.Response
    ready: httpx2.Response
    recovered: httpx2.Response


@pytest.fixture(scope="module")
def outage(pair: Pair) -> Iterator[Outage]:
    reader = Reader(pair)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(reader.run)
        try:
            yield _observe(pair, reader)
        finally:
            reader.stop.set()
            reading.result()
            until("the engine is back", lambda: pair.ready()["exact"] == "ready", RESTART_SECONDS)


def _observe(pair: Pair, reader: Reader) -> Outage:
    def ask(path: str = "/v1/chat/completions", body: Json | None = None, **headers: str) -> httpx2.Response:
        with pair.client() as client:
            return client.post(path, json=body or chat(), headers=headers)

    assert reader.begun.wait(60)
    before = pair.state("exact")
    assert before.pid is not None
    long = chat(model=f"{MODEL}:exact", max_tokens=LONG, ignore_eos=True, stream=True)
    with pair.client() as client, client.stream("POST", "/v1/chat/completions", json=long) as reply:
        parts = reply.iter_text()
        begun = next(parts)
        os.kill(before.pid, signal.SIGKILL)
        broken = begun + "".join(parts)
    replies = {
        "degraded": ask(body=chat(CODE)),
        "critical": ask(**CRITICAL),
        "pinned": ask(body=chat(model=f"{MODEL}:exact")),
        "message": ask("/v1/messages", **CRITICAL),
    }
    with pair.client() as client:
        replies["ready"] = client.get("/readyz")
    until("`up` sees that it ended", lambda: pair.state("exact").pid != before.pid, 60)
    meanwhile = pair.state("exact")
    until("the engine is back", lambda: pair.ready()["exact"] == "ready", RESTART_SECONDS)
    by_return = len(reader.texts)
    until("`up` calls it ready", lambda: pair.state("exact").state == "ready", RESTART_SECONDS)
    replies["recovered"] = ask(**CRITICAL)
    until("one more stream ends", lambda: len(reader.texts) > by_return, 60)
    after, beside = pair.state("exact"), list(reader.texts)
    return Outage(before, meanwhile, after, broken, beside, by_return, **replies)


def error_of(reply: httpx2.Response) -> Json:
    body: Json = reply.json()["error"]
    return body


def test_the_stream_that_broke_ends_with_one_error(outage: Outage) -> None:
    sent, done = events(outage.broken)
    assert not done
    assert sent[0]["choices"]
    assert [index for index, event in enumerate(sent) if "error" in event] == [len(sent) - 1]
    assert sent[-1]["error"]["message"]


def test_streams_of_the_other_engine_go_on(outage: Outage) -> None:
    assert outage.beside_by_return >= 1
    for text in outage.beside:
        sent, done = events(text)
        assert done
        assert not any("error" in event for event in sent)
        assert sent[-1]["choices"][0]["finish_reason"] == "length"


def test_code_is_degraded_and_says_so(outage: Outage) -> None:
    reply = outage.degraded
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-dualgauge-tier"] == "fast"
    assert reply.headers["x-dualgauge-rule"] == "code"
    assert reply.headers["x-dualgauge-degraded"] == "true"
    assert "degrade" in reply.headers["x-dualgauge-reason"]
    assert SHAPES["chat"].text(reply.json())


@pytest.mark.parametrize("which", ["critical", "pinned"])
def test_what_must_be_exact_is_refused(outage: Outage, which: str) -> None:
    reply: httpx2.Response = getattr(outage, which)
    assert reply.status_code == 503
    assert error_of(reply)["code"] == "no_engine_ready"
    assert int(reply.headers["retry-after"]) > 0
    assert "x-dualgauge-engine" not in reply.headers


def test_anthropics_clients_are_told_of_an_overload(outage: Outage) -> None:
    assert outage.message.status_code == 529
    assert outage.message.json()["type"] == "error"
    assert error_of(outage.message)["type"] == "overloaded_error"
    assert int(outage.message.headers["retry-after"]) > 0


def test_readiness_names_the_tier(outage: Outage) -> None:
    assert outage.ready.status_code == 503
    tiers = outage.ready.json()["tiers"]
    assert tiers["fast"] == "ready"
    assert tiers["exact"].startswith("exact-0: ")


def test_up_starts_it_again(outage: Outage) -> None:
    assert outage.meanwhile.state != "ready"
    assert outage.after.state == "ready"
    assert outage.after.restarts == outage.before.restarts + 1
    assert outage.after.pid not in (None, outage.before.pid)


def test_it_serves_again(outage: Outage) -> None:
    assert outage.recovered.status_code == 200
    assert outage.recovered.headers["x-dualgauge-tier"] == "exact"
