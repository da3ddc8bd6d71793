"""Leases in Redis (or Valkey), for any number of processes: one round trip a reservation, by `limits.lua`.

A lease that is not renewed expires by itself, so that a process that dies leaves nothing behind. Where the
server does not answer in time, `on_store_failure` says what becomes of a reservation: `closed` refuses it
(503), `open` grants it, `local` takes it from this process's share (`gateway.limits.local`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

import hiredis
import msgspec
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MovedError,
    NoScriptError,
    ResponseError,
    TryAgainError,
)

from gateway.config import LimitsPart, OnStoreFailure
from gateway.errors import GatewayError, LimitsUnavailable
from gateway.limits import Ask, Ended, Held, Lease, Reserved
from gateway.limits.course import Course, chart
from gateway.limits.link import Link
from gateway.limits.local import LocalShare
from gateway.limits.memory import Holder
from gateway.limits.topology import topology

if TYPE_CHECKING:
    from redis.asyncio.connection import AbstractConnection

logger = logging.getLogger("dualgauge.limits")

SCRIPT = files("gateway.limits").joinpath("limits.lua").read_bytes()
SHA = hashlib.sha1(SCRIPT, usedforsecurity=False).hexdigest().encode()
LEASE_SECONDS = 30
RENEW_SECONDS = 8.0
# Leases that are renewed by one command.
RENEWED = 400
BEAT_SECONDS = 2.0
GONE_SECONDS = 10
# What a server that stood still was sent before must have been done when it is sent what is owed.
OWED_AFTER_SECONDS = 0.5
MOST_OWED = 20_000
CLOSED_RETRY_SECONDS = 1.0
FLUSH_SECONDS = 0.5
PROCESSES = "processes"
PREFIX = "dualgauge"
ELSEWHERE = (MovedError, AskError, TryAgainError, ClusterDownError)
Part = bytes | int | float | str
Args = tuple[Part, ...]


class _Route:
    """A course with what its commands have in common. `seen` is what was left of its buckets at `seen_at`, as
    far as the server told; `outage` is the last in which this process went on from there."""

    __slots__ = ("course", "holders", "keys", "limited", "limits", "outage", "seen", "seen_at")

    def __init__(self, course: Course, holders: tuple[Holder, ...]) -> None:
        self.course = course
        self.holders = holders
        self.seen: list[float] = []
        self.seen_at = 0.0
        self.outage = 0
        self.keys = tuple(
            f"{PREFIX}:{{{course.root}}}:{scope.name}:{what}"
            for scope in course.scopes
            for what in ("buckets", "leases")
        )
        self.limited = bool(course.meters) or any(s.concurrent is not None for s in course.scopes)
        buckets: list[list[tuple[object, ...]]] = [[] for _ in course.scopes]
        for m in course.meters:
            part = (m.field, m.rate.amount, m.rate.seconds, m.each, m.weight, m.saved)
            buckets[m.scope].append(part)
        scopes = [
            (-1 if scope.concurrent is None else scope.concurrent, some)
            for scope, some in zip(course.scopes, buckets, strict=True)
        ]
        self.limits = msgspec.msgpack.encode(scopes)

    @property
    def leases(self) -> tuple[str, ...]:
        return self.keys[1::2]


class _Free:
    """A lease of what has no limits, or that `open` grants."""

    __slots__ = ("_open", "_store", "headers")

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._open = True
        self.headers = b""

    def settle(self, prompt: int, completion: int, cached: int = 0, tier: str = "") -> None:
        if self._open:
            self._open = False
            self._store.free -= 1

    def refund(self) -> None:
        self.settle(0, 0)


class RedisLease:
    __slots__ = ("_open", "_store", "headers", "name", "renewed", "route", "tokens")

    def __init__(
        self, store: RedisStore, route: _Route, name: bytes, tokens: int, headers: bytes, now: float
    ) -> None:
        self._store = store
        self._open = True
        self.route = route
        self.name = name
        self.tokens = tokens
        self.headers = headers
        self.renewed = now

    def settle(self, prompt: int, completion: int, cached: int = 0, tier: str = "") -> None:
        if self._open:
            self._open = False
            self._store.end(self, prompt + completion, cached, tier)

    def refund(self) -> None:
        self.settle(0, 0)


class _Reservation:
    """A reservation that is on its way: an `Answer`."""

    __slots__ = ("ask", "future", "name", "route", "store", "tokens")

    def __init__(self, store: RedisStore, route: _Route, ask: Ask, name: bytes) -> None:
        self.store = store
        self.route = route
        self.ask = ask
        self.name = name
        self.tokens = route.course.tokens(ask)
        self.future: asyncio.Future[Lease] = store.loop.create_future()

    def args(self) -> Args:
        return (b"reserve", self.name, self.tokens, LEASE_SECONDS, self.route.limits)

    def __call__(self, reply: object) -> None:
        try:
            self._answer(reply)
        except Exception:
            # The other answers on this connection must still be read.
            logger.exception("limits: the server's answer to a reservation cannot be used")
            self._answer(None)

    def _answer(self, reply: object) -> None:
        future, route = self.future, self.route
        if not isinstance(reply, list):
            # Whether it was granted is not known: it is given back once the server is there again.
            self.store.owe(route, self.name, self.tokens)
            if not future.done():
                self._instead()
            return
        levels = [level / 1e6 for level in reply[1 if reply[0] else 2 :]]
        route.seen, route.seen_at = levels, self.store.clock()
        if reply[0]:
            lease = self.store.hold(route, self.name, self.tokens, route.course.lines.render(levels))
            if future.cancelled():
                lease.refund()
            else:
                future.set_result(lease)
        elif not future.cancelled():
            course = route.course
            over = (
                course.slots_taken(reply[1] - 1, levels)
                if reply[1]
                else course.over_limit(self.tokens, levels)
            )
            assert over is not None
            future.set_exception(over)

    def _instead(self) -> None:
        try:
            self.future.set_result(self.store.instead(self.ask))
        except GatewayError as error:
            self.future.set_exception(error)


class RedisStore:
    """`settings` are `limits` of the configuration, `workers` the processes that it starts (what is assumed
    until a heartbeat tells), `process` a name that no other process has."""

    def __init__(
        self, settings: LimitsPart, *, workers: int, process: str, clock: Callable[[], float]
    ) -> None:
        self._mode: OnStoreFailure = settings.on_store_failure
        self._processes: Literal["auto"] | int = settings.processes
        self.clock = clock
        self._topology = topology(settings.store, settings.timeout)
        self._timeout = settings.timeout
        self._local = LocalShare(clock)
        self._local.divide(workers if settings.processes == "auto" else settings.processes, 0)
        self._process = process
        self._made = 0
        self._routes: dict[tuple[str, str, str, str], _Route] = {}
        self._held: dict[bytes, RedisLease] = {}
        self._owed: deque[tuple[float, _Route, Args]] = deque(maxlen=MOST_OWED)
        self._down: dict[str, float] = {}
        self._ended: Ended | None = None
        self._outages = 0
        self._pay_after = 0.0
        self._fallbacks = 0
        self._closing = False
        self.free = 0

    # the protocol

    def in_use(self) -> int:
        return len(self._held) + self.free + self._local.in_use()

    def up(self) -> bool:
        links = self._topology.links
        return bool(links) and all(link.up for link in links)

    def fallbacks(self) -> int:
        return self._fallbacks

    def last_seen(self, ask: Ask) -> bytes:
        route = self._route(ask)
        meters, passed = route.course.meters, self.clock() - route.seen_at
        levels = [
            min(meter.rate.amount, level + passed * meter.rate.per_second)
            for meter, level in zip(meters, route.seen, strict=False)
        ]
        return route.course.lines.render(levels) if len(levels) == len(meters) else b""

    def on_end(self, hook: Ended) -> None:
        self._ended = hook
        self._local.on_end(hook)

    def reserve(self, ask: Ask) -> Reserved:
        route = self._route(ask)
        if not route.limited:
            self.free += 1
            return _Free(self)
        link = self._topology.link(route.course.root)
        if link is None or not link.up:
            return self.instead(ask)
        self._made += 1
        one = _Reservation(self, route, ask, b"%b.%x" % (self._process.encode(), self._made))
        self._send(link, route.keys, one.args(), one)
        return one.future

    async def levels(self, holders: Sequence[Held]) -> Mapping[str, Mapping[str, float]]:
        asked: list[tuple[Held, asyncio.Future[object], asyncio.Future[object]]] = []
        for held in holders:
            link = self._topology.link(held.root)
            if link is not None and link.up:
                key = f"{PREFIX}:{{{held.root}}}:{held.name}"
                taken, running = self.loop.create_future(), self.loop.create_future()
                # Without a field it would be an error; that of no limit is there nowhere.
                fields = held.fields or ("-",)
                link.send(_packed(b"HMGET", f"{key}:buckets", *fields), partial(_resolve, taken))
                link.send(_packed(b"ZCARD", f"{key}:leases"), partial(_resolve, running))
                asked.append((held, taken, running))
        told: dict[str, Mapping[str, float]] = {}
        for held, taken, running in asked:
            buckets, count = await taken, await running
            if isinstance(buckets, list) and isinstance(count, int):
                left = _left(held.fields, buckets, time.time())
                told[held.name] = {"concurrent": count, **left}
        return told

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.loop = asyncio.get_running_loop()
        async with self._topology.running(self._told, self._greet):
            tasks = [asyncio.create_task(work()) for work in (self._renew, self._beat, self._pay)]
            try:
                yield
                await asyncio.gather(*(link.emptied(FLUSH_SECONDS) for link in self._topology.links))
            finally:
                self._closing = True
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    # leases

    def _route(self, ask: Ask) -> _Route:
        key = (ask.tenant, ask.tier, ask.model, ask.organisation)
        route = self._routes.get(key)
        if route is None or not route.course.fits(ask):
            course = chart(ask)
            route = self._routes[key] = _Route(course, self._local.holders(course))
        return route

    def hold(self, route: _Route, name: bytes, tokens: int, headers: bytes) -> RedisLease:
        """A lease that the server has granted."""
        lease = self._held[name] = RedisLease(self, route, name, tokens, headers, self.clock())
        for holder in route.holders:
            holder.running += 1
        return lease

    def end(self, lease: RedisLease, used: int, cached: int, tier: str) -> None:
        """Settle: now, or where the server is not there, when it is again. Called once for each lease."""
        del self._held[lease.name]
        route = lease.route
        for holder in route.holders:
            holder.running -= 1
        ask = route.course.ask
        others = b""
        if tier and tier != ask.tier:
            others = self._route(msgspec.structs.replace(ask, tier=tier)).limits
        self._settle(route, (b"settle", lease.name, lease.tokens, used, cached, route.limits, others))
        if self._ended is not None:
            self._ended(route.course.scopes)

    def owe(self, route: _Route, name: bytes, tokens: int) -> None:
        """Give a lease back later that may have been granted."""
        self._owe(route, (b"settle", name, tokens, 0, 0, route.limits, b""))

    def _owe(self, route: _Route, args: Args, since: float | None = None) -> None:
        self._owed.append((self.clock() if since is None else since, route, args))

    def _settle(self, route: _Route, args: Args, since: float | None = None) -> None:
        link = self._topology.link(route.course.root)
        if link is None or not link.up:
            self._owe(route, args, since)
            return

        def answer(reply: object) -> None:
            if isinstance(reply, Exception):
                self._owe(route, args, since)

        self._send(link, route.keys, args, answer)

    def instead(self, ask: Ask) -> Lease:
        """What `on_store_failure` says. Raises LimitsUnavailable, LimitExceeded."""
        if self._mode == "closed":
            raise LimitsUnavailable(
                "the store of limits does not answer, and without it no request is admitted "
                "(limits.on_store_failure: closed)",
                retry_after=CLOSED_RETRY_SECONDS,
            )
        if self._mode == "open":
            self._fallbacks += 1
            self.free += 1
            return _Free(self)
        route = self._route(ask)
        if route.outage != self._outages:
            route.outage = self._outages
            self._local.go_on(ask, route.course, route.seen, self.clock() - route.seen_at)
        lease = self._local.reserve(ask)
        self._fallbacks += 1
        return lease

    # commands

    def _send(
        self,
        link: Link,
        keys: tuple[str, ...],
        args: Args,
        answer: Callable[[object], None],
    ) -> None:
        command = _packed(b"EVALSHA", SHA, len(keys), *keys, *args)
        link.send(command, partial(self._answered, link, keys, args, answer))

    def _answered(
        self,
        link: Link,
        keys: tuple[str, ...],
        args: Args,
        answer: Callable[[object], None],
        reply: object,
    ) -> None:
        if isinstance(reply, NoScriptError) and link.up:
            # The server lost it (a restart, SCRIPT FLUSH): it has done nothing, and learns it anew.
            link.send(_packed(b"EVAL", SCRIPT, len(keys), *keys, *args), answer)
            return
        if isinstance(reply, ELSEWHERE):
            self._topology.moved()
        elif isinstance(reply, ResponseError):
            link.fail(reply)
        answer(reply)

    # the state of the store

    async def _greet(self, connection: AbstractConnection) -> None:
        """Whether this server takes writes and knows the script. Raises RedisError."""
        beat = _packed(b"EVALSHA", SHA, 1, *self._beating())
        await connection.send_packed_command([_packed(b"SCRIPT", b"LOAD", SCRIPT), beat], check_health=False)
        await connection.read_response()
        with contextlib.suppress(MovedError):  # another master of the cluster keeps that key
            self._count(await connection.read_response())

    def _told(self, link: Link, error: Exception | None) -> None:
        if self._closing:
            return
        if error is None:
            since = self._down.pop(link.name, None)
            if since is None:
                logger.info("limits are kept in %s", link.name)
            else:
                logger.warning("limits: %s answers again after %.1f s", link.name, self.clock() - since)
            self._pay_after = self.clock() + OWED_AFTER_SECONDS
        elif link.name not in self._down:
            self._outages += 1
            self._down[link.name] = self.clock()
            logger.warning(
                "limits: %s does not answer (%s); until it does, on_store_failure: %s",
                link.name,
                error,
                self._mode,
            )

    async def _pay(self) -> None:
        """Settle what could not be settled while a server was away."""
        while True:
            await asyncio.sleep(OWED_AFTER_SECONDS / 2)
            if self._owed and self.clock() > self._pay_after:
                owed, self._owed = self._owed, deque(maxlen=MOST_OWED)
                oldest = self.clock() - LEASE_SECONDS * 2
                for since, route, args in owed:
                    if since > oldest:
                        self._settle(route, args, since)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS / 4)
            now = self.clock()
            due: dict[tuple[str, str], list[bytes]] = {}
            for lease in self._held.values():
                if now - lease.renewed >= RENEW_SECONDS:
                    lease.renewed = now
                    root = lease.route.course.root
                    for key in lease.route.leases:
                        due.setdefault((root, key), []).append(lease.name)
            for (root, key), names in due.items():
                link = self._topology.link(root)
                for start in range(0, len(names), RENEWED):
                    if link is not None and link.up:
                        some = names[start : start + RENEWED]
                        self._send(link, (key,), (b"renew", LEASE_SECONDS, *some), _ignore)

    async def _beat(self) -> None:
        while True:
            link = self._topology.link(PROCESSES)
            if link is not None and link.up:
                key, *args = self._beating()
                self._send(link, (str(key),), tuple(args), self._count)
            await asyncio.sleep(BEAT_SECONDS)

    def _beating(self) -> Args:
        return f"{PREFIX}:{{{PROCESSES}}}", b"beat", self._process, GONE_SECONDS

    def _count(self, reply: object) -> None:
        if isinstance(reply, list) and self._processes == "auto":
            self._local.divide(max(1, reply[0]), reply[1])
        elif isinstance(reply, list) and self._processes != "auto":
            self._local.divide(self._processes, reply[1] % self._processes)


def _packed(*parts: Part) -> bytes:
    pack: Callable[[Any], bytes] = hiredis.pack_command  # its stub knows tuples of one
    return pack(parts)


def _ignore(reply: object) -> None:
    """A renewal that fails is made good by the next."""


def _resolve(future: asyncio.Future[object], reply: object) -> None:
    if not future.done():
        future.set_result(reply)


def _left(fields: Sequence[str], reply: list[Any], now: float) -> dict[str, float]:
    """What buckets have left, as limits.lua keeps them; one that is not kept is full. `now` is this machine's
    Unix time: good enough to be shown."""
    left: dict[str, float] = {}
    for field, kept in zip(fields, reply, strict=False):
        if kept is not None:
            taken, at, limit, window = struct.unpack("<dddd", kept)
            left[field] = limit - max(0.0, taken - max(0.0, now - at) * limit / window)
    return left
