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
from gateway.crew import StartError
from gateway.crew.channel import Answering
from gateway.listeners import listener
from gateway.process import Process
from gateway.runtime import Gateway, Stored
from gateway.snapshots import reload

logger = logging.getLogger("dualgauge.gateway")

ASKED_SECONDS = 5.0
LOOK = 0.02
PROTOCOL = 1
"""Of what a parent and its workers say to each other: raised where an older one would not understand it."""
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
        "holds",
        "stored",
        "remember",
        "retire",
    ]
)


class Place(msgspec.Struct, frozen=True):
    """`protocol` is the parent's, `number` the worker's own; `channel` and `listen` are inherited
    descriptors, the latter of the sockets of all."""

    protocol: int
    number: int
    listen: tuple[int, ...]
    channel: int


def placed(given: str) -> Place:
    """Where a parent has put this process, as it says so. Raises StartError where its parent is of a version
    that talks otherwise."""
    place = msgspec.json.decode(given, type=Place)
    if place.protocol != PROTOCOL:
        raise StartError("the gateway that runs is of another version: stop it and start it, once")
    return place


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


class _Post:
    """Where a worker listens: on its own socket, and for a while on that of another one, which has died."""

    def __init__(self, gateway: Gateway, place: Place) -> None:
        for inherited in (*place.listen, place.channel):
            os.set_inheritable(inherited, False)
        self.gateway = gateway
        self.public = listener(Public(gateway), gateway.config.shutdown_grace)
        self.process = Process(gateway, self.public)
        self.begun = asyncio.Event()
        self._others = {number: socket.socket(fileno=fd) for number, fd in enumerate(place.listen)}
        self.own = self._others.pop(place.number)
        self._covered: dict[int, asyncio.Server] = {}

    async def heard(self, what: str, arguments: list[Any]) -> bytes:
        """What the parent says. Raises SiteError."""
        match what:
            case "begin":
                self.begun.set()
                while not self.public.started:  # noqa: ASYNC110 - at the start
                    await asyncio.sleep(LOOK)
            case "cover":
                (number,) = arguments
                if number in self._others:
                    self._covered[number] = await self.public.also(self._others[number].dup())
            case "uncover":
                (number,) = arguments
                if number in self._covered:
                    self._covered.pop(number).close()
            case _:
                if what == "retire":
                    self._leave_others()
                return await answer(self.process, what, arguments)
        return b"null"

    def drain(self) -> None:
        self.gateway.draining = True
        self.public.should_exit = True
        self._leave_others()
        self.begun.set()

    def _leave_others(self) -> None:
        # As long as a process has a socket, clients are let into its queue.
        while self._others:
            self._others.popitem()[1].close()


async def work(gateway: Gateway, place: Place) -> None:
    """Serve until the parent says otherwise, or is gone; returns when every request has ended."""
    post = _Post(gateway, place)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, post.drain)
    # The parent hears Ctrl-C too, and says what is to be done; and it is the one that restarts.
    for number in (signal.SIGINT, signal.SIGUSR2):
        loop.add_signal_handler(number, lambda: None)
    loop.add_signal_handler(signal.SIGHUP, reload, gateway)
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=place.channel))
    channel = Answering(reader, writer, post.heard)
    gateway.stored.told = lambda stored: channel.tell("stored", stored)
    async with running(gateway):
        await _engines_asked(gateway)
        answering = asyncio.create_task(channel.run(), name="channel")
        # Without a parent nobody would restart or end it.
        answering.add_done_callback(lambda _: post.drain())
        try:
            await post.begun.wait()
            if not gateway.draining:
                logger.info("worker %d serves (pid %d)", place.number, os.getpid())
            await post.public.serve([post.own])
            channel.tell("metrics", await post.process.metrics())
            await channel.close()
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)


async def _engines_asked(gateway: Gateway) -> None:
    """Until each engine has been asked once whether it is well: before that none gets a request."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ASKED_SECONDS):
            while not all(engine.asked for engine in gateway.fleet.engines):  # noqa: ASYNC110 - at the start
                await asyncio.sleep(LOOK)
