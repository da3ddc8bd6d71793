"""Builds a gateway from its configuration: the only place where the parts are wired together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

from engines.fleet import Fleet
from engines.health import Schedule, Watch
from engines.spec import EngineSpec
from gateway.admin import admin_app
from gateway.config import SHIPPED_POLICY, Config
from gateway.files import read_text
from gateway.identity import Known, read_keys
from gateway.limits.memory import MemoryStore
from gateway.pipeline import Exchange
from gateway.relay.client import AsgiClient, Client, Receive, Scope, Send
from gateway.relay.fetch import fetch
from gateway.runtime import Gateway, RetryBudget, Snapshot, StoredReplies, Upstream, model_names
from gateway.telemetry.lag import watch_lag
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.traces import Tracer, otlp_tracer
from policies.compile import compile_policy
from policies.document import Diagnostic, ProblemsError, unknown
from policies.policy import Policy
from policies.shipped import SHIPPED, shipped

logger = logging.getLogger("dualgauge.gateway")

# Engines that we launch are told to keep idle connections for 75 s; others may be vLLM with its 5 s.
LAUNCHED_IDLE_SECONDS = 60.0
EXTERNAL_IDLE_SECONDS = 3.0
FILE_POLL_SECONDS = 1.0


def read_policy(config: Config) -> Policy:
    """The policy of a deployment. Raises ProblemsError."""
    if SHIPPED_POLICY.fullmatch(config.policy):
        try:
            text, file = shipped(config.policy)
        except KeyError:
            message = unknown("policy", config.policy, SHIPPED)
            raise ProblemsError([Diagnostic(str(config.path), 1, 1, "error", message)]) from None
    else:
        text, file = read_text(Path(config.policy)), config.policy
    return compile_policy(text, file, tiers=config.tiers)


def read_snapshot(config: Config) -> Snapshot:
    """Policy and keys as they stand now. Raises ProblemsError."""
    policy = read_policy(config)
    known = Known(tiers=config.tiers, plans=tuple(policy.plans), models=tuple(model_names(config)))
    keyring = read_keys(config.keys, known, loopback=config.listen.loopback)
    for warning in (*policy.warnings, *keyring.warnings):
        logger.warning("%s", warning)
    return Snapshot(policy, keyring)


def build(config: Config, tracer: Tracer | None = None) -> Gateway:
    """A gateway that is ready to be run. Raises ProblemsError."""
    clock = time.monotonic
    rand = random.Random()  # noqa: S311 - ids and sampling, no secrets
    fleet = Fleet(config.engines, config.tiers)
    store = MemoryStore(clock)
    snapshot = read_snapshot(config)
    metrics = Metrics(fleet, store)
    metrics.policy(snapshot.policy.hash)
    if tracer is None and config.telemetry.otlp is not None:
        tracer = otlp_tracer(config.telemetry.otlp, config.telemetry.sample, rand)
    return Gateway(
        config=config,
        snapshot=snapshot,
        fleet=fleet,
        upstreams={spec.name: Upstream(spec, _idle_seconds(spec)) for spec in config.engines},
        store=store,
        metrics=metrics,
        tracer=tracer,
        budget=RetryBudget(config.retries.budget),
        stored=StoredReplies(),
        clock=clock,
        wall=time.time,
        rand=rand,
    )


def _idle_seconds(spec: EngineSpec) -> float:
    return LAUNCHED_IDLE_SECONDS if spec.launched else EXTERNAL_IDLE_SECONDS


class Public:
    """The public port: for our own server, and as an ASGI application for any other."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def answer(self, client: Client) -> Coroutine[Any, Any, None]:
        """One request of our own server."""
        return Exchange(self._gateway, client).run()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request of another ASGI server."""
        if scope["type"] == "http":
            await Exchange(self._gateway, AsgiClient(scope, receive, send)).run()


def reload(gateway: Gateway) -> str | None:
    """Read policy and keys again; None, or why the old ones were kept."""
    try:
        snapshot = read_snapshot(gateway.config)
    except ProblemsError as exc:
        gateway.reload_error = str(exc)
        gateway.metrics.reload_failed(_which_file(gateway.config, exc))
        logger.error("reload refused, the old files stay in force:\n%s", exc)
        return gateway.reload_error
    if snapshot.policy.hash != gateway.snapshot.policy.hash:
        logger.info("policy %s replaces %s", snapshot.policy.hash, gateway.snapshot.policy.hash)
    gateway.snapshot = snapshot
    gateway.reload_error = None
    gateway.metrics.policy(snapshot.policy.hash)
    return None


def _which_file(config: Config, problems: ProblemsError) -> str:
    keys = config.keys is not None and any(d.file == str(config.keys) for d in problems.diagnostics)
    return "keys" if keys else "policy"


@contextlib.asynccontextmanager
async def running(gateway: Gateway) -> AsyncIterator[Gateway]:
    """The gateway's own work beside requests: health probes, and watching its files. Ends with nothing left:
    no task, no socket."""
    schedule = Schedule(
        gateway.config.health.every, gateway.config.health.down_after, gateway.config.health.up_after
    )
    watch = Watch(
        gateway.fleet,
        lambda spec, path, seconds: fetch(gateway.upstreams[spec.name], path, seconds),
        schedule,
        gateway.clock,
    )
    tasks = [
        asyncio.create_task(watch.run(), name="health"),
        asyncio.create_task(_watch_files(gateway), name="files"),
        asyncio.create_task(watch_lag(gateway.metrics.lag, gateway.clock), name="lag"),
    ]
    try:
        yield gateway
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for upstream in gateway.upstreams.values():
            upstream.pool.close()
        if gateway.tracer is not None:
            await asyncio.to_thread(gateway.tracer.close)


async def _watch_files(gateway: Gateway) -> None:
    config = gateway.config
    files = [config.keys] if config.keys is not None else []
    if not SHIPPED_POLICY.fullmatch(config.policy):
        files.append(Path(config.policy))
    before = [_stamp(file) for file in files]
    started_with = _stamp(config.path)
    while True:
        await asyncio.sleep(FILE_POLL_SECONDS)
        now = [_stamp(file) for file in files]
        if now != before:
            before = now
            reload(gateway)
        changed = _stamp(config.path) != started_with
        if changed and not gateway.restart_needed:
            logger.warning("%s was changed: restart needed, it is read at the start only", config.path)
        gateway.restart_needed = changed


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


__all__ = ["Public", "admin_app", "build", "reload", "running"]
