"""A reply written straight to the server's transport: one write a reply, one a burst of tokens.

ASGI's `send` costs a coroutine, a message and a check of every header for each part of a reply. Our own
server leaves a `Wire` in the scope instead, and calls it when the client's connection is lost; under any
other ASGI server there is none, and replies go through `send`.
"""

from __future__ import annotations

import asyncio
import http
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

Head = bytes
"""Header lines, each with its CRLF: `name: value\\r\\n`. Made of parts that are prepared once."""

WIRE_KEY = "dualgauge.wire"
STATUS_LINES = {
    status: f"HTTP/1.1 {status} {phrase}\r\n".encode()
    for status in range(200, 600)
    for phrase in [http.HTTPStatus(status).phrase if status in set(http.HTTPStatus) else "Status"]
}
LAST_CHUNK = b"0\r\n\r\n"


class Wire:
    """The server's side of one request. Writes never wait: a writer looks at `paused`, and awaits `drain`.
    `task` is the one that answers the request."""

    __slots__ = ("_cycle", "_head", "_on_gone", "task")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._head = b""
        self._on_gone: Callable[[], None] | None = None
        self.task: asyncio.Task[None] | None = None

    def whole_body(self) -> bytes | None:
        """The request's body where all of it is here already."""
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected:
            return None
        cycle.flow.resume_reading()
        return bytes(cycle.body)

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Have `on_gone` called once when the client leaves before its reply is complete."""
        if self._cycle.disconnected:
            on_gone()
        else:
            self._on_gone = on_gone

    def unwatch(self) -> None:
        self._on_gone = None

    def lost(self) -> None:
        """The server saw the connection end."""
        if self._cycle.response_complete:
            return
        self._cycle.disconnected = True
        on_gone, self._on_gone = self._on_gone, None
        if on_gone is not None:
            on_gone()

    def reply(self, status: int, head: Head, body: bytes) -> None:
        """A whole reply; its content-length is added."""
        cycle = self._cycle
        if cycle.disconnected:
            return
        tail = b"content-length: %d\r\n\r\n%b" % (len(body), body)
        cycle.transport.write(self._build(status, head, tail))
        self._complete()

    def start(self, status: int, head: Head) -> None:
        """Begin a chunked reply; its head goes out with the first bytes."""
        self._head = self._build(status, head, b"transfer-encoding: chunked\r\n\r\n")

    def write(self, data: bytes, more: bool) -> None:
        cycle = self._cycle
        if cycle.disconnected:
            return
        framed = b"%b%x\r\n%b\r\n" % (self._head, len(data), data) if data else self._head
        self._head = b""
        cycle.transport.write(framed if more else framed + LAST_CHUNK)
        if not more:
            self._complete()

    @property
    def paused(self) -> bool:
        """Whether the client takes its bytes more slowly than they come."""
        return self._cycle.flow.write_paused

    async def drain(self) -> None:
        if self._cycle.flow.write_paused and not self._cycle.disconnected:
            await self._cycle.flow.drain()

    def close_after(self) -> None:
        """Close the connection once the reply is complete."""
        self._cycle.keep_alive = False

    def break_off(self) -> None:
        """Close without the reply's proper end, so that the client knows that it is cut."""
        self._cycle.disconnected = True
        self._cycle.transport.close()

    def _build(self, status: int, head: Head, tail: bytes) -> bytes:
        cycle = self._cycle
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        own = b"".join([b"%b: %b\r\n" % header for header in cycle.default_headers])
        close = b"" if cycle.keep_alive else b"connection: close\r\n"
        return b"%b%b%b%b%b" % (STATUS_LINES[status], own, head, close, tail)

    def _complete(self) -> None:
        cycle = self._cycle
        self._on_gone = None
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()
