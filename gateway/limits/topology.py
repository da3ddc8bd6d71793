"""Which server keeps whose leases: a single one, the master that Sentinels name, or a cluster's masters."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit, urlunsplit

from redis.asyncio import Redis, Sentinel
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import ConnectionPool, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import RedisClusterException, RedisError

from gateway.limits.link import CONNECT_SECONDS, Link, Told

if TYPE_CHECKING:
    from redis.asyncio.connection import AbstractConnection

Greet = Callable[["AbstractConnection"], Awaitable[None]]

SENTINEL_PORT = 26379
SERVER_PORT = 6379
# Links retry by themselves; RESP2 is what every server from 6.2 on speaks to every user.
OPTIONS: dict[str, Any] = {
    "socket_connect_timeout": CONNECT_SECONDS,
    "socket_timeout": None,
    "protocol": 2,
    "retry": Retry(NoBackoff(), 0),
}
REFRESH_SECONDS = 1.0


class Topology(Protocol):
    links: list[Link]

    def link(self, root: str) -> Link | None:
        """Where the keys with the hash tag `root` are kept; None where nobody knows."""

    def moved(self) -> None:
        """A server said that it does not keep what it was asked for."""

    def running(self, told: Told, greet: Greet) -> contextlib.AbstractAsyncContextManager[None]:
        """Connects, and keeps the links up; returns after the first attempts."""


def topology(url: str, timeout: float) -> Topology:
    """Of a store's URL, which the configuration has checked."""
    parts = urlsplit(url)
    scheme, _, kind = parts.scheme.partition("+")
    if not kind:
        return Single(ConnectionPool.from_url(url, **OPTIONS), shown(url), timeout)
    hosts = _hosts(parts, SENTINEL_PORT if kind == "sentinel" else SERVER_PORT)
    if kind == "cluster":
        return Cluster(hosts, _options(parts, scheme, ""), timeout)
    name, _, database = parts.path.strip("/").partition("/")
    sentinel = _sentinel(hosts, _options(parts, scheme, database))
    master: Redis = sentinel.master_for(name)
    return Single(master.connection_pool, shown(url), timeout, sentinel.sentinels)


def shown(url: str) -> str:
    """The URL without its password and options, for people."""
    parts = urlsplit(url)
    user, at, hosts = parts.netloc.rpartition("@")
    name = user.partition(":")[0]
    return f"{parts.scheme}://{name}{at if name else ''}{hosts}{parts.path}"


def _hosts(parts: SplitResult, port: int) -> list[tuple[str, int]]:
    hosts = [urlsplit(f"//{text}") for text in parts.netloc.rpartition("@")[2].split(",")]
    return [(host.hostname or "", host.port or port) for host in hosts]


def _options(parts: SplitResult, scheme: str, database: str) -> dict[str, Any]:
    """User, password, TLS and the query's options, as redis-py names them."""
    user = parts.netloc.rpartition("@")[0]
    own = {key for key, _ in parse_qsl(parts.query)} & {"sentinel_username", "sentinel_password"}
    query = urlencode([(key, value) for key, value in parse_qsl(parts.query) if key not in own])
    plain = urlunsplit((scheme, f"{user}@h" if user else "h", f"/{database}", query, ""))
    options: dict[str, Any] = dict(parse_url(plain))
    del options["host"]
    if options.pop("connection_class", None) is not None:
        options["ssl"] = True
    sentinel = {key.removeprefix("sentinel_"): value for key, value in parse_qsl(parts.query) if key in own}
    return {**options, **OPTIONS, **({"sentinel_kwargs": sentinel} if sentinel else {})}


def _sentinel(hosts: list[tuple[str, int]], options: dict[str, Any]) -> Sentinel:
    own = {"socket_timeout": CONNECT_SECONDS, "socket_connect_timeout": CONNECT_SECONDS}
    if options.get("ssl"):
        own |= {key: value for key, value in options.items() if key.startswith("ssl")}
    own |= options.pop("sentinel_kwargs", {})
    make: Callable[..., Sentinel] = Sentinel  # not typed by its library
    return make(hosts, sentinel_kwargs=own, **options)


