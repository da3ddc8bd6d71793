"""HTTP/1.1 towards engines: connections on asyncio transports, parsed by httptools, pooled by engine.

Written for the byte path: one waiter a request that is woken by data, end, loss or timeout; no task and no
queue a chunk. Nothing here retries: `LostEarly` tells the caller that it may.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, cast

import httptools

from engines.address import Address

HIGH_WATER = 256 * 1024
# vLLM closes a connection that was idle for 5 s (VLLM_HTTP_TIMEOUT_KEEP_ALIVE): let go of ours before.
IDLE_SECONDS = 3.0
LAST_INFORMATIONAL = 199
HEAD_LIMIT = 64 * 1024
EVENTS = b"text/event-stream"
MAX_IDLE = 1024
# Deadlines are at least so far apart, in seconds: one look finds all that are over.
TICK = 0.005
MAX_PREPARED = 64

Limit = Literal["connect", "first_byte", "idle", "total"]


class ConnectFailed(Exception):
    """The engine refused or could not be reached: it has seen nothing of the request."""


class ConnectTimeout(ConnectFailed):
    """No connection within `connect` seconds."""


class LostEarly(Exception):
    """The connection ended before a reply had begun. `reused`: it had been idle, and nothing came."""

    def __init__(self, message: str, *, reused: bool) -> None:
        super().__init__(message)
        self.reused = reused


class LostLate(Exception):
    """The engine broke off inside its reply, or sent something that is not HTTP."""


class TimedOut(Exception):
    """`limit` ran out; `started`: some of the reply had arrived."""

    def __init__(self, limit: Limit, seconds: float, *, started: bool) -> None:
        super().__init__(f"{limit} timeout of {seconds:g} s")
        self.limit = limit
        self.seconds = seconds
        self.started = started


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds; see `engines.spec.Timeouts`."""

    connect: float
    first_byte: float
    idle: float
    total: float
    soonest: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "soonest", min(self.first_byte, self.idle, self.total))


Sink = Callable[[bytes], bool]
"""Takes body bytes where they arrive, without waking the request; false: stop, and wake it."""
Lane = Callable[[bytes], bool]
"""Takes bytes of the connection that may be one whole chunk, its framing included; false: it did not."""


