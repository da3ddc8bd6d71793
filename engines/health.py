"""Watches engines: one probe every few seconds, each engine by itself; figures from its metrics.

Fails towards "not ready": an engine that cannot be asked takes no request. The way to ask is passed in, so
that engines can be reached over TCP, TLS, a unix socket or a test's own seam.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from engines.fleet import Engine, Fleet
from engines.spec import EngineSpec

logger = logging.getLogger("dualgauge.engines")

HEALTHY = 200
PROBE_SECONDS = 2.0
# An engine's own metric names: (requests running, requests waiting, used share of the KV cache).
GAUGES = {
    "vllm": ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    "llama.cpp": ("llamacpp:requests_processing", "llamacpp:requests_deferred", None),
}

Fetch = Callable[[EngineSpec, str, float], Awaitable[tuple[int, bytes]]]
"""(engine, path, seconds) -> (status, body); raises OSError or TimeoutError where there is no answer."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Seconds between probes, and how many in a row turn an engine down or up."""

    every: float = 2.0
    down_after: int = 3
    up_after: int = 1


def read_gauges(text: bytes) -> tuple[int, int, float | None] | None:
    """Running, waiting and KV usage of a Prometheus text, summed over labels; None where it has none."""
    sums: dict[str, float] = {}
    for line in text.decode("utf-8", "replace").splitlines():
        if not line.startswith(("vllm:", "llamacpp:")):
            continue
        name = line.split("{", 1)[0].split(" ", 1)[0]
        try:
            value = float(line.rsplit(" ", 1)[1])
        except (ValueError, IndexError):
            continue
        if math.isfinite(value):
            sums[name] = sums.get(name, 0.0) + value
    for running, waiting, kv in GAUGES.values():
        if running in sums:
            usage = sums.get(kv) if kv is not None else None
            return int(sums[running]), int(sums.get(waiting, 0)), usage
    return None


class Watch:
    """The probes of one fleet; `run` ends when it is cancelled, and leaves no task behind."""

    def __init__(self, fleet: Fleet, fetch: Fetch, schedule: Schedule, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._fetch = fetch
        self._schedule = schedule
        self._clock = clock

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for engine in self._fleet.engines:
                group.create_task(self._watch(engine), name=f"watch {engine.spec.name}")

    async def _watch(self, engine: Engine) -> None:
        while True:
            try:
                await self.probe(engine)
            except Exception:
                # What one engine answers must not end the watch of the others.
                logger.exception("the probe of engine %s failed", engine.spec.name)
            await asyncio.sleep(self._schedule.every)

    async def probe(self, engine: Engine) -> None:
        """Ask once, and move the engine's state."""
        before = engine.state
        try:
            status, _ = await self._fetch(engine.spec, "/health", PROBE_SECONDS)
            reason = "" if status == HEALTHY else f"/health answered {status}"
        except (OSError, TimeoutError) as exc:
            reason = str(exc) or "no answer"
        if reason:
            self._bad(engine, reason)
        else:
            self._good(engine)
            await self._sample(engine)
        if engine.state != before:
            logger.info("engine %s: %s -> %s (%s)", engine.spec.name, before, engine.state, engine.reason)

    def _good(self, engine: Engine) -> None:
        engine.failures = 0
        engine.successes += 1
        if engine.state != "ready" and engine.successes >= self._schedule.up_after:
            self._fleet.set_state(engine, "ready", "healthy")

    def _bad(self, engine: Engine, reason: str) -> None:
        engine.successes = 0
        engine.failures += 1
        if engine.state == "starting" or engine.failures < self._schedule.down_after:
            # One probe that fails is no reason to leave an engine that serves.
            if engine.state != "ready":
                self._fleet.set_state(engine, engine.state, reason)
            return
        _forget(engine)
        self._fleet.set_state(engine, "down", reason)

    async def _sample(self, engine: Engine) -> None:
        try:
            status, body = await self._fetch(engine.spec, "/metrics", PROBE_SECONDS)
        except (OSError, TimeoutError):
            status, body = 0, b""
        figures = read_gauges(body) if status == HEALTHY else None
        if figures is None:
            _forget(engine)
            return
        engine.running, engine.waiting, engine.kv = figures
        engine.sampled_at = self._clock()


def _forget(engine: Engine) -> None:
    """Old figures must not decide: an engine that was busy would stay so."""
    engine.running = engine.waiting = 0
    engine.kv = engine.sampled_at = None
