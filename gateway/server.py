"""The gateway as a process: two listeners on one event loop, signals, and an orderly end.

SIGTERM or SIGINT: no new connections, running requests have `shutdown_grace`; a second one ends at once.
SIGHUP reads policy and keys again. SIGUSR2 has another process take this one's place, of which it becomes the
parent: whoever started it finds it where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import secrets
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from gateway.admin import admin_app
from gateway.app import Public, running
from gateway.config import Config, HostPort
from gateway.crew import StartError
from gateway.listeners import Listener, bind, listener
from gateway.process import Process
from gateway.runtime import Gateway
from gateway.site import Site, SiteError

if TYPE_CHECKING:
    from gateway.crew.crew import Crew

logger = logging.getLogger("dualgauge.gateway")

OPEN_FILES = 65536
LAST_STANDARD_FILE = 2
THREAD_SECONDS = 0.001
"""The longest that a thread keeps the interpreter from the event loop. With a tenth of it, threads had to get
it back so often that a loop which is always busy spent a fifth of its time on handing it over; with twice as
much, a collector that is slow cost requests more than 1 ms at p99 (`bench/collectors.py`)."""


class _Alone:
    """A process without workers. `crew` is there once another process has been started to take its place;
    `crews` ends what it keeps running."""

    def __init__(
        self,
        gateway: Gateway,
        public: Listener,
        sock: socket.socket,
        listen: str | None,
        crews: contextlib.AsyncExitStack,
    ) -> None:
        self.crew: Crew | None = None
        self.process = Process(gateway, public, self._restart)
        self._public = public
        self._sock = sock
        self._listen = listen
        self._crews = crews

    @property
    def site(self) -> Site:
        return self.process if self.crew is None else self.crew

    async def _restart(self) -> object:
        from gateway.crew.crew import Crew

        gateway = self.process.gateway
        if gateway.draining:
            raise SiteError(409, "this gateway ends")
        if gateway.access is not None:
            gateway.access.shared = True
        crew = Crew(
            gateway.config,
            # The server closes its own when this process retires.
            [self._sock.dup()],
            listen=self._listen,
            clock=gateway.clock,
            wall=gateway.wall,
            name=f"{gateway.rand.getrandbits(64):016x}",
            local=self.process,
        )
        self.crew = await self._crews.enter_async_context(crew)
        return await crew.restart()

    def stop(self) -> None:
        self.process.gateway.draining = True
        self._public.should_exit = True
        if self.crew is not None:
            self.crew.stop()

    def kill(self) -> None:
        if self.crew is not None:
            self.crew.kill()


async def serve(gateway: Gateway, listen: str | None = None) -> None:
    """Listen on both ports until a signal; returns when everything has ended. `listen` is an address that was
    given instead of the file's. Raises OSError."""
    config = gateway.config
    async with contextlib.AsyncExitStack() as stack:
        public_socket = stack.enter_context(contextlib.closing(bind(config.listen, "listen")))
        admin_socket = stack.enter_context(contextlib.closing(bind(config.admin, "admin")))
        public = listener(Public(gateway), config.shutdown_grace)
        crews = await stack.enter_async_context(contextlib.AsyncExitStack())
        alone = _Alone(gateway, public, public_socket, listen, crews)
        on_signals(lambda: alone.site, ending(alone.stop, alone.kill, config.shutdown_grace))
        async with running(gateway):
            logger.info("listening on %s, admin on %s", config.listen.url, config.admin.url)
            admin = await _administered(crews, config, lambda: alone.site, admin_socket)
            await public.serve([public_socket])
            if not gateway.retiring:
                await admin.aclose()
        if alone.crew is not None and gateway.retiring:
            await alone.crew.left(await alone.process.metrics())
            await alone.crew.ended()


async def _administered(
    stack: contextlib.AsyncExitStack, config: Config, site: Callable[[], Site], sock: socket.socket
) -> contextlib.AsyncExitStack:
    """Serve the admin port until what is returned, or `stack`, is closed."""
    server = listener(admin_app(config, site), 1)
    serving = asyncio.create_task(server.serve([sock]), name="admin")

    async def end() -> None:
        server.should_exit = True
        await serving

    ending = await stack.enter_async_context(contextlib.AsyncExitStack())
    ending.push_async_callback(end)
    return ending


async def oversee(config: Config, listen: str | None = None) -> None:
    """Have `workers` processes serve, and their figures and orders in one place, until a signal; returns when
    all have ended. Raises OSError, and StartError where the first of them do not come up."""
    from gateway.crew.crew import Crew

    async with contextlib.AsyncExitStack() as stack:
        # Without being shared: another gateway on this port would be told of by nobody.
        bind(config.listen, "listen").close()
        sockets = [stack.enter_context(contextlib.closing(bind(config.listen, "listen", shared=True)))]
        address = HostPort(config.listen.host, sockets[0].getsockname()[1])
        sockets += [
            stack.enter_context(contextlib.closing(bind(address, "listen", shared=True)))
            for _ in range(config.workers - 1)
        ]
        admin_socket = stack.enter_context(contextlib.closing(bind(config.admin, "admin")))
        crew = Crew(
            config,
            sockets,
            listen=listen,
            clock=time.monotonic,
            wall=time.time,
            name=secrets.token_hex(8),
        )
        await stack.enter_async_context(crew)
        on_signals(lambda: crew, ending(crew.stop, crew.kill, config.shutdown_grace))
        await _administered(stack, config, lambda: crew, admin_socket)
        try:
            await crew.begin()
        except StartError:
            if not crew.stopping:
                raise
            return
        logger.info("%d workers on %s, admin on %s", len(sockets), config.listen.url, config.admin.url)
        await crew.ended()


def ending(stop: Callable[[], None], kill: Callable[[], None], grace: float) -> Callable[[], None]:
    """`stop` at the first call; at a second one `kill`, and the end of this process at once."""
    begun = False

    def end() -> None:
        nonlocal begun
        if begun:
            logger.warning("ending at once")
            kill()
            logging.shutdown()
            os._exit(130)
        begun = True
        stop()
        logger.info("draining: running requests have %g s", grace)

    return end


def on_signals(site: Callable[[], Site], stop: Callable[[], None]) -> None:
    """`stop` on SIGTERM and SIGINT, reload on SIGHUP, restart on SIGUSR2."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    async def have(done: Callable[[], Awaitable[object]]) -> None:
        # Whoever cannot do it has logged why.
        with contextlib.suppress(SiteError):
            await done()

    def begin(done: Callable[[], Awaitable[object]]) -> None:
        task = asyncio.create_task(have(done))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, lambda: begin(lambda: site().reload()))
    loop.add_signal_handler(signal.SIGUSR2, lambda: begin(lambda: site().restart()))


def allow_open_files(wanted: int = OPEN_FILES) -> None:
    """Raise this process's limit of open files, as far as the system lets it: each request takes two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def keep_standard_files() -> None:
    """Have descriptors 0 to 2 be there, whoever started this process: else a socket would be standard error,
    and uvloop aborts where it closes one of them."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= LAST_STANDARD_FILE:
        pass
    os.close(opened)


def run(serving: Coroutine[Any, Any, None]) -> None:
    """Serve on an event loop of uvloop's."""
    import uvloop

    allow_open_files()
    settle()
    uvloop.run(serving)


def settle() -> None:
    """Tell the interpreter of a process that has loaded all that it is going to serve now."""
    # Requests leave no reference cycles behind, so that the collector finds nothing to free: it need not
    # look often, and never at what was loaded at the start.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    sys.setswitchinterval(THREAD_SECONDS)
