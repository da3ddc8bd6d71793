"""The client's side of one request: its body, its replies, and the moment it leaves.

`receive` is owned here from the first byte to the last: whoever waits for anything on behalf of a client
that left is cancelled, in every phase.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from gateway.errors import BodyTooLarge, ClientGone
from gateway.relay.wire import WIRE_KEY, Head, Wire

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Client:
    """One ASGI request. `gone` is true once the client left, `started` once a reply's head was sent; `wire`
    is the short way to the client, where the server offers one."""

    __slots__ = ("_receive", "_send", "_task", "_watch", "gone", "headers", "scope", "started", "wire")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.gone = False
        self.started = False
        # Taken out of the scope: a wire holds the server's cycle, which holds the scope.
        wire: Wire | None = scope.pop(WIRE_KEY, None)
        self.wire = wire if scope["method"] != "HEAD" else None
        self._receive = receive
        self._send = send
        self._watch: asyncio.Task[Message] | None = None
        self._task: asyncio.Task[Any] | None = None

    def header(self, name: bytes) -> bytes | None:
        for key, value in self.headers:
            if key == name:
                return value
        return None

    async def body(self, limit: int) -> bytes:
        """The whole body, of `limit` bytes at most. Raises BodyTooLarge, ClientGone."""
        declared = self.header(b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)
        whole = self.wire.whole_body() if self.wire is not None else None
        if whole is not None:
            if len(whole) > limit:
                raise _too_large(limit)
            return whole
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
                raise _too_large(limit)
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    def watch(self) -> None:
        """From here on, a client that leaves cancels the calling task. The body must have been read."""
        if self.wire is not None:
            self._task = self.wire.task
            self.wire.watch(self._left)
            return
        self._task = asyncio.current_task()
        self._watch = asyncio.ensure_future(self._receive())
        self._watch.add_done_callback(self._received)

    def _received(self, watch: asyncio.Future[Message]) -> None:
        if not watch.cancelled():
            self._left()

    def _left(self) -> None:
        self.gone = True
        if self._task is not None:
            self._task.cancel()

    def finish(self) -> None:
        """No more is read or sent."""
        self._task = None
        if self.wire is not None:
            self.wire.unwatch()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    async def start(self, status: int, head: Head) -> None:
        self.started = True
        if self.wire is not None:
            self.wire.start(status, head)
        else:
            headers = [tuple(line.split(b": ", 1)) for line in head.split(b"\r\n")[:-1]]
            await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, data: bytes, more: bool) -> None:
        """Part of a body; returns when the client has room for more."""
        if self.wire is not None:
            self.wire.write(data, more)
            await self.wire.drain()
        else:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def reply(self, status: int, head: Head, body: bytes) -> None:
        """A whole reply with its content-length."""
        if self.wire is not None:
            self.started = True
            self.wire.reply(status, head, body)
        else:
            await self.start(status, b"%bcontent-length: %d\r\n" % (head, len(body)))
            await self.send(body, False)

    def close_after(self) -> None:
        """Have the connection closed when the reply has been sent, where the server offers that."""
        if self.wire is not None:
            self.wire.close_after()

    def break_off(self) -> None:
        """Close inside a reply; a server other than ours does so when the application returns."""
        if self.wire is not None:
            self.wire.break_off()


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limit} bytes (bounds.body)")
