"""The gateway as a process: two listeners on one event loop, signals, and an orderly end.

SIGTERM or SIGINT: no new connections, running requests have `shutdown_grace`; a second one ends at once.
SIGHUP reads policy and keys again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

import uvicorn

from gateway.admin import admin_app
from gateway.app import Public, reload, running
from gateway.config import HostPort
from gateway.relay.http1 import Connection
from gateway.runtime import Gateway

logger = logging.getLogger("dualgauge.gateway")

# Longer than most clients keep idle connections, so that it is they who close.
KEEP_ALIVE_SECONDS = 75
BACKLOG = 4096
OPEN_FILES = 65536
THREAD_SECONDS = 0.0001


class Listener(uvicorn.Server):
    """A uvicorn server whose signals are handled outside, since several share a loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(address: HostPort, setting: str) -> socket.socket:
    """A listening socket. Raises OSError with a message that says what to change."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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


async def serve(gateway: Gateway) -> None:
    """Listen on both ports until a signal; returns when everything has ended. Raises OSError."""
    config = gateway.config
    with contextlib.ExitStack() as stack:
        public_socket = stack.enter_context(contextlib.closing(bind(config.listen, "listen")))
        admin_socket = stack.enter_context(contextlib.closing(bind(config.admin, "admin")))
        public = listener(Public(gateway), config.shutdown_grace)
        admin = listener(admin_app(gateway, reload), 1)
        _on_signals(gateway, public)
        async with running(gateway):
            logger.info("listening on %s, admin on %s", config.listen.url, config.admin.url)
            admin_task = asyncio.create_task(admin.serve([admin_socket]), name="admin")
            try:
                await public.serve([public_socket])
            finally:
                admin.should_exit = True
                await admin_task


def _on_signals(gateway: Gateway, public: Listener) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if gateway.draining:
            logger.warning("ending at once")
            os._exit(130)
        gateway.draining = True
        public.should_exit = True
        logger.info("draining: running requests have %g s", gateway.config.shutdown_grace)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, reload, gateway)


def allow_open_files(wanted: int = OPEN_FILES) -> None:
    """Raise this process's limit of open files, as far as the system lets it: each request takes two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def run(gateway: Gateway) -> None:
    """Serve on an event loop of uvloop's."""
    import uvloop

    allow_open_files()

    # Requests leave no reference cycles behind, so that the collector finds nothing to free: it need not
    # look often, and never at what was loaded at the start.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    # Spans and lines are written by threads: they must not hold up the event loop for Python's usual 5 ms.
    sys.setswitchinterval(THREAD_SECONDS)

    uvloop.run(serve(gateway))
