"""An engine that does what a test tells it: HTTP/1.1 on real sockets, and every way to break it.

A script is an async function of one exchange. The socket's end cancels it, so that a script may sleep for as
long as an engine may take.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import ssl
import struct
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

Script = Callable[["Exchange"], Awaitable[None]]
FOREVER = 3600.0


@dataclass(frozen=True)
class Received:
    """One request as it arrived; `at` is the loop's time."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    at: float

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Exchange:
    """One request at the engine, and the means to answer it."""

    def __init__(self, connection: _Connection, received: Received) -> None:
        self._connection = connection
        self.received = received
        self.closed_at: float | None = None

    def raw(self, data: bytes) -> None:
        self._connection.transport.write(data)

    def head(self, status: int = 200, content_type: str | None = "text/event-stream", **headers: str) -> None:
        """The head of a chunked reply; underscores in names of headers stand for dashes."""
        fields = {"content-type": content_type} if content_type is not None else {}
        fields |= {name.replace("_", "-"): value for name, value in headers.items()}
        if "content-length" not in fields:
            fields["transfer-encoding"] = "chunked"
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.raw(f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode())

    def chunk(self, data: bytes) -> None:
        self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self) -> None:
        self.raw(b"0\r\n\r\n")

    async def drain(self) -> None:
        await self._connection.writable.wait()

    def reset(self) -> None:
        """Break off with RST: what is not read yet is lost."""
        linger = struct.pack("ii", 1, 0)
        self._connection.transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, linger
        )
        self._connection.transport.abort()

    def close(self) -> None:
        """Send what was written, then FIN."""
        self._connection.transport.close()


class _Connection(asyncio.Protocol):
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._buffer = b""
        self._task: asyncio.Task[None] | None = None
        self._exchange: Exchange | None = None
        self.writable = asyncio.Event()
        self.transport: asyncio.Transport = None  # type: ignore[assignment]

    @property
    def busy(self) -> bool:
        return self._task is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.writable.set()
        self._engine.connections += 1
        self._engine.open.add(self)

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        now = asyncio.get_running_loop().time()
        self._engine.open.discard(self)
        self._engine.closed.append(now)
        if self._exchange is not None:
            self._exchange.closed_at = now
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._task is None:
            self._next()

    def _next(self) -> None:
        head, blank, rest = self._buffer.partition(b"\r\n\r\n")
        if not blank:
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines)}
        length = int(headers.get("content-length", 0))
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        loop = asyncio.get_running_loop()
        received = Received(method, path, headers, rest[:length], loop.time())
        self._exchange = exchange = Exchange(self, received)
        self._task = task = loop.create_task(self._engine.answer(exchange))
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            self._engine.errors.append(error)
            self.transport.abort()
        elif not self.transport.is_closing():
            self._next()

    async def stop(self) -> None:
        task = self._task
        self.transport.abort()
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class FakeEngine:
    """`script` answers every generation, after `scripts` were used up one by one. `exchanges` are all
    generations (whatever is not a probe), `closed` the times at which connections ended."""

    def __init__(
        self, script: Script | None = None, *, uds: str | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self.script = script or reply({"choices": []})
        self.scripts: deque[Script] = deque()
        self.health_script: Script = reply({})
        self.metrics = b""
        self.connections = 0
        self.open: set[_Connection] = set()
        self.closed: list[float] = []
        self.exchanges: list[Exchange] = []
        self.probes: list[Received] = []
        self.errors: list[BaseException] = []
        self.port = 0
        self._uds = uds
        self._tls = tls
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        if self._uds is not None:
            return f"unix:{self._uds}"
        return f"https://localhost:{self.port}" if self._tls else f"http://127.0.0.1:{self.port}"

    @property
    def generations(self) -> int:
        return len(self.exchanges)

    @property
    def last(self) -> Received:
        return self.exchanges[-1].received

    async def start(self) -> None:
        """Listen; again on the same port after a `stop`."""
        loop = asyncio.get_running_loop()
        if self._uds is not None:
            self._server = await loop.create_unix_server(lambda: _Connection(self), self._uds)
            return
        self._server = await loop.create_server(
            lambda: _Connection(self), "127.0.0.1", self.port, ssl=self._tls, backlog=2048
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections, and break off those that are open."""
        if self._server is not None:
            self._server.close()
            self._server = None
        while self.open:
            await asyncio.gather(*(connection.stop() for connection in self.open))
            await asyncio.sleep(0)

    def close_idle(self) -> None:
        """Close every connection that waits for a next request."""
        for connection in self.open:
            if not connection.busy:
                connection.transport.close()

    async def answer(self, exchange: Exchange) -> None:
        received = exchange.received
        if received.path in ("/health", "/metrics"):
            self.probes.append(received)
            if received.path == "/health":
                await self.health_script(exchange)
            else:
                await reply(self.metrics, content_type="text/plain")(exchange)
            return
        self.exchanges.append(exchange)
        await (self.scripts.popleft() if self.scripts else self.script)(exchange)


@contextlib.asynccontextmanager
async def engines(*some: FakeEngine) -> AsyncIterator[None]:
    """Run engines; a script that failed by itself fails the test."""
    async with contextlib.AsyncExitStack() as stack:
        for engine in some:
            await engine.start()
            stack.push_async_callback(engine.stop)
        yield
    for engine in some:
        for error in engine.errors:
            raise error


# scripts


def reply(
    body: object,
    status: int = 200,
    *,
    content_type: str = "application/json",
    delay: float = 0,
    **headers: str,
) -> Script:
    """A whole reply of known length, `delay` seconds after the request; bytes are sent as they are."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def script(exchange: Exchange) -> None:
        if delay:
            await asyncio.sleep(delay)
        exchange.head(status, content_type, content_length=str(len(data)), **headers)
        exchange.raw(data)

    return script


def stream(
    *parts: bytes,
    before: float = 0,
    first: float = 0,
    between: float = 0,
    end: str = "end",
    content_type: str = "text/event-stream; charset=utf-8",
) -> Script:
    """A stream in the given parts, each written by itself: `before` the head, before the `first` part and
    `between` parts it waits so many seconds. `end` is one of end, close, reset, hang."""

    async def script(exchange: Exchange) -> None:
        await asyncio.sleep(before)
        exchange.head(200, content_type)
        for index, part in enumerate(parts):
            wait = between if index else first
            if wait:
                await asyncio.sleep(wait)
            exchange.chunk(part)
        if end == "hang":
            await hang(exchange)
        elif end == "reset":
            await asyncio.sleep(0.05)  # RST overtakes what the other side has not read yet
            exchange.reset()
        elif end == "close":
            exchange.close()
        else:
            exchange.end()

    return script


async def hang(_: Exchange) -> None:
    await asyncio.sleep(FOREVER)


async def reset(exchange: Exchange) -> None:
    exchange.reset()


async def close(exchange: Exchange) -> None:
    exchange.close()


def split(data: bytes, *offsets: int) -> list[bytes]:
    """`data` cut at each offset."""
    bounds: Sequence[int] = (0, *offsets, len(data))
    return [data[a:b] for a, b in itertools.pairwise(bounds) if b > a]


class BlackHole:
    """An address where connecting neither succeeds nor fails: its queue is full, and nobody accepts."""

    def __init__(self) -> None:
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(0)
        self.port = self._listener.getsockname()[1]
        self._fillers = [socket.socket() for _ in range(4)]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        for filler in self._fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", self.port))
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (*self._fillers, self._listener):
            sock.close()