class Single:
    """One server, whichever it is at the time; `asked` are those that name it."""

    def __init__(self, pool: ConnectionPool, name: str, timeout: float, asked: Sequence[Redis] = ()) -> None:
        self._pool = pool
        self._asked = asked
        self._name = name
        self._timeout = timeout
        self.links: list[Link] = []

    def link(self, root: str) -> Link | None:
        return self.links[0]

    def moved(self) -> None:
        pass

    async def _connect(self) -> AbstractConnection:
        make: Callable[[], AbstractConnection] = self._pool.make_connection
        return await _connected(make())

    @contextlib.asynccontextmanager
    async def running(self, told: Told, greet: Greet) -> AsyncIterator[None]:
        link = Link(self._name, self._connect, greet, told, self._timeout)
        self.links = [link]
        task = asyncio.create_task(link.run(), name="limits")
        try:
            await link.tried.wait()
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            for sentinel in self._asked:
                await sentinel.aclose()


class Cluster:
    """The masters of a cluster, by hash slot."""

    def __init__(self, hosts: list[tuple[str, int]], options: dict[str, Any], timeout: float) -> None:
        self._hosts = hosts
        self._options = options
        self._timeout = timeout
        self.links: list[Link] = []
        self._by_name: dict[str, Link] = {}
        self._slots: dict[int, str] = {}
        self._stale = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def link(self, root: str) -> Link | None:
        return self._by_name.get(self._slots.get(key_slot(root.encode()), ""))

    def moved(self) -> None:
        self._stale.set()

    @contextlib.asynccontextmanager
    async def running(self, told: Told, greet: Greet) -> AsyncIterator[None]:
        def hear(link: Link, error: Exception | None) -> None:
            if error is not None:
                self._stale.set()
            told(link, error)

        watch = asyncio.create_task(self._watch(hear, greet), name="limits")
        try:
            if not await self._refresh(hear, greet):
                self._stale.set()
            await asyncio.gather(*(link.tried.wait() for link in self.links))
            yield
        finally:
            tasks = [watch, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, told: Told, greet: Greet) -> None:
        while True:
            await self._stale.wait()
            await asyncio.sleep(REFRESH_SECONDS)
            self._stale.clear()
            if not await self._refresh(told, greet):
                self._stale.set()

    async def _refresh(self, told: Told, greet: Greet) -> bool:
        """Ask any node for the map of slots; whether one answered."""
        known = [(host, int(port)) for host, _, port in (name.rpartition(":") for name in self._by_name)]
        nodes = [ClusterNode(host, port) for host, port in dict.fromkeys([*self._hosts, *known])]
        client = RedisCluster(startup_nodes=nodes, **self._options)
        try:
            await client.initialize()
            slots = {slot: nodes[0] for slot, nodes in client.nodes_manager.slots_cache.items()}
        except (RedisError, RedisClusterException, OSError):
            return False
        finally:
            await client.aclose()
        self._slots = {slot: node.name for slot, node in slots.items()}
        masters = {node.name: node for node in slots.values()}
        for name, node in masters.items():
            if name not in self._by_name:
                link = Link(name, _to(node), greet, told, self._timeout)
                self._by_name[name] = link
                self._tasks[name] = asyncio.create_task(link.run(), name=f"limits {name}")
        for name in self._by_name.keys() - masters.keys():
            self._tasks.pop(name).cancel()
            del self._by_name[name]
        self.links = list(self._by_name.values())
        return True


def _to(node: ClusterNode) -> Callable[[], Awaitable[AbstractConnection]]:
    async def connect() -> AbstractConnection:
        return await _connected(node.connection_class(**node.connection_kwargs))

    return connect


async def _connected(connection: AbstractConnection) -> AbstractConnection:
    connect: Callable[[], Awaitable[None]] = connection.connect  # not typed by its library
    await connect()
    return connection
