"""One of the processes that serve: a worker, or the parent itself until another has taken its place."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec

from gateway.crew import PLACE
from gateway.crew.channel import Asking
from gateway.crew.worker import PROTOCOL, Place, answer
from gateway.process import Process
from gateway.telemetry.series import Families

State = Literal["starting", "joining", "serving", "leaving"]
ANSWER_SECONDS = 5.0
HANG_UP_SECONDS = 1.0


class Counted:
    """What a process had counted when it last told. It is asked by several at a time, and what it tells at
    its end may be heard before an answer that it gave earlier: nothing takes the place of what is newer."""

    def __init__(self) -> None:
        self.families: Families = []
        self._asked = 0
        self._answered = 0.0

    def ask(self) -> int:
        """The number of a question that is put now."""
        self._asked += 1
        return self._asked

    def answer(self, number: int, families: Families) -> None:
        if number > self._answered:
            self._answered, self.families = number, families

    def end(self, families: Families) -> None:
        """It counts no more."""
        self._answered, self.families = math.inf, families


class Member(Protocol):
    """`number` is its place among the others, `seen` what it has counted; `cursor` and `rows` are what it has
    told of its decisions."""

    number: int
    state: State
    seen: Counted
    cursor: str
    rows: dict[str, tuple[bytes, bool]]

    @property
    def pid(self) -> int: ...

    async def ask(self, what: str, *arguments: object, seconds: float = ANSWER_SECONDS) -> bytes:
        """Its answer, as JSON. Raises SiteError, EOFError where it has ended, TimeoutError."""


class Local:
    """This process itself."""

    def __init__(self, process: Process) -> None:
        self.number = 0
        self.state: State = "serving"
        self.seen = Counted()
        self.cursor = ""
        self.rows: dict[str, tuple[bytes, bool]] = {}
        self.pid = os.getpid()
        self._process = process

    async def ask(self, what: str, *arguments: object, seconds: float = ANSWER_SECONDS) -> bytes:
        return await answer(self._process, what, list(arguments))


class Worker:
    """A process of its own. `heard` is called with what it tells unasked."""

    def __init__(
        self,
        number: int,
        process: subprocess.Popen[bytes],
        asking: Asking,
        since: float,
    ) -> None:
        self.number = number
        self.state: State = "starting"
        self.seen = Counted()
        self.cursor = ""
        self.rows: dict[str, tuple[bytes, bool]] = {}
        self.since = since
        self._process = process
        self._asking = asking
        self._listening = asyncio.create_task(asking.run(), name=f"worker {number}")

    @classmethod
    async def start(
        cls,
        number: int,
        argv: Sequence[str],
        listen: Sequence[socket.socket],
        heard: Callable[[Worker, str, msgspec.Raw], None],
        since: float,
    ) -> Worker:
        """Raises OSError."""
        ours, theirs = socket.socketpair()
        place = Place(PROTOCOL, number, tuple(sock.fileno() for sock in listen), theirs.fileno())
        environment = {**os.environ, PLACE: msgspec.json.encode(place).decode()}
        with theirs:
            try:
                process = subprocess.Popen(  # noqa: ASYNC220 - a fork, and nobody waits for its end
                    argv,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(*place.listen, place.channel),
                )
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ours)
        made: list[Worker] = []
        asking = Asking(reader, writer, lambda what, body: heard(made[0], what, body))
        made.append(cls(number, process, asking, since))
        return made[0]

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, what: str, *arguments: object, seconds: float = ANSWER_SECONDS) -> bytes:
        async with asyncio.timeout(seconds):
            return await self._asking.ask(what, *arguments)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def ended(self) -> int:
        """Its exit code, negative where a signal ended it, once all that it told has been heard."""
        loop = asyncio.get_running_loop()
        over = loop.create_future()
        watched = os.pidfd_open(self._process.pid)

        def gone() -> None:
            if not over.done():
                over.set_result(None)

        try:
            loop.add_reader(watched, gone)
            await over
        finally:
            loop.remove_reader(watched)
            os.close(watched)
        code = self._process.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HANG_UP_SECONDS):
                await asyncio.shield(self._listening)
        self._listening.cancel()
        return code


def described(code: int) -> str:
    """An exit code of `Worker.ended` in words."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
