"""1,000 reloads, a third of them of broken files, under 200 streams: no stream notices, no memory is kept."""

import asyncio
import gc
import logging
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway import snapshots
from tests.support.client import Wire, ask, until
from tests.support.engine import FakeEngine, engines
from tests.support.serving import Served, serving

RELOADS = 1000
WARM = 200
STREAMS = 200
# Arenas come and go; a policy of 30 kB that is kept at each reload would show as 30 MiB.
GROWTH_MIB = 4
POLICY = """version: 1
classes:
  critical: {any: [{header: {x-criticality: [high, critical]}}, {metadata: {critical: "true"}}]}
  long: {signal: prompt_tokens, at_least: 64k}
rules:
  - {name: critical, when: critical, send: exact, if_unavailable: degrade}
  - {name: long, when: long, send: fast, if_unavailable: fail}
  - {name: everything else, send: fast, if_unavailable: fail}
plans: {default: {requests: 1M/s, concurrent: 2000}}
shadow: candidate.yaml
rollout: 50%
# edition NUMBER
"""
CANDIDATE = """version: 1
rules:
  - {name: streamed, when: {signal: stream}, send: fast}
  - {name: candidate, send: fast}
# edition NUMBER
"""
KEYS = "keys: [{name: a, key: sk-a}] # edition NUMBER"
FILES = {"policy.yaml": POLICY, "candidate.yaml": CANDIDATE, "keys.yaml": KEYS}
BROKEN = {
    "policy.yaml": POLICY.replace("send: exact", "send: exat"),
    "candidate.yaml": CANDIDATE.replace("signal: stream", "signal: straem"),
    "keys.yaml": KEYS.replace("name:", "nmae:"),
}


@pytest.fixture(autouse=True)
def _enough_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(snapshots, "FILE_POLL_SECONDS", 3600)
    logging.disable()  # else pytest keeps every record
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    yield
    logging.disable(logging.NOTSET)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def event(number: int) -> bytes:
    return b'data: {"choices":[{"index":0,"delta":{"content":"%d "}}]}\n\n' % number


def resident_mib() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


async def reloads(served: Served, numbers: range) -> int:
    """That many, a third of them of a broken file; how many were refused."""
    refused = 0
    async with await Wire.open(served.admin) as wire:
        for number in numbers:
            name = list(FILES)[number // 3 % 3]
            texts = BROKEN if number % 3 == 0 else FILES
            text = texts[name].replace("NUMBER", str(number))
            (served.folder / name).write_text(text)
            wire.send("/admin/reload", b"")
            status = (await wire.reply()).status
            assert status == (400 if number % 3 == 0 else 200)
            refused += status == 400
    return refused


async def test_a_storm_of_reloads_under_streams(tmp_path: Path) -> None:
    enough = asyncio.Event()
    sent: dict[Any, int] = {}

    async def slow(exchange: Any) -> None:
        exchange.head()
        number = 0
        while not enough.is_set():
            exchange.chunk(event(number))
            number += 1
            await asyncio.sleep(0.5)
        exchange.chunk(b"data: [DONE]\n\n")
        exchange.end()
        sent[exchange.received.json["messages"][0]["content"]] = number

    async def one(port: int, number: int) -> tuple[str, bytes]:
        body = {"model": "smollm2", "stream": True, "messages": [{"role": "user", "content": f"s{number}"}]}
        answer = await ask(port, "/v1/chat/completions", body, headers={"x-api-key": "sk-a"})
        assert answer.status == 200
        assert answer.complete
        return answer.headers["x-dualgauge-rule"], bytes(answer.body)

    engine = FakeEngine(slow)
    (tmp_path / "candidate.yaml").write_text(CANDIDATE)
    log = {"path": "decisions.jsonl"}
    options: dict[str, Any] = {"policy": POLICY, "keys": KEYS, "decision_log": log}
    async with engines(engine), serving(tmp_path, {"fast": engine}, **options) as served:
        asking = [asyncio.create_task(one(served.port, number)) for number in range(STREAMS)]
        await until(lambda: engine.generations == STREAMS, 20)
        await reloads(served, range(1, WARM + 1))
        warm = resident_mib()
        refused = await reloads(served, range(WARM + 1, WARM + RELOADS + 1))
        assert refused >= RELOADS // 3
        assert resident_mib() - warm < GROWTH_MIB
        assert served.in_flight == STREAMS
        enough.set()
        answers = await asyncio.gather(*asking)
        assert {rule for rule, _ in answers} == {"everything else", "streamed"}
        for number, (_, body) in enumerate(answers):
            count = sent[f"s{number}"]
            assert body == b"".join(map(event, range(count))) + b"data: [DONE]\n\n"
        del asking
        await until(lambda: served.clean)
    lines = (tmp_path / "decisions.jsonl").read_bytes().count(b'"kind":"decision"')
    assert lines == STREAMS
