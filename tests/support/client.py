"""A client on a raw socket: every byte of a reply is seen as it comes, and it can leave at any moment."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import httptools

LOOP_TICK = 0.002
"""Seconds by which a sleep may end too early: the event loop's timers count milliseconds."""

Headers = Mapping[str, str]
SECONDS = 10.0


@dataclass
class Reply:
    """`complete` is whether the reply ended as HTTP says it must; `headers` have lower-case names."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    complete: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Wire:
    """One connection. `send` a request, then `head`, `more` and `reply` read its answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._parser = httptools.HttpResponseParser(self)
        self._skip = False
        self.answer = Reply()
        self.ended = False

    @classmethod
    async def open(cls, port: int) -> Wire:
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 24))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.transport.abort()

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self.answer.headers[name.decode().lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.answer.status = self._parser.get_status_code()
        self._skip = self.answer.status < 200

    def on_body(self, body: bytes) -> None:
        self.answer.body += body

    def on_message_complete(self) -> None:
        if self._skip:
            self.answer = Reply()
        else:
            self.answer.complete = True

    # a test's side

    def raw(self, data: bytes) -> None:
        self._writer.write(data)

    def send(
        self, path: str, body: object = None, *, method: str = "POST", headers: Headers | None = None
    ) -> None:
        """Write one request; `body` is JSON, or bytes as they are."""
        self.answer = Reply()
        self.raw(request(path, body, method=method, headers=headers))

    async def _read(self) -> bool:
        """Some more of the reply; False where the connection has ended."""
        try:
            data = await asyncio.wait_for(self._reader.read(1 << 16), SECONDS)
        except ConnectionResetError:
            data = b""
        if not data:
            self.ended = True
            return False
        self._parser.feed_data(data)
        return True

    async def head(self) -> Reply:
        """Once status and headers are there."""
        while self.answer.status < 200 and await self._read():
            pass
        return self.answer

    async def until(self, part: bytes, times: int = 1) -> bytes:
        """The body so far, once it holds `part` so often."""
        while self.answer.body.count(part) < times:
            if not await self._read():
                raise AssertionError(f"the reply ended without {part!r}: {self.answer}")
        return self.answer.body

    async def reply(self) -> Reply:
        """The whole reply, or as much of it as came before the connection ended."""
        while not self.answer.complete and await self._read():
            pass
        return self.answer

    async def some(self) -> bytes:
        """Some bytes as they came, unread by any parser; empty at the connection's end."""
        return await asyncio.wait_for(self._reader.read(1 << 16), SECONDS)

    async def closed(self) -> bool:
        """Whether the other side closes the connection, within a second."""
        return await self.closes(1)

    async def closes(self, seconds: float) -> bool:
        """Whether the other side closes the connection in that time, once what it sent before is read."""
        try:
            async with asyncio.timeout(seconds):
                return not await self._reader.read(1)
        except TimeoutError:
            return False
        except ConnectionResetError:
            return True

    def pause(self) -> None:
        """Take no more bytes from the socket than are here already."""
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]

    def resume(self) -> None:
        self._writer.transport.resume_reading()  # type: ignore[attr-defined]

    def leave(self) -> float:
        """Close at once, as a client that lost interest; the loop's time."""
        self._writer.close()
        return asyncio.get_running_loop().time()

    def reset(self) -> float:
        """Close with RST, as a client that died; the loop's time."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()
        return asyncio.get_running_loop().time()


def request(path: str, body: object = None, *, method: str = "POST", headers: Headers | None = None) -> bytes:
    """The bytes of one request."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"host": "localhost"}
    if body is not None:
        fields |= {"content-type": "application/json", "content-length": str(len(data))}
    fields |= headers or {}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + data


async def ask(
    port: int, path: str, body: object = None, *, method: str = "POST", headers: Headers | None = None
) -> Reply:
    """One request on a connection of its own."""
    async with await Wire.open(port) as wire:
        wire.send(path, body, method=method, headers=headers)
        return await wire.reply()


async def get(port: int, path: str, headers: Headers | None = None) -> Reply:
    return await ask(port, path, method="GET", headers=headers)


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for something that other tasks bring about."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)
