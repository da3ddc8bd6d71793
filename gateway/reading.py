"""Reading bodies: small ones at once, large ones in a thread, so that nobody's tokens wait for them.

What takes long of a large body is done by a few calls in C, each below 15 ms for the largest that is taken;
between them the event loop goes on.
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
    return dialect.parse(Body(raw), bounds)


class Reader:
    """One thread reads the large bodies of a process, in turn."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bodies")

    async def read(self, dialect: Dialect, raw: bytes, bounds: Bounds) -> Request:
        """Raises InvalidRequest, which names the field."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, parse, dialect, raw, bounds)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
