"""Requests that have ended are told to metrics and log some at a time, and none of them is lost or late."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from gateway.telemetry import logs
from gateway.telemetry.ended import MOST, SECONDS, Ended
from gateway.telemetry.logs import AccessLog
from gateway.telemetry.record import Record
from tests.support.client import ask, get
from tests.support.engine import FakeEngine, engines, reply
from tests.support.serving import make, process, serving
from tests.support.shapes import CHAT


def record(number: int = 0) -> Record:
    return Record(
        f"req_{number}", 10.0, 1_790_000_000_000_000_000, "POST", CHAT.path, outcome="ok", ended=10.5
    )


def some(folder: Path) -> tuple[Ended, AccessLog]:
    metrics = make(folder, {"fast": "http://127.0.0.1:9"}).metrics
    access = AccessLog(lambda data: None, logs.encode_lines)
    return Ended(metrics, access), access


async def test_one_alone_is_told_within_milliseconds(tmp_path: Path) -> None:
    ended, access = some(tmp_path)
    ended.add(record())
    assert access.waiting == 0
    await asyncio.sleep(SECONDS * 2)
    assert access.waiting == 1


async def test_many_are_told_at_once(tmp_path: Path) -> None:
    ended, access = some(tmp_path)
    for number in range(MOST + 1):
        ended.add(record(number))
    assert access.waiting == MOST


async def test_the_next_is_told_after_some_were(tmp_path: Path) -> None:
    ended, access = some(tmp_path)
    for number in range(2):
        ended.add(record(number))
        await asyncio.sleep(SECONDS * 2)
    assert access.waiting == 2


@pytest.mark.parametrize("deaf", ["count", "record"])
async def test_one_that_cannot_be_told_takes_no_other_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, deaf: str
) -> None:
    metrics = make(tmp_path, {"fast": "http://127.0.0.1:9"}).metrics
    access = AccessLog(lambda data: None, logs.encode_lines)
    heard: dict[str, list[str]] = {"count": [], "record": []}

    def hear(name: str, one: Record) -> None:
        if name == deaf and one.request_id == "req_1":
            raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")
        heard[name].append(one.request_id)

    monkeypatch.setattr(metrics, "count", partial(hear, "count"))
    monkeypatch.setattr(access, "record", partial(hear, "record"))
    ended = Ended(metrics, access)
    for number in range(3):
        ended.add(record(number))
    await asyncio.sleep(SECONDS * 2)
    ended.add(record(3))
    await asyncio.sleep(SECONDS * 2)
    every = ["req_0", "req_1", "req_2", "req_3"]
    assert heard.pop(deaf) == [one for one in every if one != "req_1"]
    assert list(heard.values()) == [every]
    told = [one.getMessage() for one in caplog.records if one.name == "dualgauge.gateway" and one.exc_info]
    assert told == ["request req_1 is not told of everywhere"]


async def test_a_scrape_knows_of_the_request_before_it(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        await ask(served.port, CHAT.path, CHAT.ask())
        text = (await get(served.admin, "/metrics")).body.decode()
    assert 'dualgauge_tokens_total{kind="completion",tier="fast"}' in text


async def test_the_console_knows_of_the_request_before_it(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    keys = "keys: [{name: ci, key: sk-secret}]"
    async with engines(engine), serving(tmp_path, {"fast": engine}, keys=keys) as served:
        for count in (1, 2):
            await ask(served.port, CHAT.path, CHAT.ask(), headers={"x-api-key": "sk-secret"})
            (tenant,) = (await get(served.admin, "/admin/tenants")).json["tenants"]
            assert tenant["requests"] == count
        rules = (await get(served.admin, "/admin/live")).json["state"]["rules"]
        assert {rule["name"]: rule["requests"] for rule in rules}["everything else"] == count


async def test_the_last_request_before_the_end_has_its_line(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine):
        with process(tmp_path, {"fast": engine}) as served:
            answer = await ask(served.port, CHAT.path, CHAT.ask())
            served.process.terminate()
            await asyncio.to_thread(served.process.wait, 20)
        assert answer.headers["x-request-id"] in served.log.read_text()
