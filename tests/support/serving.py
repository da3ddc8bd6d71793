"""A real gateway on real sockets: in the test's own event loop, or as a process."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from gateway.admin import admin_app
from gateway.app import Public, build, running
from gateway.config import HostPort, parse
from gateway.listeners import bind, listener
from gateway.process import Process
from gateway.runtime import Gateway
from gateway.telemetry.traces import Tracer
from tests.support.client import until
from tests.support.engine import FakeEngine

Tiers = Mapping[str, FakeEngine | str | Sequence[FakeEngine | str]]

PLAIN = """
version: 1
rules:
  - {name: critical, when: {header: {x-criticality: high}}, send: exact, if_unavailable: fail}
  - {name: everything else, send: fast, if_unavailable: fail}
"""
QUIET: Mapping[str, Any] = {"every": "1h", "down_after": 1}


@dataclass
class Served:
    gateway: Gateway
    port: int
    admin: int
    folder: Path

    def engine(self, name: str) -> Any:
        return self.gateway.fleet.by_name[name]

    def mark(self, name: str, state: Any, reason: str = "the test says so") -> None:
        self.gateway.fleet.set_state(self.engine(name), state, reason)

    def metrics(self) -> bytes:
        """What a scrape would tell."""
        self.gateway.ended.tell()
        return self.gateway.metrics.text()

    @property
    def lent(self) -> int:
        return sum(len(upstream.pool.lent) for upstream in self.gateway.upstreams.values())

    @property
    def in_flight(self) -> int:
        return sum(engine.in_flight for engine in self.gateway.fleet.engines)

    @property
    def leases(self) -> int:
        return self.gateway.store.in_use()

    @property
    def clean(self) -> bool:
        """Whether no request has left anything behind."""
        load = self.gateway.load
        return not (self.lent or self.in_flight or self.leases or load.requests or load.bytes)


def deployment(tiers: Tiers, /, **settings: Any) -> dict[str, Any]:
    """A deployment file's content: engines are called fast-0, fast-1, exact-0 ... by their tier."""
    parts = []
    for tier, some in tiers.items():
        listed = [some] if isinstance(some, FakeEngine | str) else some
        for index, engine in enumerate(listed):
            url = engine.url if isinstance(engine, FakeEngine) else engine
            precision = "awq" if tier == "fast" else "fp16"
            parts.append(
                {
                    "name": f"{tier}-{index}",
                    "tier": tier,
                    "kind": "external",
                    "url": url,
                    "precision": precision,
                }
            )
    file = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "model": "smollm2", "engines": parts}
    return {**file, "health": dict(QUIET), **settings}


def make(
    folder: Path,
    tiers: Tiers,
    /,
    *,
    policy: str | None = PLAIN,
    keys: str | None = None,
    tracer: Tracer | None = None,
    **settings: Any,
) -> Gateway:
    """A gateway of these engines; `policy` and `keys` are texts, written beside its file."""
    if policy is not None:
        (folder / "policy.yaml").write_text(policy)
        settings.setdefault("policy", "policy.yaml")
    if keys is not None:
        (folder / "keys.yaml").write_text(keys)
        settings.setdefault("keys", "keys.yaml")
    text = json.dumps(deployment(tiers, **settings))
    return build(parse(text, folder / "dualgauge.yaml", os.environ), tracer)


@contextlib.asynccontextmanager
async def serving(
    folder: Path, tiers: Tiers, /, *, wait: bool = True, **options: Any
) -> AsyncIterator[Served]:
    """Run a gateway; with `wait`, until every engine of it was found ready."""
    gateway = make(folder, tiers, **options)
    site = Process(gateway)
    async with (
        running(gateway),
        _listening(Public(gateway), admin_app(gateway.config, lambda: site)) as (public, admin),
    ):
        served = Served(gateway, public, admin, folder)
        if wait:
            # And no probe is under way, whose connection a test's request could meet.
            await until(lambda: all(engine.ready for engine in gateway.fleet.engines) and not served.lent)
        yield served


@contextlib.asynccontextmanager
async def _listening(*apps: Any) -> AsyncIterator[list[int]]:
    # Started and stopped without `Server.serve`, whose loop would cost each test a fifth of a second.
    servers = [listener(app, 1) for app in apps]
    ports: list[int] = []
    try:
        for server in servers:
            server.config.load()
            server.lifespan = server.config.lifespan_class(server.config)
            sock = bind(HostPort("127.0.0.1", 0), "listen")
            ports.append(sock.getsockname()[1])
            await server.startup([sock])
        yield ports
    finally:
        for server in servers:
            for one in server.servers:
                one.close()
            for connection in list(server.server_state.connections):
                connection.transport.abort()
    await until(lambda: not any(server.server_state.tasks for server in servers))


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass
class ServedProcess:
    process: subprocess.Popen[str]
    port: int
    admin: int
    log: Path


@contextlib.contextmanager
def process(
    folder: Path,
    tiers: Tiers,
    /,
    *,
    policy: str = PLAIN,
    keys: str | None = None,
    port: int = 0,
    output: TextIO | None = None,
    **settings: Any,
) -> Iterator[ServedProcess]:
    """`dualgauge serve` as a process of its own, answering on both ports; killed at the end. What it writes
    goes to `output`, else to `log`."""
    (folder / "policy.yaml").write_text(policy)
    if keys is not None:
        (folder / "keys.yaml").write_text(keys)
        settings["keys"] = "keys.yaml"
    port, admin = port or free_port(), free_port()
    addresses = {"listen": f"127.0.0.1:{port}", "admin": f"127.0.0.1:{admin}", "policy": "policy.yaml"}
    file = folder / "dualgauge.yaml"
    file.write_text(json.dumps({**deployment(tiers, **settings), **addresses}))
    log = folder / "gateway.log"
    with log.open("w") as kept:
        child = subprocess.Popen(
            [sys.executable, "-m", "gateway.cli", "serve", "--config", str(file)],
            stdout=kept if output is None else output,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        _await_answer(child, admin, log)
        yield ServedProcess(child, port, admin, log)
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()


def _await_answer(child: subprocess.Popen[str], port: int, log: Path) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and child.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=2).close()
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.02)
        else:
            return
    raise AssertionError(f"the gateway did not start:\n{log.read_text()}")
