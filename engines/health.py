"""Watches engines: one probe every few seconds, each engine by itself; figures from its metrics.

A probe asks `/health`, and does not believe a good answer: an engine that has requests and makes no tokens is
suspect, one that sleeps is asleep, one that failed requests in a row has to prove itself by one. Fails
towards "not ready": an engine that cannot be asked takes no request. The way to ask is passed in, so that
engines can be reached over TCP, TLS, a unix socket or a test's own seam.
"""

from __future__ import annotations

import asyncio
import contextlib
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
    counters: tuple[str, ...]
    preemptions: str = ""
    finished: str = ""
    prefill_seconds: str = ""
    prefilled: str = ""


NAMES = {
    "vllm": Names(
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),  # the latter until 0.10
        ("vllm:generation_tokens_total", "vllm:prompt_tokens_total"),
        "vllm:num_preemptions_total",
        "vllm:request_success_total",
        "vllm:request_prefill_time_seconds_sum",
        "vllm:request_prefill_kv_computed_tokens_sum",
    ),
    "llama.cpp": Names(
        "llamacpp:requests_processing",
        "llamacpp:requests_deferred",
        ("llamacpp:kv_cache_usage_ratio",),  # until mid 2025
        # The tokens are counted when a request ends, calls of llama_decode at once.
        ("llamacpp:tokens_predicted_total", "llamacpp:prompt_tokens_total", "llamacpp:n_decode_total"),
    ),
}
# One series a state, 1 for the one that holds; there where vLLM may sleep.
AWAKE = "vllm:engine_sleep_state{", 'sleep_state="awake"'

Fetch = Callable[[EngineSpec, str, float], Awaitable[tuple[int, bytes]]]
"""(engine, path, seconds) -> (status, body); raises OSError or TimeoutError where there is no answer."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Seconds between probes, and how many in a row turn an engine down or up; seconds without a new token
    after which one with requests is suspect."""

    every: float = 2.0
    down_after: int = 3
    up_after: int = 1
    stalled_after: float = 30.0


class Figures(NamedTuple):
    """What an engine tells of itself: requests, the used share of its KV cache (0..1), how many it has
    preempted since its start; None for what it does not tell. `pulse` is what changes while it works:
    counters of tokens, and the KV cache, which fills while a long prompt is computed; empty where it has no
    such counter. Since its start, `finished` requests, and of their prompts `prefilled` tokens computed in
    `prefill_seconds`."""

    software: str
    running: int
    waiting: int
    kv: float | None
    preemptions: int | None = None
    asleep: bool = False
    pulse: tuple[float, ...] = ()
    finished: float | None = None
    prefill_seconds: float | None = None
    prefilled: float | None = None

    @property
    def requests(self) -> int:
        return self.running + self.waiting


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
            totals = {name: sum(values) for name, values in found.items()}
            counted = [totals[name] for name in names.counters if name in totals]
            preempted = totals.get(names.preemptions)
            return Figures(
                software,
                int(totals[names.running]),
                int(totals.get(names.waiting, 0)),
                kv,
                None if preempted is None else int(preempted),
                bool(awake) and not any(awake),
                (*counted, kv or 0.0) if counted else (),
                totals.get(names.finished),
                totals.get(names.prefill_seconds),
                totals.get(names.prefilled),
            )
    return None


