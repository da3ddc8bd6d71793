"""The public port's HTTP/1.1: requests in by httptools, replies straight to the transport.

One write a reply, one a burst of tokens, no ASGI message in between. It stands in for uvicorn's own protocol
class and keeps that class's contract with its server: `connections`, `tasks` and `shutdown`.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import secrets
from collections import deque
from collections.abc import Callable, Coroutine
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote

import httptools

from gateway.errors import BodyTooLarge, BodyTooSlow, ClientGone, InvalidRequest
from gateway.relay.client import Client, Head, Headers

if TYPE_CHECKING:
    from uvicorn.config import Config
    from uvicorn.server import ServerState

HEAD_LIMIT = 64 * 1024
SHORT_URL = 128
HEADER_FRAME = len(b": \r\n")
PIPELINED = 16
LINGER_SECONDS = 0.3
PIPELINED_BYTES = 64 << 10
# A client that takes none of a waiting reply's bytes for so long is gone: no timeout of an engine ends that.
STALLED_SECONDS = 120.0
STATUS_LINES = {
    status: f"HTTP/1.1 {status} {phrase}\r\n".encode()
    for status in range(200, 600)
    for phrase in [http.HTTPStatus(status).phrase if status in set(http.HTTPStatus) else "Status"]
}
LAST_CHUNK = b"0\r\n\r\n"
TOO_LARGE = "the request's head is larger than 64 KiB"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
ERROR = '{"error":{"message":"%s","type":"invalid_request_error","param":null,"code":null}}'

Answer = Callable[["Request"], Coroutine[Any, Any, None]]


def _chunk_starts(longest: int) -> list[bytes | tuple[bytes, ...]]:
    starts: list[bytes | tuple[bytes, ...]] = [()] * (longest + 1)
    for size in range(1, longest):
        start = b"%x\r\n" % size
        length = len(start) + size + len(b"\r\n")
        if length <= longest:
            starts[length] = start
    return starts


CHUNK_STARTS = _chunk_starts(4095)
"""By the length of a whole chunk, how it begins; nothing begins as the empty tuple does."""


def path_of(url: bytes) -> str:
    """The path of a request's target. Raises httptools.HttpParserInvalidURLError."""
    if not url.startswith(b"/"):
        url = httptools.parse_url(url).path or b"/"
    path = url.partition(b"?")[0].decode("latin-1")
    return unquote(path) if "%" in path else path


_path_of_short = lru_cache(maxsize=64)(path_of)


