"""What a parent and its worker say to each other, over a pair of sockets: JSON behind its length.

The parent asks, the worker answers each question, in any order; the worker also tells things unasked. The end
of one process is the end of the channel, which the other one sees.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import msgspec

from gateway.site import SiteError

logger = logging.getLogger("dualgauge.gateway")

LENGTH = struct.Struct(">I")
OK = 200
TOLD = 0
"""The number of what is no answer."""

Answer = Callable[[str, list[Any]], Awaitable[bytes]]
"""(what, arguments) -> JSON. Raises SiteError."""


class Question(msgspec.Struct, frozen=True, array_like=True):
    number: int
    what: str
    arguments: list[Any]


class Told(msgspec.Struct, frozen=True, array_like=True):
    """An answer, its status 200, or an error's status and message; with the number 0, `what` was told
    unasked."""

    number: int
    status: int
    body: msgspec.Raw
    what: str = ""


_question = msgspec.json.Decoder(Question)
_told = msgspec.json.Decoder(Told)


async def _frame(reader: asyncio.StreamReader) -> bytes:
    """Raises asyncio.IncompleteReadError, OSError at the channel's end."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return await reader.readexactly(length)


def _framed(message: object) -> bytes:
    data = msgspec.json.encode(message)
    return LENGTH.pack(len(data)) + data


class Asking:
    """The parent's end. `heard` is called with what the worker tells unasked. `run` it to have answers."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        heard: Callable[[str, msgspec.Raw], None],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._heard = heard
        self._numbers = count(TOLD + 1)
        self._open: dict[int, asyncio.Future[bytes]] = {}
        self._ended = False

    async def run(self) -> None:
        """Until the channel's end."""
        try:
            while True:
                told = _told.decode(await _frame(self._reader))
                if told.number == TOLD:
                    self._hear(told)
                elif (waiting := self._open.pop(told.number, None)) is not None and not waiting.done():
                    if told.status == OK:
                        waiting.set_result(bytes(told.body))
                    else:
                        message = msgspec.json.decode(told.body, type=str)
                        waiting.set_exception(SiteError(told.status, message))
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self._ended = True
            self._writer.close()
            for waiting in self._open.values():
                if not waiting.done():
                    waiting.set_exception(EOFError())
            self._open.clear()

    def _hear(self, told: Told) -> None:
        try:
            self._heard(told.what, told.body)
        except Exception:
            logger.exception("what a worker tells of `%s` cannot be used", told.what)

    async def ask(self, what: str, *arguments: object) -> bytes:
        """The answer's JSON. Raises SiteError, EOFError where the worker ends or has ended."""
        if self._ended:
            raise EOFError
        number = next(self._numbers)
        waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._open[number] = waiting
        self._writer.write(_framed((number, what, arguments)))
        try:
            return await waiting
        finally:
            self._open.pop(number, None)


class Answering:
    """The worker's end: `answer` is called for each question, several at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Answer) -> None:
        self._reader = reader
        self._writer = writer
        self._answer = answer
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until the parent has ended."""
        try:
            while True:
                question = _question.decode(await _frame(self._reader))
                task = asyncio.create_task(self._one(question), name=f"answer {question.what}")
                self._running.add(task)
                task.add_done_callback(self._running.discard)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            for task in tuple(self._running):
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    async def _one(self, question: Question) -> None:
        try:
            status, body = OK, await self._answer(question.what, question.arguments)
        except SiteError as error:
            status, body = error.status, msgspec.json.encode(str(error))
        except Exception:
            logger.exception("the parent's question `%s` cannot be answered", question.what)
            status, body = 500, msgspec.json.encode(f"a worker failed at `{question.what}`: see its log")
        self._write((question.number, status, msgspec.Raw(body)))

    def tell(self, what: str, body: object) -> None:
        """Tell the parent something that it has not asked for."""
        self._write((TOLD, OK, body, what))

    def _write(self, message: object) -> None:
        if not self._writer.is_closing():
            self._writer.write(_framed(message))

    async def close(self) -> None:
        """Once what was written has been sent."""
        with contextlib.suppress(OSError):
            await self._writer.drain()
        self._writer.close()
