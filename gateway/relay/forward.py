"""Passes one reply from an engine to its client: a stream event by event, JSON whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from gateway.errors import EngineBroke, GatewayError
from gateway.relay import replies
from gateway.relay.client import Client, Head
from gateway.relay.http1 import Request
from gateway.relay.sse import Tap, Usage
from gateway.relay.upstream import Connection, LostLate, TimedOut

JSON_HELD = 8 << 20
ERROR_HELD = 1 << 20
EVENTS = b"text/event-stream"

ReadReply = Callable[[bytes], Usage | None]
Begun = Callable[[bytes], None]
"""Called with the first bytes for the client, before they are sent."""
Beat = Callable[[], None]
"""Called whenever whole events of a stream go to the client: it is on the path of every token."""


class Forward:
    """One reply. `head` makes the client's header lines, given the engine's content type; `events` is true
    once the reply is known as a stream of events."""

    __slots__ = (
        "_beat",
        "_begun",
        "_client",
        "_connection",
        "_engine",
        "_head",
        "_read_reply",
        "events",
        "tap",
        "usage",
    )

    def __init__(
        self,
        client: Client,
        connection: Connection,
        *,
        engine: str,
        head: Callable[[bytes], Head],
        read_reply: ReadReply,
        tap: Tap,
        begun: Begun,
        beat: Beat,
    ) -> None:
        self._client = client
        self._connection = connection
        self._engine = engine
        self._head = head
        self._read_reply = read_reply
        self._begun = begun
        self._beat = beat
        self.events = False
        self.tap = tap
        self.usage: Usage | None = None

    async def run(self) -> None:
        """Raises EngineBroke, EngineTimeout, EngineRefused; `client.started` tells whether that is too late
        for a status."""
        connection = self._connection
        try:
            if connection.status not in replies.OK:
                body = await self._whole(ERROR_HELD)
                raise replies.error_from(connection.status, body or b"", self._engine)
            content_type = _content_type(connection)
            if content_type[: len(EVENTS)].lower() == EVENTS:
                self.events = True
                await self._stream(content_type)
            else:
                await self._json(content_type)
        except LostLate as exc:
            raise EngineBroke(f"engine {self._engine} broke off inside its reply: {exc}") from exc
        except TimedOut as exc:
            raise replies.timeout_error(exc, self._engine) from exc

    async def _whole(self, limit: int) -> bytes | None:
        """The whole body; None once it is over `limit` bytes, what came so far being put back."""
        connection = self._connection
        parts: list[bytes] = []
        size = 0
        while True:
            data = connection.take()
            if data:
                parts.append(data)
                size += len(data)
            if connection.complete:
                return parts[0] if len(parts) == 1 else b"".join(parts)
            if size > limit:
                connection.put_back(b"".join(parts))
                return None
            connection.check()
            await connection.wait()

    async def _json(self, content_type: bytes) -> None:
        body = await self._whole(JSON_HELD)
        if body is None:
            await self._pass_on(content_type)
            return
        try:
            self.usage = self._read_reply(body)
        except (msgspec.DecodeError, RecursionError):
            raise self._not_json(body) from None
        self._begun(body)
        await self._client.reply(self._connection.status, self._head(content_type), body)

    def _not_json(self, body: bytes) -> GatewayError:
        shown = "something that is not a JSON object" if body.strip() else "an empty body"
        return EngineBroke(f"engine {self._engine} answered {self._connection.status} with {shown}")

    async def _pass_on(self, content_type: bytes) -> None:
        """A reply too large to hold: its bytes as they come."""
        client, connection = self._client, self._connection
        self._begun(b"")
        await client.start(connection.status, self._head(content_type))
        while True:
            data = connection.take()
            if connection.complete:
                await client.send(data, False)
                return
            if data:
                await client.send(data, True)
            connection.check()
            await connection.wait()

    async def _stream(self, content_type: bytes) -> None:
        client, connection = self._client, self._connection
        direct = client if isinstance(client, Request) else None
        while True:
            if direct is not None:
                await direct.drain()
            data = connection.take()
            if data:
                data = self._feed(data)
            complete = connection.complete
            if complete:
                data += self.tap.finish()
            if data or complete:
                # Not before: until an event is whole, a broken engine can still be told by a status.
                if not client.started:
                    if not data:
                        raise EngineBroke(f"engine {self._engine} ended its stream without an event")
                    self._begun(data)
                    await client.start(connection.status, self._head(content_type))
                await client.send(data, not complete)
                if complete:
                    return
            connection.check()
            if client.started and direct is not None:
                await connection.flow(partial(self._pour, direct))
            else:
                await connection.wait()

    def _pour(self, client: Request, data: bytes) -> bool:
        """Bytes of a stream under way, from one socket to the other; false where the client is slow."""
        client.write(self._feed(data))
        return not client.paused

    def _feed(self, data: bytes) -> bytes:
        data = self.tap.feed(data)
        if data:
            self._beat()
        return data


def _content_type(connection: Connection) -> bytes:
    for name, value in connection.headers:
        if name == b"content-type":
            return value
    return b"application/json"