class Request(Client):
    """One request on a connection. Writes never wait: a writer looks at `paused`, and awaits `drain`."""

    __slots__ = (
        "_broken",
        "_connection",
        "_head",
        "_hesitates",
        "_http10",
        "_limit",
        "_parts",
        "_waiter",
        "_watched",
        "answered",
        "complete",
        "keep_alive",
        "size",
        "task",
    )

    def __init__(
        self, connection: Connection, method: str, path: str, headers: Headers, keep_alive: bool, http10: bool
    ) -> None:
        super().__init__(method, path, headers)
        self._connection = connection
        self._head = b""
        self._http10 = http10
        self._limit = 0
        self._parts: list[bytes] = []
        self.size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._watched = False
        self._broken = False
        self.answered = False
        self.complete = False
        self.keep_alive = keep_alive and not http10
        self._hesitates = self.fields.get(b"expect", b"").lower() == b"100-continue"
        self.task: asyncio.Task[None] | None = None

    # what the connection reports

    def received(self, data: bytes) -> None:
        self._parts.append(data)
        self.size += len(data)
        if self._waiter is not None and self.size > self._limit:
            self._wake()

    def ended(self) -> None:
        self.complete = True
        self._wake()

    def broken(self) -> None:
        """The rest of its body cannot be read."""
        self._broken = True
        self.keep_alive = False
        self._wake()

    def lost(self) -> None:
        """The client's connection is gone."""
        if self.answered:
            return
        self.gone = True
        self._wake()
        if self._watched and self.task is not None:
            self.task.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # the request's own task

    async def body(self, limit: int, seconds: float) -> bytes:
        if not self.complete:
            if (self.declared or 0) > limit:
                raise BodyTooLarge.over(limit)
            try:
                async with asyncio.timeout(seconds):
                    await self._rest(limit)
            except TimeoutError:
                self.keep_alive = False
                raise BodyTooSlow.after(seconds) from None
        if self.size > limit:
            raise BodyTooLarge.over(limit)
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _rest(self, limit: int) -> None:
        connection = self._connection
        if self._hesitates:
            self._hesitates = False
            connection.write(CONTINUE)
        self._limit = limit
        while not self.complete and self.size <= limit:
            if self.gone:
                raise ClientGone
            if self._broken:
                raise InvalidRequest("the body does not come in chunks as HTTP/1.1 has them")
            self._waiter = connection.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def watch(self) -> None:
        self._watched = True
        if self.gone and self.task is not None:
            self.task.cancel()

    def finish(self) -> None:
        self._watched = False
        self.task = None

    async def start(self, status: int, head: Head) -> None:
        self.started = True
        # HTTP/1.0 knows no chunks: such a reply ends with its connection.
        framing = b"\r\n" if self._http10 else b"transfer-encoding: chunked\r\n\r\n"
        self._head = self._connection.head(status, head, framing, self.keep_alive)

    def write(self, data: bytes) -> None:
        """Bytes of a reply under way."""
        if not self.gone and data:
            self._connection.write(self._framed(data))

    @property
    def in_chunks(self) -> bool:
        """Whether what goes out next is a chunk and nothing else."""
        return not self._http10 and not self._head

    def chunk_writer(self) -> Callable[[bytes], bool]:
        """What writes a chunk with its framing, of a reply that is `in_chunks`; false for a slow client."""
        connection, write = self._connection, self._connection.transport.write

        def write_chunk(chunk: bytes) -> bool:
            if not self.gone:
                write(chunk)
            return not connection.paused

        return write_chunk

    def _framed(self, data: bytes) -> bytes:
        if self._head:
            head, self._head = self._head, b""
            if self._http10:
                return head + data
            return b"%b%x\r\n%b\r\n" % (head, len(data), data) if data else head
        return data if self._http10 or not data else b"%x\r\n%b\r\n" % (len(data), data)

    @property
    def paused(self) -> bool:
        return self._connection.paused

    async def drain(self) -> None:
        if self._connection.paused:
            await self._connection.drain()

    async def send(self, data: bytes, more: bool) -> None:
        if more:
            self.write(data)
            await self.drain()
        elif not self.gone:
            end = b"" if self._http10 else LAST_CHUNK
            self._done(self._framed(data) + end)

    async def reply(self, status: int, head: Head, body: bytes) -> None:
        self.started = True
        if self._hesitates and not self.complete:
            # The body is not coming any more: what comes next would be taken for it.
            self.keep_alive = False
        if not self.gone:
            shown = b"" if self.method == "HEAD" else body
            tail = b"content-length: %d\r\n\r\n%b" % (len(body), shown)
            self._done(self._connection.head(status, head, tail, self.keep_alive))

    def _done(self, last: bytes) -> None:
        self._connection.write(last)
        self.answered = True
        # A body that was refused is not kept for as long as its connection is.
        self._parts = []
        self._connection.answered(self)

    def close_after(self) -> None:
        self.keep_alive = False

    def break_off(self) -> None:
        self.gone = self.answered = True
        self._connection.close()


