"""One connection to one Redis server, which all requests of this process share.

What is sent in one tick of the event loop goes out in one write; replies come in the same order. Where no
reply has come within `timeout`, or the connection breaks, the link is down (a circuit breaker): all that
waits is told at once, and nobody waits for it again until a try-out in the background was answered in time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError, ResponseError

if TYPE_CHECKING:
    from redis.asyncio.connection import AbstractConnection

Answer = Callable[[object], None]
"""Is given the reply to one command, an exception where there is none."""
Told = Callable[["Link", Exception | None], None]

CONNECT_SECONDS = 2.0
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 1.0
# A timer this late says that the event loop stood still; the reply may lie in the socket.
STALL_SECONDS = 0.01


class LinkDown(Exception):
    """There is no answer from the server: why."""


class Link:
    """`connect` gives a connection that is connected, `greet` sees whether the server can do what is asked of
    it, `told` hears of each change, with the reason for a link that is down. Times are in seconds."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], Awaitable[AbstractConnection]],
        greet: Callable[[AbstractConnection], Awaitable[None]],
        told: Told,
        timeout: float,
    ) -> None:
        self.name = name
        self.up = False
        self._connect = connect
        self._greet = greet
        self._told = told
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._outgoing: list[bytes] = []
        self._waiting: deque[Answer] = deque()
        # When each batch was asked for, and how many of its replies are to come.
        self._batches: deque[list[float]] = deque()
        self._some = asyncio.Event()
        self._broken: asyncio.Future[Exception] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._late = False
        self.tried = asyncio.Event()

    def send(self, command: bytes, answer: Answer) -> None:
        """Only while the link is up. `answer` is called exactly once, later."""
        outgoing = self._outgoing
        if not outgoing:
            self._some.set()
            now = self._loop.time()
            self._batches.append([now, 0])
            if self._timer is None:
                self._due = now + self._timeout
                self._timer = self._loop.call_at(self._due, self._check)
        outgoing.append(command)
        self._batches[-1][1] += 1
        self._waiting.append(answer)

    async def emptied(self, seconds: float) -> None:
        """Until the last command so far is answered, for so long at most."""
        if self._waiting:
            last: asyncio.Future[object] = self._loop.create_future()
            self.send(b"*1\r\n$4\r\nPING\r\n", last.set_result)
            await asyncio.wait([last], timeout=seconds)

    def fail(self, error: Exception) -> None:
        """The server answers, but not as it must: what waits is told, and the link is down."""
        if not self.up:
            return
        self.up = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, deque()
        self._outgoing = []
        self._batches.clear()
        self._some.clear()
        self._broken.set_result(error)
        self._told(self, error)
        for answer in waiting:
            answer(LinkDown(str(error)))

    def _check(self) -> None:
        self._timer = None
        if not self._batches:
            return
        now, due = self._loop.time(), self._batches[0][0] + self._timeout
        if now < due:
            self._late = False
        elif now - self._due > STALL_SECONDS and not self._late:
            self._late = True
            due = now + STALL_SECONDS
        else:
            self.fail(TimeoutError(f"no answer within {self._timeout * 1000:g} ms"))
            return
        self._due = due
        self._timer = self._loop.call_at(due, self._check)

    async def run(self) -> None:
        """Connect, serve, and when that ends try again; until it is cancelled."""
        pause = FIRST_PAUSE
        while True:
            began = self._loop.time()
            connection: AbstractConnection | None = None
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    connection = await self._connect()
                async with asyncio.timeout(self._timeout):
                    await self._greet(connection)
                self._open()
                await self._serve(connection)
            except (RedisError, OSError, TimeoutError) as error:
                if not self.up:
                    self._told(self, error if str(error) else TimeoutError("no answer in time"))
            finally:
                self.tried.set()
                self.fail(ConnectionError("closed"))
                if connection is not None:
                    await connection.disconnect(nowait=True)
            # One that breaks as soon as it is up must not flap.
            pause = FIRST_PAUSE if self._loop.time() - began > LONGEST_PAUSE * 5 else pause
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE, pause * 2)

    def _open(self) -> None:
        self._broken = self._loop.create_future()
        self._late = False
        self.up = True
        self.tried.set()
        self._told(self, None)

    async def _serve(self, connection: AbstractConnection) -> None:
        tasks = [asyncio.create_task(self._write(connection)), asyncio.create_task(self._read(connection))]
        try:
            ends: list[asyncio.Future[Any]] = [*tasks, self._broken]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for end in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(end, Exception):
                    self.fail(end)

    async def _write(self, connection: AbstractConnection) -> None:
        while True:
            await self._some.wait()
            self._some.clear()
            batch, self._outgoing = self._outgoing, []
            await connection.send_packed_command(batch, check_health=False)

    async def _read(self, connection: AbstractConnection) -> None:
        waiting, batches = self._waiting, self._batches
        while True:
            reply: object
            try:
                reply = await connection.read_response(disable_decoding=True, disconnect_on_error=False)
            except ResponseError as error:
                reply = error
            batch = batches[0]
            batch[1] -= 1
            if not batch[1]:
                batches.popleft()
            waiting.popleft()(reply)
