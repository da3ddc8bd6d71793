"""Passes one reply from an engine to its client: a stream event by event, JSON whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from gateway.errors import EngineBroke, GatewayError
from gateway.relay import replies
from gateway.relay.client import Client, Head
from gateway.relay.http1 import CHUNK_STARTS, Request
from gateway.relay.sse import Tap, Usage
from gateway.relay.upstream import Connection, Lane, LostLate, Sink, TimedOut

JSON_HELD = 8 << 20
ERROR_HELD = 1 << 20
CHUNK_OF_EVENTS = b"\n\n\r\n"
"""How a chunk ends that holds whole events."""
LF = ord("\n")

Beat = Callable[[], None]
"""Called whenever whole events of a stream go to the client: it is on the path of every token."""


class Asker(Protocol):
    """The request that a reply answers."""

    def head(self, content_type: bytes) -> Head:
        """The header lines for the client, given the engine's content type."""

    def begun(self, data: bytes) -> None:
        """Told the first bytes for the client, before they are sent."""

    def read_usage(self, reply: bytes) -> Usage | None:
        """The usage of a whole reply. Raises msgspec.DecodeError where it is not a JSON object."""

    def follow(self) -> tuple[Tap, Beat]:
        """What follows a reply that is a stream of events."""


class Forward:
    """One reply. `tap` is there once the reply is known as a stream of events."""

    __slots__ = ("_asker", "_beat", "_client", "_connection", "_engine", "tap", "usage")

    def __init__(self, asker: Asker, client: Client, connection: Connection, engine: str) -> None:
        self._asker = asker
        self._client = client
        self._connection = connection
        self._engine = engine
        self._beat: Beat = _silent
        self.tap: Tap | None = None
        self.usage: Usage | None = None

    async def run(self) -> None:
        """Raises EngineBroke, EngineTimeout, EngineRefused; `client.started` tells whether that is too late
        for a status."""
        connection = self._connection
        try:
            if connection.status not in replies.OK:
                body = await self._whole(ERROR_HELD)
                raise replies.error_from(connection.status, body or b"", self._engine)
            content_type = connection.content_type
            if connection.streams:
                self.tap, self._beat = self._asker.follow()
                await self._stream(content_type, self.tap)
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
        connection = self._connection
        body = connection.take() if connection.complete else await self._whole(JSON_HELD)
        if body is None:
            await self._pass_on(content_type)
            return
        try:
            self.usage = self._asker.read_usage(body)
        except (msgspec.DecodeError, RecursionError):
            raise self._not_json(body) from None
        self._asker.begun(body)
        await self._client.reply(connection.status, self._asker.head(content_type), body)

    def _not_json(self, body: bytes) -> GatewayError:
        shown = "something that is not a JSON object" if body.strip() else "an empty body"
        return EngineBroke(f"engine {self._engine} answered {self._connection.status} with {shown}")

    async def _pass_on(self, content_type: bytes) -> None:
        """A reply too large to hold: its bytes as they come."""
        client, connection = self._client, self._connection
        self._asker.begun(b"")
        await client.start(connection.status, self._asker.head(content_type))
        while True:
            data = connection.take()
            if connection.complete:
                await client.send(data, False)
                return
            if data:
                await client.send(data, True)
            connection.check()
            await connection.wait()

    async def _stream(self, content_type: bytes, tap: Tap) -> None:
        client, connection = self._client, self._connection
        pour: Sink | None = None
        lane: Lane | None = None
        direct = client if isinstance(client, Request) else None
        while True:
            if direct is not None:
                await direct.drain()
            data = connection.take()
            if data:
                data = self._feed(tap, data)
            complete = connection.complete
            if complete:
                data += tap.finish()
            if data or complete:
                # Not before: until an event is whole, a broken engine can still be told by a status.
                if not client.started:
                    if not data:
                        raise EngineBroke(f"engine {self._engine} ended its stream without an event")
                    self._asker.begun(data)
                    await client.start(connection.status, self._asker.head(content_type))
                await client.send(data, not complete)
                if complete:
                    return
            connection.check()
            if client.started and direct is not None:
                if pour is None:
                    pour, lane = partial(self._pour, direct, tap), self._lane(direct, tap)
                await connection.flow(pour, lane)
            else:
                await connection.wait()

    def _pour(self, client: Request, tap: Tap, data: bytes) -> bool:
        """Bytes of a stream under way, from one socket to the other; false where the client is slow."""
        client.write(self._feed(tap, data))
        return not client.paused

    def _lane(self, client: Request, tap: Tap) -> Lane | None:
        """The way of most tokens: a chunk that holds whole events goes on as it came, framing and all.

        One function without helpers, since each token of each stream goes through it.
        """
        if not client.in_chunks:
            return None
        beat, passes, write, longest = self._beat, tap.passes, client.chunk_writer(), len(CHUNK_STARTS)
        stop_flow = self._connection.stop_flow

        def lane(data: bytes) -> bool:
            size = len(data)
            if (
                size >= longest
                or not data.startswith(start := CHUNK_STARTS[size])
                or data[len(start)] == LF  # which would be a blank line with that of the framing
                or not data.endswith(CHUNK_OF_EVENTS)
                or not passes(data)
            ):
                return False
            beat()
            if not write(data):
                stop_flow()
            return True

        return lane

    def _feed(self, tap: Tap, data: bytes) -> bytes:
        data = tap.feed(data)
        if data:
            self._beat()
        return data


def _silent() -> None:
    """Nothing is told before a stream is known as one."""
