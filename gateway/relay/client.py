"""The client's side of one request: its body, its replies, and the moment it leaves.

`receive` is owned here from the first byte to the last: whoever waits for anything on behalf of a client
that left is cancelled, in every phase.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from gateway.errors import BodyTooLarge, ClientGone

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

CLOSE_KEY = "dualgauge.close"
"""Where our server leaves a function in the scope that closes the connection after the reply."""


class Client:
    """One ASGI request. `gone` is true once the client left, `started` once a reply's head was sent."""

    __slots__ = ("_finished", "_receive", "_send", "_task", "_watch", "gone", "headers", "scope", "started")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.headers: Headers = scope["headers"]
        self.gone = False
        self.started = False
        self._receive = receive
        self._send = send
        self._watch: asyncio.Task[Message] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._finished = False

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
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.gone = True
            raise ClientGone
        body: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            if len(body) > limit:
                raise _too_large(limit)
            return body
        parts = [body]
        size = len(body)
        while True:
            if size > limit:
                raise _too_large(limit)
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            parts.append(part)
            if not message.get("more_body", False):
                if size > limit:
                    raise _too_large(limit)
                return b"".join(parts)

    def watch(self) -> None:
        """From here on, a client that leaves cancels the calling task. The body must have been read."""
        self._task = asyncio.current_task()
        watch = asyncio.ensure_future(self._receive())
        watch.add_done_callback(self._left)
        self._watch = watch

    def _left(self, watch: asyncio.Future[Message]) -> None:
        if self._finished or watch.cancelled():
            return
        self.gone = True
        if self._task is not None:
            self._task.cancel()

    def finish(self) -> None:
        """No more is read or sent."""
        self._finished = True
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, data: bytes, more: bool) -> None:
        """Part of a body; returns when the client has room for more."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def reply(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole reply with its content-length."""
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def close_after(self) -> None:
        """Have the connection closed when the reply has been sent, where the server offers that."""
        close = self.scope.get(CLOSE_KEY)
        if close is not None:
            close()


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limit} bytes (bounds.body)")
