"""Reading bodies: small ones at once, large ones in a thread, so that nobody's tokens wait for them.

What takes long of a large body is done by a few calls in C, which hold the interpreter: some 15 ms each for
the largest text, some 60 ms for the most values that are taken. Between them the event loop goes on.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from gateway.config import Bounds
from gateway.dialects.base import Dialect, Request
from gateway.dialects.body import Body

AT_ONCE = 64 << 10
"""Bytes that are read on the event loop: about 0.3 ms, of which a thread would save little."""


def parse(dialect: Dialect, raw: bytes, bounds: Bounds) -> Request:
    """Raises InvalidRequest, which names the field."""
    return dialect.parse(Body(raw, bounds.nodes), bounds)


def _parse_all(dialect: Dialect, raw: bytes, bounds: Bounds) -> Request:
    """And read what is said, which the decision asks for: of many turns that takes long too."""
    request = parse(dialect, raw, bounds)
    request.conversation()
    return request


class Reader:
    """One thread reads the large bodies of a process, in turn."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bodies")
        # Whoever waits does so here: what waits in the thread's queue is kept, though its client has left.
        self._turn = asyncio.Semaphore(1)

    async def read(self, dialect: Dialect, raw: bytes, bounds: Bounds) -> Request:
        """Raises InvalidRequest, which names the field."""
        await self._turn.acquire()
        loop = asyncio.get_running_loop()
        reading = loop.run_in_executor(self._thread, _parse_all, dialect, raw, bounds)
        reading.add_done_callback(self._done)
        return await asyncio.shield(reading)

    def _done(self, reading: asyncio.Future[Request]) -> None:
        """The thread is free, whether or not somebody still waits for what it read."""
        self._turn.release()
        if not reading.cancelled():
            reading.exception()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
