"""How `dualgauge engine …` reaches the `up` that runs: a unix socket beside the run file, for its owner.

One JSON line asks, `{"do": "restart", "engine": "fast-0", "now": false}`; the answer is lines of `{"say": …}`
and a last one with `done` or `error`. Whoever goes away while requests are still waited for has changed their
mind: the engine gets requests again. What has begun after that is brought to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

LINE = 64 << 10
# The address by which the socket was bound means nothing later: it is removed by its path, here.
_OWN_CLEANUP: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}

Do = Literal["drain", "resume", "restart", "sleep", "wake"]


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`now`: do not wait for requests that run."""

    do: Do
    engine: str
    now: bool = False


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line back; the last has `done` or `error`."""

    say: str | None = None
    done: str | None = None
    error: str | None = None


Say = Callable[[str], None]
Handle = Callable[[Order, Say], Awaitable[str]]
"""Carries an order out and tells what came of it. Raises ControlError."""
Waits = Callable[[str], bool]
"""Whether an engine's operation only waits for requests yet, and may be given up."""


class ControlError(Exception):
    """What was asked was not done; the message says why."""


class _Server:
    def __init__(self, handle: Handle, waits: Waits) -> None:
        self._handle = handle
        self._waits = waits

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def say(text: str) -> None:
            self._write(writer, Answer(say=text))

        try:
            order = msgspec.json.decode(await reader.readline(), type=Order)
        except (msgspec.DecodeError, ValueError) as error:
            self._write(writer, Answer(error=f"this is no order: {error}"))
        else:
            self._write(writer, await self._do(order, say, reader))
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()

    async def _do(self, order: Order, say: Say, reader: asyncio.StreamReader) -> Answer:
        doing = asyncio.ensure_future(self._handle(order, say))
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done() and self._waits(order.engine):
                doing.cancel()
            return Answer(done=await doing)
        except ControlError as error:
            return Answer(error=str(error))
        except asyncio.CancelledError:
            doing.cancel()
            await asyncio.gather(doing, return_exceptions=True)
            return Answer(error="it was cut short: `dualgauge up` ends, or you left")
        finally:
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)

    def _write(self, writer: asyncio.StreamWriter, answer: Answer) -> None:
        if not writer.is_closing():
            writer.write(msgspec.json.encode(answer) + b"\n")


@asynccontextmanager
async def listening(path: Path, handle: Handle, waits: Waits) -> AsyncIterator[None]:
    """Take orders while the block runs; those under way at its end are cancelled and waited for."""
    server = _Server(handle, waits)
    running: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(server.serve(reader, writer))
        running.add(task)
        task.add_done_callback(running.discard)

    listener = await asyncio.start_unix_server(accept, sock=_bound(path), limit=LINE, **_OWN_CLEANUP)
    try:
        yield
    finally:
        listener.close()
        for task in tuple(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        _remove(path)


def _bound(path: Path) -> socket.socket:
    _remove(path)
    bound = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    try:
        with _near(path) as near:
            bound.bind(near)
    except OSError:
        bound.close()
        raise
    finally:
        os.umask(mask)
    return bound


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def ask(path: Path, order: Order, say: Say) -> str:
    """Have the `up` that listens there carry the order out. Raises ControlError, OSError where none does."""
    with socket.socket(socket.AF_UNIX) as connection, _near(path) as near:
        connection.connect(near)
        connection.sendall(msgspec.json.encode(order) + b"\n")
        with connection.makefile("rb") as lines:
            for line in lines:
                answer = msgspec.json.decode(line, type=Answer)
                if answer.say is not None:
                    say(answer.say)
                elif answer.done is not None:
                    return answer.done
                else:
                    raise ControlError(answer.error or "no reason was given")
    raise ControlError("`dualgauge up` ended before it had done that")


@contextmanager
def _near(path: Path) -> Iterator[str]:
    """The path by way of its folder's descriptor: an address of a unix socket has 107 bytes at most."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