class Watch:
    """The probes of one fleet; `run` ends when it is cancelled, and leaves no task behind. An engine that a
    request could not reach is asked at once, not after the interval."""

    def __init__(self, fleet: Fleet, fetch: Fetch, schedule: Schedule, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._fetch = fetch
        self._schedule = schedule
        self._clock = clock
        self._soon: dict[Engine, asyncio.Event] = {}
        self._moved = asyncio.Event()

    async def run(self) -> None:
        hurry, moved = self._hurry, self._moved.set
        self._fleet.doubters.append(hurry)
        self._fleet.movers.append(moved)
        try:
            async with asyncio.TaskGroup() as group:
                watched: dict[Engine, asyncio.Task[None]] = {}
                while True:
                    self._moved.clear()
                    for engine in watched.keys() - set(self._fleet.engines):
                        watched.pop(engine).cancel()
                    for engine in self._fleet.engines:
                        if engine not in watched:
                            name = f"watch {engine.spec.name}"
                            watched[engine] = group.create_task(self._watch(engine), name=name)
                    await self._moved.wait()
        finally:
            self._fleet.doubters.remove(hurry)
            self._fleet.movers.remove(moved)

    def _hurry(self, engine: Engine) -> None:
        soon = self._soon.get(engine)
        if soon is not None:
            soon.set()

    async def _watch(self, engine: Engine) -> None:
        soon = self._soon[engine] = asyncio.Event()
        try:
            await self._again_and_again(engine, soon)
        finally:
            del self._soon[engine]

    async def _again_and_again(self, engine: Engine, soon: asyncio.Event) -> None:
        while True:
            try:
                await self.probe(engine)
            except Exception:
                # What one engine answers must not end the watch of the others.
                logger.exception("the probe of engine %s failed", engine.spec.name)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._schedule.every):
                    await soon.wait()
            soon.clear()

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
        fleet = self._fleet
        engine.failures = 0
        engine.successes += 1
        still = engine.progress.still_for(self._clock())
        if asleep:
            # Its /health is good all the same, and a request would hang until somebody wakes it.
            fleet.set_state(engine, "asleep", "it sleeps until it is woken (POST /wake_up)")
            engine.progress.forget()
        elif still >= self._schedule.stalled_after:
            # Its /health is good all the same, and requests hang.
            held = max(engine.in_flight, engine.running + engine.waiting)
            fleet.stalled(engine, f"no new token for {still:.0f} s with {held} requests")
        elif engine.doubt == "faults" or (engine.doubt == "stalled" and not self._moves(engine)):
            engine.breaker.probed()
        elif engine.state != "ready" and engine.successes >= self._schedule.up_after:
            fleet.set_state(engine, "ready", "healthy")

    def _moves(self, engine: Engine) -> bool:
        """Whether a counter has changed since the probe before: it lost its requests, or it lives."""
        return engine.progress.moved_at is not None and engine.progress.moved_at == engine.sampled_at

    def _bad(self, engine: Engine, reason: str) -> None:
        engine.successes = 0
        engine.failures += 1
        if engine.state == "starting" or engine.failures < self._schedule.down_after:
            # One probe that fails is no reason to leave an engine that serves.
            if engine.state != "ready":
                self._fleet.set_state(engine, engine.state, reason, engine.doubt)
            return
        _forget(engine)
        engine.progress.forget()
        self._fleet.set_state(engine, "down", reason)

    async def _sample(self, engine: Engine) -> Figures | None:
        in_flight = engine.in_flight
        figures = None
        try:
            status, body = await self._fetch(engine.spec, "/metrics", PROBE_SECONDS)
            figures = read_figures(body) if status == HEALTHY else None
            if figures is None:
                engine.progress.forget()
        except TimeoutError:
            # Some engines answer /health beside the thread that works, and /metrics in it.
            engine.progress.silent(self._clock(), engine.in_flight)
        except OSError:
            engine.progress.forget()
        if figures is None:
            _forget(engine)
            return None
        now = self._clock()
        engine.running, engine.waiting, engine.kv = figures.running, figures.waiting, figures.kv
        engine.software, engine.preemptions = figures.software, figures.preemptions
        engine.sampled_at, engine.sampled_in_flight = now, in_flight
        engine.progress.told(figures, now)
        return figures


def _forget(engine: Engine) -> None:
    """Old figures must not decide: an engine that was busy would stay so."""
    engine.running = engine.waiting = engine.sampled_in_flight = 0
    engine.kv = engine.sampled_at = None
