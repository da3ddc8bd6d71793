"""Listening sockets, and the servers that answer on them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from gateway.app import Public
from gateway.config import HostPort
from gateway.relay.http1 import Connection

# Longer than most clients keep idle connections, so that it is they who close.
KEEP_ALIVE_SECONDS = 75
BACKLOG = 4096


class Listener(uvicorn.Server):
    """A uvicorn server whose signals are handled outside, since several share a loop."""

    retiring = False

    def retire(self) -> None:
        """Take no new connections; those that are there go on until they end, and then `serve` returns."""
        self.retiring = True
        for server in self.servers:
            server.close()

    async def also(self, sock: socket.socket) -> asyncio.Server:
        """Accept on this socket too, until what is returned is closed; it is closed with the others."""
        kind, state = self.config.http_protocol_class, self.server_state
        server = await asyncio.get_running_loop().create_server(
            lambda: kind(config=self.config, server_state=state, app_state={}),  # type: ignore[call-arg]
            sock=sock,
        )
        self.servers.append(server)
        return server

    async def on_tick(self, counter: int) -> bool:
        state = self.server_state
        if self.retiring and not state.connections and not state.tasks:
            return True
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(address: HostPort, setting: str, *, shared: bool = False) -> socket.socket:
    """A listening socket; `shared`: others of this user may listen there too, and the kernel spreads clients
    over all. Raises OSError with a message that says what to change."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((address.host, address.port))
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as exc:
        sock.close()
        why = "is in use by another process" if exc.errno == errno.EADDRINUSE else f"cannot be used: {exc}"
        raise OSError(exc.errno, f"{address} {why}: change `{setting}` in the configuration") from exc
    return sock


def listener(app: Any, grace: float) -> Listener:
    """A server of the public port, on our own HTTP/1.1, or of an ASGI application, on uvicorn's."""
    return Listener(
        uvicorn.Config(
            app,
            http=Connection if isinstance(app, Public) else "httptools",
            ws="none",
            lifespan="off",
            loop="none",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=max(1, round(grace)),
        )
    )
