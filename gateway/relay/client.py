"""The client's side of one request: its body, its replies, and the moment it leaves.

Whoever waits for anything on behalf of a client that left is cancelled, in every phase. `http1.Request` is
what our own server gives; `AsgiClient` makes the same of any ASGI server's request.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from gateway.errors import BodyTooLarge, BodyTooSlow, ClientGone

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
Head = bytes
"""Header lines, each with its CRLF: `name: value\\r\\n`. Made of parts that are prepared once."""


class Client(ABC):
    """`gone` is true once the client left, `started` once a reply's head was given. Names of `headers` are
    lower case; `fields` has the first value of each. `scheme` is `http`, or `https` where a server before us
    ends TLS."""

    __slots__ = ("fields", "gone", "headers", "method", "path", "started")

    scheme: str = "http"

    def __init__(self, method: str, path: str, headers: Headers) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        self.fields = dict(reversed(headers))
        self.gone = False
        self.started = False

    @property
    def declared(self) -> int | None:
        """Bytes of the body by its content-length; None where there is none. Leading zeros are no digits that
        count, and beyond 20 no number is met that a body could have."""
        value = self.fields.get(b"content-length")
        return int(value.lstrip(b"0")[:20] or b"0") if value is not None and value.isdigit() else None

    @abstractmethod
    async def body(self, limit: int, seconds: float) -> bytes:
        """The whole body, of `limit` bytes at most, which must be here within so many seconds. Raises
        BodyTooLarge, BodyTooSlow, ClientGone."""

    @abstractmethod
    def watch(self) -> None:
        """From here on, a client that leaves cancels the calling task. The body must have been read."""

    @abstractmethod
    def finish(self) -> None:
        """No more is read or sent."""

    @abstractmethod
    async def reply(self, status: int, head: Head, body: bytes) -> None:
        """A whole reply with its content-length."""

    @abstractmethod
    async def start(self, status: int, head: Head) -> None:
        """Begin a reply whose length is not known."""

    @abstractmethod
    async def send(self, data: bytes, more: bool) -> None:
        """Part of it; returns when the client has room for more."""

    @abstractmethod
    def close_after(self) -> None:
        """Have the connection closed when the reply has been sent, where the server offers that."""

    @abstractmethod
    def break_off(self) -> None:
        """Close without the reply's proper end, so that the client knows that it is cut."""


class AsgiClient(Client):
    """A request of an ASGI server. `receive` is owned here from the first byte to the last."""

    __slots__ = ("_receive", "_send", "_task", "_watch", "scheme")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(scope["method"], scope["path"], list(scope["headers"]))
        self.scheme = scope.get("scheme", "http")
        self._receive = receive
        self._send = send
        self._watch: asyncio.Task[Message] | None = None
        self._task: asyncio.Task[Any] | None = None

    async def body(self, limit: int, seconds: float) -> bytes:
        if (self.declared or 0) > limit:
            raise BodyTooLarge.over(limit)
        try:
            async with asyncio.timeout(seconds):
                return await self._whole(limit)
        except TimeoutError:
            raise BodyTooSlow.after(seconds) from None

    async def _whole(self, limit: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise BodyTooLarge.over(limit)
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    def watch(self) -> None:
        self._task = asyncio.current_task()
        self._watch = asyncio.ensure_future(self._receive())
        self._watch.add_done_callback(self._received)

    def _received(self, watch: asyncio.Future[Message]) -> None:
        if not watch.cancelled() and self._task is not None:
            self.gone = True
            self._task.cancel()

    def finish(self) -> None:
        self._task = None
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    async def reply(self, status: int, head: Head, body: bytes) -> None:
        await self.start(status, b"%bcontent-length: %d\r\n" % (head, len(body)))
        await self.send(body, False)

    async def start(self, status: int, head: Head) -> None:
        self.started = True
        headers = [tuple(line.split(b": ", 1)) for line in head.split(b"\r\n")[:-1]]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, data: bytes, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    def close_after(self) -> None:
        """ASGI has no word for it."""

    def break_off(self) -> None:
        """A server does so by itself when the application returns inside a reply."""
