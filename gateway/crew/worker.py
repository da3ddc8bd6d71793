"""A worker: one gateway process whose listening socket and whose orders come from its parent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from typing import Any

import msgspec

from gateway.app import Public, running
from gateway.crew.channel import Answering
from gateway.listeners import Listener, listener
from gateway.process import Process
from gateway.runtime import Gateway, Stored
from gateway.snapshots import reload

logger = logging.getLogger("dualgauge.gateway")

ASKED_SECONDS = 5.0
LOOK = 0.02
QUESTIONS = frozenset(
    [
        "ready",
        "status",
        "reload",
        "hold",
        "demand",
        "live",
        "decision",
        "policy",
        "tenants",
        "explain",
        "metrics",
        "missing",
        "stored",
        "remember",
        "retire",
    ]
)


class Place(msgspec.Struct, frozen=True):
    """`number` names the worker among the others; `listen` and `channel` are inherited descriptors."""

    number: int
    listen: int
    channel: int


def placed(given: str) -> Place:
    """Where a parent has put this process, as it says so."""
    return msgspec.json.decode(given, type=Place)


async def answer(process: Process, what: str, arguments: list[Any]) -> bytes:
    """What a process says to a question of its parent's, as JSON. Raises SiteError."""
    if what not in QUESTIONS:
        raise ValueError(f"unknown question `{what}`")
    if what == "remember":
        await process.remember(msgspec.convert(arguments[0], list[Stored]))
        return b"null"
    told = await getattr(process, what)(*arguments)
    if what == "ready":
        status, body = told
        told = status, msgspec.Raw(body)
    return told if isinstance(told, bytes) else msgspec.json.encode(told)


async def work(gateway: Gateway, place: Place) -> None:
    """Serve until the parent says otherwise, or is gone; returns when every request has ended."""
    begun = asyncio.Event()
    for inherited in (place.listen, place.channel):
        os.set_inheritable(inherited, False)
    sock = socket.socket(fileno=place.listen)
    public = listener(Public(gateway), gateway.config.shutdown_grace)
    process = Process(gateway, public)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, _drain, gateway, public, begun)
    # The parent hears Ctrl-C too, and says what is to be done; and it is the one that restarts.
    for number in (signal.SIGINT, signal.SIGUSR2):
        loop.add_signal_handler(number, lambda: None)
    loop.add_signal_handler(signal.SIGHUP, reload, gateway)

    async def heard(what: str, arguments: list[Any]) -> bytes:
        if what == "begin":
            begun.set()
            return b"null"
        return await answer(process, what, arguments)

    channel = Answering(*await asyncio.open_connection(sock=socket.socket(fileno=place.channel)), heard)
    gateway.stored.told = lambda stored: channel.tell("stored", stored)
    async with running(gateway):
        await _engines_asked(gateway)
        answering = asyncio.create_task(channel.run(), name="channel")
        # Without a parent nobody would restart or end it.
        answering.add_done_callback(lambda _: _drain(gateway, public, begun))
        try:
            await begun.wait()
            if not gateway.draining:
                logger.info("worker %d serves (pid %d)", place.number, os.getpid())
            await public.serve([sock])
            channel.tell("metrics", await process.metrics())
            await channel.close()
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)


def _drain(gateway: Gateway, public: Listener, begun: asyncio.Event) -> None:
    gateway.draining = True
    public.should_exit = True
    begun.set()


async def _engines_asked(gateway: Gateway) -> None:
    """Until each engine has been asked once whether it is well: before that none gets a request."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ASKED_SECONDS):
            while not all(engine.asked for engine in gateway.fleet.engines):  # noqa: ASYNC110 - at the start
                await asyncio.sleep(LOOK)