class Deadlines:
    """The clocks of all exchanges of a pool in one timer, which fires when the soonest may be over: a timer
    of its own would cost each exchange more than all of its bytes do."""

    def __init__(self) -> None:
        self._running: set[Connection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._at = math.inf

    def add(self, connection: Connection, due: float) -> None:
        """Look at the connection at `due`, in seconds of the loop's clock, or before."""
        self._running.add(connection)
        if due < self._at:
            self._set(connection.loop, due)

    def discard(self, connection: Connection) -> None:
        self._running.discard(connection)

    def _set(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._at = due
        self._timer = loop.call_at(due, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer, self._at = None, math.inf
        now = loop.time()
        soonest = min((connection.due(now) for connection in tuple(self._running)), default=math.inf)
        if soonest < self._at:
            self._set(loop, max(soonest, now + TICK))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._at = None, math.inf


class Connection(asyncio.Protocol):
    """One connection; carries one exchange at a time. A caller that got it from a `Pool` writes with
    `start`, then alternates `wait` and `take`, and gives it back with `Pool.release` whatever happens."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deadlines: Deadlines) -> None:
        self.loop = loop
        self._deadlines = deadlines
        self.now = loop.time
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._parser = httptools.HttpResponseParser(self)
        self._chunks: list[bytes] = []
        self._size = 0
        self._head_size = 0
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._limits: Limits | None = None
        self._started_at = 0.0
        self._active_at = 0.0
        self._skip = False
        self._broken: str | None = None
        self._dirty = False
        self._keep_alive = False
        self._sink: Sink | None = None
        self._lane: Lane | None = None
        self._between_chunks = False
        self.pool: Pool | None = None
        self.idle_since = 0.0
        self.reused = False
        self.lost = False
        self.timed_out: Limit | None = None
        self.started = False
        self.headed = False
        self.complete = False
        self.flowing = False
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self.headed and not self.complete and exc is None and not self._broken:
            self._ended_by_close()
        if self.pool is not None:
            self.pool.forget(self)
        self._deadlines.discard(self)
        self._wake()
        # The parser calls back into this connection: without it, no cycle is left.
        self._parser = None  # type: ignore[assignment]

    def _ended_by_close(self) -> None:
        # A reply with neither length nor chunks ends with its connection (RFC 9112, section 6.3).
        names = {name for name, _ in self.headers}
        if b"content-length" not in names and b"transfer-encoding" not in names:
            self.complete = True

    def data_received(self, data: bytes) -> None:
        # A whole chunk leaves the parser between two chunks, as it was: it need not see it.
        if self._between_chunks and self._lane is not None and self._lane(data):
            self._active_at = self.now()
            return
        if self.pool is not None:
            # Nothing was asked: whatever this is, the connection is out of step.
            self._transport.abort()
            return
        self.started = True
        self._active_at = self.now()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("it switched to another protocol, which nobody asked for")
        except httptools.HttpParserError as exc:
            self._fail(f"not HTTP: {exc}")
        if self._between_chunks and not data.endswith(b"\n"):
            self._between_chunks = False  # the next chunk's size has begun
        if not self.headed:
            self._head_size += len(data)
            if self._head_size > HEAD_LIMIT:
                self._fail("reply head larger than 64 KiB")
        if self._sink is not None and self._chunks and not self.complete:
            if self._sink(self.take()):
                return
            self._sink = self._lane = None
        if self._size > HIGH_WATER and not self._paused and not self.lost:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        return None

    # httptools callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status <= LAST_INFORMATIONAL:
            self._skip = True
            return
        self.headed = True

    def on_body(self, body: bytes) -> None:
        self.flowing = True
        self._chunks.append(body)
        self._size += len(body)

    def on_chunk_header(self) -> None:
        self._between_chunks = False

    def on_chunk_complete(self) -> None:
        self._between_chunks = True

    def on_message_complete(self) -> None:
        self._between_chunks = False
        if self._skip:
            self._skip = False
            self.headers = []
            return
        if self.complete:
            self._fail("a second reply to one request")
        self.complete = True
        self._keep_alive = self._parser.should_keep_alive()
        self._deadlines.discard(self)

    def _fail(self, message: str) -> None:
        self._broken = self._broken or message
        self._transport.abort()

    # the caller's side

    def start(self, request: bytes, limits: Limits) -> None:
        """Write one request and start its clocks. Raises LostEarly where the connection is already closed."""
        if self.lost or self._transport.is_closing():
            raise LostEarly("closed while idle", reused=self.reused)
        self._limits = limits
        self._started_at = self._active_at = now = self.now()
        self._transport.write(request)
        self._deadlines.add(self, now + limits.soonest)

    async def flow(self, sink: Sink, lane: Lane | None) -> None:
        """Hand body bytes to `sink` as they arrive, or to `lane` as they came; returns when either has had
        enough, and at the end, a loss or a timeout. What came last may be left to `take`."""
        self._sink, self._lane = sink, lane
        try:
            await self.wait()
        finally:
            self._sink = self._lane = None

    def stop_flow(self) -> None:
        """Have `flow` return, for a lane that has had enough."""
        self._sink = self._lane = None
        self._wake()

    async def wait(self) -> None:
        """Until something is at hand: bytes, the end, a loss or a timeout."""
        if not self._dirty:
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._dirty = False

    def take(self) -> bytes:
        """All body bytes at hand, perhaps none."""
        chunks = self._chunks
        if not chunks:
            return b""
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        self._chunks = []
        self._size = 0
        if self._paused and not self.lost:
            self._paused = False
            self._active_at = self.now()
            self._transport.resume_reading()
        return data

    def put_back(self, data: bytes) -> None:
        """Undo a `take`: the next one begins with these bytes."""
        self._chunks.insert(0, data)
        self._size += len(data)

    def check(self) -> None:
        """Raise what ended the exchange, if anything did: LostEarly, LostLate or TimedOut."""
        if self.complete:
            return
        if self.timed_out is not None:
            assert self._limits is not None
            raise TimedOut(self.timed_out, getattr(self._limits, self.timed_out), started=self.started)
        if self.lost or self._broken:
            if self._broken or self.flowing or (self.started and not self.streams):
                raise LostLate(self._broken or "the engine closed the connection inside its reply")
            reused = self.reused and not self.started
            raise LostEarly("the engine closed the connection before its reply", reused=reused)

    @property
    def begun(self) -> bool:
        """Whether some of the reply is there. A stream's head does not count: engines send it first."""
        return self.flowing or self.complete or (self.headed and not self.streams)

    @property
    def content_type(self) -> bytes:
        """That of the reply, JSON's where it has none."""
        for name, value in self.headers:
            if name == b"content-type":
                return value
        return b"application/json"

    @property
    def streams(self) -> bool:
        """Whether the reply is a stream of events."""
        return self.content_type[: len(EVENTS)].lower() == EVENTS

    @property
    def reusable(self) -> bool:
        return (
            self.complete
            and not self.lost
            and not self._broken
            and not self._transport.is_closing()
            and self._keep_alive
        )

    def reset(self) -> None:
        self._chunks = []
        self._size = self._head_size = 0
        self._dirty = self._skip = self._keep_alive = self._between_chunks = False
        self.started = self.headed = self.complete = self.flowing = False
        self.timed_out = None
        self.status = 0
        self.headers = []
        if self._paused:
            self._paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        self._deadlines.discard(self)
        self._transport.abort()

    def _wake(self) -> None:
        self._dirty = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def due(self, now: float) -> float:
        """When to look again; an exchange whose time is over ends here. Chunks touch no timer: they leave
        the time of the last byte."""
        limits = self._limits
        assert limits is not None
        total = self._started_at + limits.total
        if self._paused or self._chunks:
            self._active_at = now  # the client is slow, not the engine
        # A head may come long before the first token: that is still the wait for the first byte.
        quiet = self._active_at + (limits.idle if self.flowing else limits.first_byte)
        due = min(total, quiet)
        if now < due - 0.001:
            return due
        self._deadlines.discard(self)
        self.timed_out = "total" if due == total else "idle" if self.flowing else "first_byte"
        self._transport.abort()
        self._wake()
        return math.inf


class Pool:
    """Idle connections to one engine, youngest first; one that was idle for `idle_seconds` is closed.

    `open` counts every live connection, lent or idle.
    """

    def __init__(
        self, url: str, *, idle_seconds: float = IDLE_SECONDS, context: ssl.SSLContext | None = None
    ) -> None:
        self.address = Address.parse(url)
        self._idle: deque[Connection] = deque()
        self._idle_seconds = idle_seconds
        self._context = context or (ssl.create_default_context() if self.address.tls else None)
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False
        self._deadlines = Deadlines()
        self.lent: set[Connection] = set()

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def open(self) -> int:
        return len(self._idle) + len(self.lent)

    def reuse(self) -> Connection | None:
        """The youngest idle connection that the engine has not closed."""
        while self._idle:
            connection = self._idle.pop()
            connection.pool = None
            if connection.lost or connection.idle_since < connection.now() - self._idle_seconds:
                connection.abort()
                continue
            connection.reused = True
            self.lent.add(connection)
            return connection
        return None

    async def connect(self, seconds: float) -> Connection:
        """A new connection. Raises ConnectFailed, ConnectTimeout."""
        connection = await self._connect(asyncio.get_running_loop(), seconds)
        self.lent.add(connection)
        return connection

    async def _connect(self, loop: asyncio.AbstractEventLoop, seconds: float) -> Connection:
        address = self.address
        protocol = partial(Connection, loop, self._deadlines)
        try:
            async with asyncio.timeout(seconds):
                if address.uds is not None:
                    _, connection = await loop.create_unix_connection(protocol, address.uds)
                else:
                    _, connection = await loop.create_connection(
                        protocol, address.host, address.port, ssl=self._context
                    )
        except TimeoutError as exc:
            raise ConnectTimeout(f"no connection to {address.authority} within {seconds:g} s") from exc
        except (OSError, ssl.SSLError) as exc:
            # Clients see this: a path of this machine is none of their business.
            place = address.authority if address.uds is None else "its socket"
            raise ConnectFailed(f"cannot connect to {place}: {exc}") from exc
        return connection

    def release(self, connection: Connection) -> None:
        """Take a connection back: kept where its exchange ended cleanly, else closed at once, which is how
        an engine learns that nobody waits any more."""
        self.lent.discard(connection)
        if self._closed or not connection.reusable or len(self._idle) >= MAX_IDLE:
            connection.abort()
            return
        connection.reset()
        connection.idle_since = connection.now()
        connection.pool = self
        self._idle.append(connection)
        if self._sweep is None:
            loop = asyncio.get_running_loop()
            self._sweep = loop.call_later(self._idle_seconds, self._on_sweep)

    def forget(self, connection: Connection) -> None:
        connection.pool = None
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    def _on_sweep(self) -> None:
        self._sweep = None
        loop = asyncio.get_running_loop()
        deadline = loop.time() - self._idle_seconds
        while self._idle and self._idle[0].idle_since <= deadline:
            connection = self._idle.popleft()
            connection.pool = None
            connection.abort()
        if self._idle:
            self._sweep = loop.call_later(self._idle[0].idle_since - deadline + 0.001, self._on_sweep)

    def close(self) -> None:
        self._closed = True
        self._deadlines.close()
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        while self._idle:
            connection = self._idle.pop()
            connection.pool = None
            connection.abort()


class RequestHead:
    """The bytes of a request's head that are the same in every request to one engine and path."""

    def __init__(self, address: Address, api_key: str | None) -> None:
        self._common = f" HTTP/1.1\r\nhost: {address.authority}\r\n" + (
            f"authorization: Bearer {api_key}\r\n" if api_key else ""
        )
        self._base = address.base
        self._prepared: dict[tuple[str, str], bytes] = {}

    def build(self, method: str, path: str, extra: bytes, body: bytes) -> bytes:
        """`path` is from the route table or quoted, never raw from a client; `extra` is header lines."""
        prepared = self._prepared.get((method, path))
        if prepared is None:
            prepared = f"{method} {self._base}{path}{self._common}".encode("ascii")
            if method != "GET":
                prepared += b"content-type: application/json\r\n"
            if len(self._prepared) < MAX_PREPARED:
                self._prepared[method, path] = prepared
        if method == "GET":
            return b"%b%b\r\n" % (prepared, extra)
        return b"%b%bcontent-length: %d\r\n\r\n%b" % (prepared, extra, len(body), body)
