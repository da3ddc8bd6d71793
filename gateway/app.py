"""Builds a gateway from its configuration: the only place where the parts are wired together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from engines import hosted, manifest, tokenizer_file
from engines.fleet import Fleet
from engines.health import Schedule, Watch
from engines.spec import EngineSpec
from gateway.config import Config
from gateway.limits import Store
from gateway.limits.memory import MemoryStore
from gateway.pipeline import Exchange
from gateway.relay.client import AsgiClient, Client, Receive, Scope, Send
from gateway.relay.fetch import fetch
from gateway.runtime import Gateway, RetryBudget, Stamps, StoredReplies, Upstream
from gateway.snapshots import read_snapshot, told, watch_files
from gateway.telemetry.decision_log import DecisionLog
from gateway.telemetry.decisions import Decisions
from gateway.telemetry.history import figures
from gateway.telemetry.lag import watch_lag
from gateway.telemetry.logs import AccessLog
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.traces import Tracer, otlp_tracer
from gateway.tokenizer import Counter, tokenizer_of

logger = logging.getLogger("dualgauge.gateway")

# Engines that we launch are told to keep idle connections for 75 s; others may be vLLM with its 5 s.
LAUNCHED_IDLE_SECONDS = 60.0
EXTERNAL_IDLE_SECONDS = 3.0
LOG_SECONDS = 5.0


def build(
    config: Config, tracer: Tracer | None = None, access: AccessLog | None = None, *, others: bool = False
) -> Gateway:
    """A gateway that is ready to be run; with `others`, several processes have this configuration at the same
    time. Raises ProblemsError."""
    clock = time.monotonic
    rand = random.Random()  # noqa: S311 - ids and sampling, no secrets
    sockets = Path(tempfile.gettempdir()) / f"dualgauge-{rand.getrandbits(64):016x}"
    specs = hosted.at_sockets(config.engines, sockets)
    fleet = Fleet(specs, config.tiers, rand)
    if config.swap is not None:
        fleet.turns = dict.fromkeys(config.tiers, float(config.swap.wait))
    for engine in fleet.engines:
        engine.manifest = _manifest(engine.spec)
    store = _store(config, clock, rand)
    stamps: Stamps = {}
    snapshot, problem = read_snapshot(config, stamps=stamps)
    metrics = Metrics(fleet, store)
    tokenizer, prompts = tokenizer_of(config)
    metrics.config(config.hash)
    telemetry = config.telemetry
    if tracer is None and telemetry.otlp is not None:
        tracer = otlp_tracer(telemetry.otlp, telemetry.sample, rand, capture=telemetry.capture_content)
    for name, text, read in _kept(tracer, access):
        metrics.watch(name, text, read)
    gateway = Gateway(
        config=config,
        snapshot=snapshot,
        fleet=fleet,
        upstreams={spec.name: Upstream(spec, _idle_seconds(spec)) for spec in specs},
        store=store,
        metrics=metrics,
        tracer=tracer,
        budget=RetryBudget(config.retries.budget),
        stored=StoredReplies(),
        clock=clock,
        wall=time.time,
        rand=rand,
        decisions=_decisions(config, metrics, others),
        access=access,
        stamps=stamps,
        counter=None if tokenizer is None else Counter(tokenizer),
        prompts=prompts,
        sockets=sockets,
    )
    told(gateway, problem)
    return gateway


def _kept(tracer: Tracer | None, access: AccessLog | None) -> Iterator[tuple[str, str, Callable[[], float]]]:
    """Counters that are kept by others: name, text, and how to read one."""
    sender = None if tracer is None else tracer.sender
    yield "dualgauge_spans_sent", "Spans that a collector took", lambda: sender.sent if sender else 0
    yield "dualgauge_spans_dropped", "Spans that were lost", lambda: sender.dropped if sender else 0
    lost = "Lines of the access log that could not be written"
    yield "dualgauge_access_log_dropped", lost, lambda: access.dropped if access else 0


def _decisions(config: Config, metrics: Metrics, others: bool) -> Decisions | None:
    part = config.decision_log
    if part is None:
        return None
    log = DecisionLog(Path(part.path), part.size, part.keep, metrics.decisions_dropped, shared=others)
    return Decisions(log, measure_all=part.signals == "all")


def _manifest(spec: EngineSpec) -> str:
    """As the file is now, which `up` checks at each start of the engine."""
    place = tokenizer_file.folder(spec.model or "") if spec.launched else None
    if place is None:
        return ""
    return manifest.digest(place if place.is_dir() else place.parent) or ""


def _store(config: Config, clock: Callable[[], float], rand: random.Random) -> Store:
    if config.limits.store == "memory":
        return MemoryStore(clock)
    # Where leases are in memory, nothing of Redis's client is loaded.
    from gateway.limits.redis import RedisStore

    process = f"{rand.getrandbits(64):016x}"
    return RedisStore(config.limits, workers=config.workers, process=process, clock=clock)


def change_engines(gateway: Gateway, specs: Sequence[EngineSpec]) -> None:
    """Have these engines from now on, in the tiers of the configuration. Requests that run on one that is not
    among them end there; it gets no new ones, and what it stored is forgotten."""
    came, went = gateway.fleet.change(specs)
    gateway.departed = [upstream for upstream in gateway.departed if upstream.pool.open]
    for engine in went:
        name = engine.spec.name
        # Its connections are not touched: each is closed when its request has ended, or idle for a while.
        gateway.departed.append(gateway.upstreams.pop(name))
        gateway.stored.forget(name)
        logger.info("engine %s has left", name)
    for engine in came:
        spec = engine.spec
        gateway.upstreams[spec.name] = Upstream(spec, _idle_seconds(spec))
        engine.manifest = _manifest(spec)
        logger.info("engine %s has come, %s", spec.name, spec.url)


def _idle_seconds(spec: EngineSpec) -> float:
    return EXTERNAL_IDLE_SECONDS if spec.kind == "external" else LAUNCHED_IDLE_SECONDS


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


@contextlib.asynccontextmanager
async def running(gateway: Gateway) -> AsyncIterator[Gateway]:
    """The gateway's own work beside requests: health probes, watching its files, its decision log. Ends with
    nothing left: no task, no socket, no line unwritten. Raises OSError where the log cannot be opened."""
    if gateway.access is not None:
        gateway.access.start()
    if gateway.decisions is not None:
        gateway.decisions.log.start()
    health = gateway.config.health
    schedule = Schedule(health.every, health.down_after, health.up_after, health.stalled_after)

    async def ask(spec: EngineSpec, path: str, seconds: float) -> tuple[int, bytes]:
        upstream = gateway.upstreams.get(spec.name)
        if upstream is None:
            raise OSError("it has left")
        return await fetch(upstream, path, seconds)

    watch = Watch(gateway.fleet, ask, schedule, gateway.clock)
    look = partial(figures, gateway.fleet, gateway.metrics)
    tasks = [
        asyncio.create_task(watch.run(), name="health"),
        asyncio.create_task(watch_files(gateway), name="files"),
        asyncio.create_task(watch_lag(gateway.metrics.lag, gateway.clock), name="lag"),
        asyncio.create_task(gateway.history.run(look), name="history"),
    ]
    try:
        async with gateway.store.running(), hosted.running(gateway.config.engines, gateway.sockets):
            yield gateway
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for upstream in (*gateway.upstreams.values(), *gateway.departed):
            upstream.pool.close()
        gateway.reader.close()
        if gateway.counter is not None:
            gateway.counter.close()
        if gateway.decisions is not None:
            await asyncio.to_thread(gateway.decisions.log.close, LOG_SECONDS)
        if gateway.tracer is not None:
            await asyncio.to_thread(gateway.tracer.close)
        gateway.ended.tell()
        if gateway.access is not None:
            await asyncio.to_thread(gateway.access.close)
