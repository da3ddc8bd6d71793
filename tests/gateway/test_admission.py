"""What one process has no room for is refused at once; what is there goes on."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import Wire, ask, until
from tests.support.engine import FakeEngine, engines, hang, reply
from tests.support.serving import Served, serving
from tests.support.shapes import CHAT, IDS, SHAPES, Shape, check_error

LARGE = "x" * 700_000
ROOM = {"requests": 100, "body": "1MiB", "memory": "1MiB"}


def large(**fields: Any) -> dict[str, Any]:
    return CHAT.ask(messages=[{"role": "user", "content": LARGE}], **fields)


@asynccontextmanager
async def busy(
    folder: Path, bounds: dict[str, Any], body: dict[str, Any], shape: Shape = CHAT
) -> AsyncIterator[tuple[Served, FakeEngine]]:
    """A gateway with one request, whose client leaves at the end; then nothing is left of it."""
    engine = FakeEngine(hang)
    async with engines(engine), serving(folder, {"fast": engine}, bounds=bounds) as served:
        async with await Wire.open(served.port) as wire:
            wire.send(shape.path, body)
            await until(lambda: engine.generations == 1)
            yield served, engine
        await until(lambda: served.clean)


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
async def test_more_requests_than_it_takes_are_told_to_come_back(tmp_path: Path, shape: Shape) -> None:
    async with busy(tmp_path, {"requests": 1}, shape.ask(), shape) as (served, engine):
        answer = await ask(served.port, shape.path, shape.ask())
        code = None if shape.anthropic else "overloaded"
        check_error(answer, 503, shape=shape, code=code)
        assert engine.generations == 1


async def test_a_place_that_is_left_is_taken(tmp_path: Path) -> None:
    engine = FakeEngine(hang)
    async with engines(engine), serving(tmp_path, {"fast": engine}, bounds={"requests": 1}) as served:
        async with await Wire.open(served.port) as wire:
            wire.send(CHAT.path, CHAT.ask())
            await until(lambda: engine.generations == 1)
        await until(lambda: served.clean)
        engine.script = reply(CHAT.reply)
        assert (await ask(served.port, CHAT.path, CHAT.ask())).status == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/v1/models"])
async def test_what_needs_no_engine_is_answered_all_the_same(tmp_path: Path, path: str) -> None:
    async with busy(tmp_path, {"requests": 1}, CHAT.ask()) as (served, _):
        answer = await ask(served.port, path, method="GET")
        assert answer.json.get("error") is None


async def test_large_bodies_have_a_room_of_their_own(tmp_path: Path) -> None:
    async with busy(tmp_path, ROOM, large()) as (served, engine), await Wire.open(served.port) as small:
        check_error(await ask(served.port, CHAT.path, large()), 503, code="overloaded")
        small.send(CHAT.path, CHAT.ask())
        await until(lambda: engine.generations == 2)


async def test_the_refusal_does_not_wait_for_the_body(tmp_path: Path) -> None:
    async with busy(tmp_path, ROOM, large()) as (served, _), await Wire.open(served.port) as other:
        other.raw(b"POST %b HTTP/1.1\r\nhost: h\r\ncontent-length: 700000\r\n\r\n" % CHAT.path.encode())
        assert (await other.reply()).status == 503


async def test_a_body_of_unknown_length_counts_as_the_largest_until_it_is_read(tmp_path: Path) -> None:
    engine = FakeEngine(hang)
    async with engines(engine), serving(tmp_path, {"fast": engine}, bounds=ROOM) as served:
        async with await Wire.open(served.port) as wire:
            head = b"POST %b HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n" % CHAT.path.encode()
            wire.raw(head)
            await until(lambda: served.gateway.load.bytes == 1 << 20)
            check_error(await ask(served.port, CHAT.path, large()), 503, code="overloaded")
            body = b'{"model":"smollm2","messages":[{"role":"user","content":"hi"}]}'
            wire.raw(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
            await until(lambda: engine.generations == 1)
            assert served.gateway.load.bytes == len(body)
        await until(lambda: served.clean)
