"""Finds engines of ours that live and do not work, for whoever restarts them: a process that ends by itself
is easy to see, one that hangs behind a good `/health` or was stopped is not.

Watches by itself, with the gateway's own probes: an engine must come back also while no gateway runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from engines.fleet import Engine, Fleet
from engines.health import Schedule, Watch
from engines.launch import client
from engines.spec import EngineSpec, bearer

Kill = Callable[[str, str], None]
"""(engine, why): end it at once, so that it is started again."""


async def fetch(spec: EngineSpec, path: str, seconds: float) -> tuple[int, bytes]:
    """(status, body) of a GET, which shows the engine's key: llama-server tells no figures without. Raises
    OSError or TimeoutError where there is no answer in `seconds`."""
    import httpx2

    try:
        async with asyncio.timeout(seconds), client(spec.url) as asking:
            reply = await asking.get(path, headers=bearer(spec.api_key), timeout=seconds)
            return reply.status_code, reply.content
    except httpx2.TimeoutException as error:
        raise TimeoutError(f"{path}: {type(error).__name__}") from None
    except httpx2.HTTPError as error:
        raise OSError(f"{path}: {type(error).__name__} {error}".strip()) from None


class Hangs:
    """`run` ends when it is cancelled, and leaves no task behind. Times are in seconds."""

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        schedule: Schedule,
        kill: Kill,
        clock: Callable[[], float],
        ask: Callable[[EngineSpec, str, float], Awaitable[tuple[int, bytes]]] = fetch,
    ) -> None:
        self._fleet = Fleet(specs, tuple(dict.fromkeys(spec.tier for spec in specs)))
        self._watch = Watch(self._fleet, ask, schedule, clock)
        self._schedule = schedule
        self._kill = kill
        self._clock = clock

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for engine in self._fleet.engines:
                group.create_task(self._look_after(engine), name=f"hangs of {engine.spec.name}")

    async def _look_after(self, engine: Engine) -> None:
        answered: float | None = None
        while True:
            await self._watch.probe(engine)
            now = self._clock()
            if engine.successes or engine.doubt == "stalled":
                answered = now
            silent = 0.0 if answered is None else now - answered
            if engine.doubt == "stalled" or silent >= self._schedule.stalled_after:
                why = f"no answer for {silent:.0f} s, {engine.reason}" if silent else engine.reason
                self._kill(engine.spec.name, why)
                answered = None
                engine.progress.forget()
                self._fleet.set_state(engine, "starting", "it is started again")
            await asyncio.sleep(self._schedule.every)
