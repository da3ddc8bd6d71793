"""Large bodies are read beside the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gateway.config import Bounds
from gateway.dialects.base import Request
from gateway.dialects.body import Body
from gateway.dialects.openai_chat import OpenAIChat
from gateway.errors import InvalidRequest
from gateway.reading import Reader

RAW = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}]}'


class Held(OpenAIChat):
    """Reads nothing before it is let to."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def parse(self, body: Body, bounds: Bounds) -> Request:
        assert self.go.wait(20)
        return super().parse(body, bounds)


async def test_the_loop_goes_on_while_a_body_is_read() -> None:
    reader, dialect = Reader(), Held()
    reading = asyncio.ensure_future(reader.read(dialect, RAW, Bounds()))
    await asyncio.sleep(0)
    assert not reading.done()
    dialect.go.set()
    assert (await reading).model == "m"
    reader.close()


async def test_what_is_wrong_with_it_is_told() -> None:
    reader = Reader()
    with pytest.raises(InvalidRequest, match="messages is missing"):
        await reader.read(OpenAIChat(), b'{"model": "m"}', Bounds())
    reader.close()


async def test_one_that_nobody_waits_for_holds_up_no_end() -> None:
    reader, dialect = Reader(), Held()
    reading = asyncio.ensure_future(reader.read(dialect, RAW, Bounds()))
    behind = asyncio.ensure_future(reader.read(dialect, RAW, Bounds()))
    await asyncio.sleep(0)
    reading.cancel()
    behind.cancel()
    reader.close()
    dialect.go.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    with pytest.raises(asyncio.CancelledError):
        await behind
