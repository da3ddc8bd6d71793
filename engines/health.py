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
from typing import NamedTuple

from engines.fleet import Engine, Fleet
from engines.spec import EngineSpec

logger = logging.getLogger("dualgauge.engines")

HEALTHY = 200
PROBE_SECONDS = 2.0


class Names(NamedTuple):
    """An engine's own names of its metrics; of several for the KV cache, the one that it has."""

    running: str
    waiting: str
    kv: tuple[str, ...]
    preemptions: str = ""


NAMES = {
    "vllm": Names(
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),  # the latter until 0.10
        "vllm:num_preemptions_total",
    ),
    "llama.cpp": Names(
        "llamacpp:requests_processing",
        "llamacpp:requests_deferred",
        ("llamacpp:kv_cache_usage_ratio",),  # until mid 2025
    ),
}
# One series a state, 1 for the one that holds; there where vLLM may sleep.
AWAKE = "vllm:engine_sleep_state{", 'sleep_state="awake"'

Fetch = Callable[[EngineSpec, str, float], Awaitable[tuple[int, bytes]]]
"""(engine, path, seconds) -> (status, body); raises OSError or TimeoutError where there is no answer."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Seconds between probes, and how many in a row turn an engine down or up."""

    every: float = 2.0
    down_after: int = 3
    up_after: int = 1


class Figures(NamedTuple):
    """What an engine tells of itself: requests, the used share of its KV cache (0..1), how many it has
    preempted since its start; None for what it does not tell."""

    software: str
    running: int
    waiting: int
    kv: float | None
    preemptions: int | None
    asleep: bool


def read_figures(text: bytes) -> Figures | None:
    """The figures of a Prometheus text, None where it has none. Requests are summed over an engine's replicas
    (data parallel); of their caches the fullest counts, and one that is awake is enough."""
    found: dict[str, list[float]] = {}
    awake: list[bool] = []
    for line in text.decode("utf-8", "replace").splitlines():
        if not line.startswith(("vllm:", "llamacpp:")):
            continue
        name = line.split("{", 1)[0].split(" ", 1)[0]
        try:
            value = float(line.rsplit(" ", 1)[1])
        except (ValueError, IndexError):
            continue
        if not math.isfinite(value):
            continue
        found.setdefault(name, []).append(value)
        if line.startswith(AWAKE[0]) and AWAKE[1] in line:
            awake.append(value > 0)
    for software, names in NAMES.items():
        if names.running in found:
            kv = next((max(found[name]) for name in names.kv if name in found), None)
            preempted = found.get(names.preemptions)
            return Figures(
                software,
                int(sum(found[names.running])),
                int(sum(found.get(names.waiting, ()))),
                kv,
                None if preempted is None else int(sum(preempted)),
                bool(awake) and not any(awake),
            )
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
            figures = await self._sample(engine)
            self._good(engine, asleep=figures is not None and figures.asleep)
        if engine.state != before:
            logger.info("engine %s: %s -> %s (%s)", engine.spec.name, before, engine.state, engine.reason)

    def _good(self, engine: Engine, *, asleep: bool) -> None:
        engine.failures = 0
        engine.successes += 1
        if asleep:
            # Its /health is good all the same, and a request would hang until somebody wakes it.
            self._fleet.set_state(engine, "asleep", "it sleeps until it is woken (POST /wake_up)")
        elif engine.state != "ready" and engine.successes >= self._schedule.up_after:
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

    async def _sample(self, engine: Engine) -> Figures | None:
        try:
            status, body = await self._fetch(engine.spec, "/metrics", PROBE_SECONDS)
        except (OSError, TimeoutError):
            status, body = 0, b""
        figures = read_figures(body) if status == HEALTHY else None
        if figures is None:
            _forget(engine)
            return None
        engine.running, engine.waiting, engine.kv = figures.running, figures.waiting, figures.kv
        engine.software, engine.preemptions = figures.software, figures.preemptions
        engine.sampled_at = self._clock()
        return figures


def _forget(engine: Engine) -> None:
    """Old figures must not decide: an engine that was busy would stay so."""
    engine.running = engine.waiting = 0
    engine.kv = engine.sampled_at = None