class Connection(asyncio.Protocol):
    """One client connection: requests one at a time, pipelined ones in their turn."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._answer: Answer = cast(Any, config.app).answer
        self._state = server_state
        self._idle_seconds = config.timeout_keep_alive
        self.loop = _loop or asyncio.get_running_loop()
        self._parser = self._new_parser()
        self.transport: asyncio.Transport = None  # type: ignore[assignment]
        self._url = b""
        self._headers: Headers = []
        self._fed = 0
        # Bytes that were fed to the parser since it last had something to say: it holds a header that does
        # not end, and tells nobody.
        self._unread = 0
        self._reading: Request | None = None
        self._running: Request | None = None
        self._waiting: deque[Request] = deque()
        # One task answers all requests of a connection: making one for each would cost more than reading it.
        self._worker: asyncio.Task[None] | None = None
        self._turn: Request | None = None
        self._idle: asyncio.Future[None] | None = None
        self._idle_since = self.loop.time()
        self._idle_timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._drained: asyncio.Event | None = None
        self._own_headers: list[tuple[bytes, bytes]] = []
        self._own_lines = b""
        self.paused = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._state.connections.add(self)  # type: ignore[arg-type]
        self._idle_timer = self.loop.call_later(self._idle_seconds, self._on_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(self)
        for timer in (self._idle_timer, self._stall, self._linger):
            if timer is not None:
                timer.cancel()
        self._idle_timer = self._stall = None
        if self._running is not None:
            self._running.lost()
        self._waiting.clear()
        self._wake_worker()
        self.resume_writing()
        self._reading = self._running = None
        # The parser calls back into this connection: without it, no cycle is left.
        self._parser = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._fed = len(data)
        self._unread += self._fed
        try:
            while data and not self.transport.is_closing():
                data = self._feed(data)
        except httptools.HttpParserError:
            request = self._running
            if request is not None and request is self._reading and not request.complete:
                self.transport.pause_reading()
                request.broken()
            else:
                self._refuse(400, "this is not HTTP/1.1")
            return
        if self._unread > HEAD_LIMIT:
            self._refuse(431, TOO_LARGE)

    def _feed(self, data: bytes) -> bytes:
        """Have the parser read; returns what it is still to be given."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # No other protocol is spoken here, and a server may ignore the wish (RFC 9110, section 7.8). The
            # parser may not: it would take the body for the other protocol's. So the head is read again.
            parser, self._parser = self._parser, self._new_parser()
            lines = [b"%b: %b\r\n" % header for header in self._headers if header[0] != b"upgrade"]
            start = b"%b %b HTTP/%b\r\n" % (
                parser.get_method(),
                self._url,
                parser.get_http_version().encode("ascii"),
            )
            return b"%b%b\r\n%b" % (start, b"".join(lines), data[upgrade.args[0] :])
        return b""

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        with contextlib.suppress(AttributeError):
            # A request with `connection: close` may be followed by bytes: its reply still goes out.
            parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def eof_received(self) -> None:
        return None

    def pause_writing(self) -> None:
        self.paused = True
        self._watch_writes()

    def resume_writing(self) -> None:
        self.paused = False
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        if self._drained is not None:
            self._drained.set()
            self._drained = None

    def _watch_writes(self) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(STALLED_SECONDS, self._look_at_writes)

    def _look_at_writes(self) -> None:
        if self.transport.get_write_buffer_size() < self._unsent:
            self._watch_writes()
        else:
            self.transport.abort()

    # httptools callbacks

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def _head_size(self) -> int:
        lines = sum(len(name) + len(value) + HEADER_FRAME for name, value in self._headers)
        return len(self._url) + lines

    def on_headers_complete(self) -> None:
        parser = self._parser
        # Only what came with much else, or in many pieces, can be too large.
        if self._unread + self._fed > HEAD_LIMIT and self._head_size() > HEAD_LIMIT:
            self._refuse(431, TOO_LARGE)
        self._unread = 0
        method = parser.get_method().decode("ascii")
        if method == "CONNECT":
            self._refuse(405, "this is no proxy: CONNECT is not served")
        if self.transport.is_closing() or parser.should_upgrade():
            return
        http10 = parser.get_http_version() == "1.0"
        path = (_path_of_short if len(self._url) <= SHORT_URL else path_of)(self._url)
        request = Request(self, method, path, self._headers, parser.should_keep_alive(), http10)
        coding = request.fields.get(b"transfer-encoding")
        if coding is not None and coding.strip().lower() != b"chunked":
            self._refuse(501, "of transfer codings only `chunked` is read here")  # RFC 9112, section 6.1
            return
        self._reading = request
        # What comes as a trailer is no part of the head: by then it has been read.
        self._headers = []
        if self._running is None:
            self._run(request)
            return
        self._waiting.append(request)
        if len(self._waiting) >= PIPELINED:
            self._refuse(400, "too many requests are pipelined")

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        request = self._reading
        # What comes behind an answer, too large a body's rest, keeps no connection open.
        if request is None or request.answered:
            return
        self._idle_since = self.loop.time()
        request.received(body)
        if request.size > PIPELINED_BYTES and self._running not in (None, request):
            self._refuse(413, "too much is pipelined")

    def on_message_complete(self) -> None:
        self._unread = 0
        if self._reading is not None:
            self._reading.ended()

    # requests and their replies

    def _run(self, request: Request) -> None:
        self._running = self._turn = request
        if self._worker is None:
            self._worker = self.loop.create_task(self._work())
        else:
            self._wake_worker()

    def _wake_worker(self) -> None:
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    async def _work(self) -> None:
        """Answer the connection's requests, one at a time, until it is closed."""
        worker, tasks = self._worker, self._state.tasks
        assert worker is not None
        try:
            while (request := await self._next_turn()) is not None:
                request.task = worker
                tasks.add(worker)
                try:
                    await self._answer(request)
                finally:
                    tasks.discard(worker)
        finally:
            self._worker = self._idle = None

    async def _next_turn(self) -> Request | None:
        if self._turn is None and not self.transport.is_closing():
            self._idle = self.loop.create_future()
            await self._idle
            self._idle = None
        request, self._turn = self._turn, None
        return request

    def answered(self, request: Request) -> None:
        self._state.total_requests += 1
        self._running = None
        if not request.keep_alive:
            self.transport.close()
        elif self._waiting:
            self._run(self._waiting.popleft())
        else:
            self._idle_since = self.loop.time()

    def head(self, status: int, head: Head, tail: bytes, keep_alive: bool) -> bytes:
        own = self._state.default_headers
        if own is not self._own_headers:
            self._own_headers = own
            self._own_lines = b"".join([b"%b: %b\r\n" % header for header in own])
        close = b"" if keep_alive else b"connection: close\r\n"
        return b"%b%b%b%b%b" % (STATUS_LINES[status], self._own_lines, head, close, tail)

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    async def drain(self) -> None:
        """Until the client has taken most of what was written, or is gone."""
        if self.paused:
            if self._drained is None:
                self._drained = asyncio.Event()
            await self._drained.wait()

    def close(self) -> None:
        self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        if self._running is not None:
            # Bytes out of step behind a request that is being answered: its client cannot be trusted with it.
            self.transport.abort()
            return
        body = (ERROR % message).encode()
        head = b"content-type: application/json\r\nx-request-id: req_%b\r\n" % secrets.token_hex(16).encode()
        tail = b"content-length: %d\r\n\r\n%b" % (len(body), body)
        self.write(self.head(status, head, tail, False))
        self.transport.close()

    def _on_idle(self) -> None:
        now = self.loop.time()
        # A request whose body is whole takes its time; one that does not come is not waited for.
        since = now if self._running is not None and self._running.complete else self._idle_since
        left = since + self._idle_seconds - now
        if left > 0.001:
            self._idle_timer = self.loop.call_later(left, self._on_idle)
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """The server stops: a request that is running ends its connection. An idle one stays a little, and
        while others run: a client that was about to use it is told so, not cut off."""
        if self._running is not None:
            self._running.keep_alive = False
        else:
            self._linger = self.loop.call_later(LINGER_SECONDS, self._end_idle)

    def _end_idle(self) -> None:
        if self._running is None and self._state.tasks:
            self._linger = self.loop.call_later(LINGER_SECONDS, self._end_idle)
        elif self._running is None:
            self.transport.close()
