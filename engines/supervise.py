"""Keeps the processes of one deployment running: starts them in turn, restarts what dies, stops all.

A start of an engine ends with its first answer; no two engines of one device start at the same time, since a
vLLM that measures free memory while another takes some mis-sizes its cache (vllm#55827). What dies is started
again after 1 s, then 2, 4 … 60; after `LIMIT` failures in a row it stays down and says so. Time, sleeping and
the start of processes are handed in.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from engines import launch
from engines.launch import Child, Command, Launcher, Probe, ProbeError, Sleep, StartError
from engines.runfile import UnitState

FIRST_DELAY = 1.0
LONGEST_DELAY = 60.0
HEALTHY_AFTER = 180.0
LIMIT = 5


@dataclass(frozen=True, slots=True)
class Unit:
    """One process to keep. `device` is what its start may not share with another's.

    `timeout` is how long it may take to become healthy, `grace` how long it may take to end, in seconds.
    """

    name: str
    url: str
    command: Command
    log: Path
    device: str
    probe: Callable[[], Probe]
    timeout: float
    grace: float
    tier: str | None = None


@dataclass(slots=True)
class _Kept:
    unit: Unit
    state: UnitState
    child: Child | None = None
    ready_at: float = 0.0
    failures: int = 0
    watch: asyncio.Task[None] | None = field(default=None, repr=False)


def delay(failures: int) -> float:
    """Seconds before the next start after so many failures in a row."""
    return min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** (failures - 1))


class Supervisor:
    """Owns the processes from their start to their end. One event loop, no threads.

    `changed` is called with the new state at every change, before anything else happens.
    """

    def __init__(
        self,
        launcher: Launcher,
        changed: Callable[[UnitState], None],
        *,
        clock: Callable[[], float],
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._launcher = launcher
        self._changed = changed
        self._clock = clock
        self._sleep = sleep
        self._devices: dict[str, asyncio.Lock] = {}
        self._kept: dict[str, _Kept] = {}

    async def start(self, unit: Unit) -> None:
        """Start it and return once it serves; from then on it is restarted when it dies.

        Raises StartError; then it is not running.
        """
        kept = _Kept(unit, UnitState(unit.name, unit.url, str(unit.log), tier=unit.tier))
        self._kept[unit.name] = kept
        try:
            await self._bring_up(kept)
        except StartError as error:
            self._set(kept, state="failed", error=_summary(error))
            raise
        kept.watch = asyncio.create_task(self._watch(kept), name=f"watch {unit.name}")

    async def stop(self, names: Sequence[str]) -> None:
        """End these, all at once, each within its grace."""
        await asyncio.gather(*(self._stop(self._kept[name]) for name in names if name in self._kept))

    def kill(self) -> None:
        """End everything this instant, whatever is lost."""
        for kept in self._kept.values():
            if kept.watch is not None:
                kept.watch.cancel()
            if kept.child is not None:
                kept.child.kill()

    def _set(self, kept: _Kept, **changes: object) -> None:
        kept.state = msgspec.structs.replace(kept.state, **changes)
        self._changed(kept.state)

    async def _bring_up(self, kept: _Kept) -> None:
        """One start, under the device's lock. Where it fails or is cancelled nothing of it is left."""
        unit = kept.unit
        lock = self._devices.setdefault(unit.device, asyncio.Lock())
        async with lock:
            if await launch.taken(unit.url):
                # Its answers would be taken for our own process's.
                what = f"was not started: another process answers at {unit.url}; end it, or change the port"
                raise StartError(unit.name, what, unit.log)
            self._set(kept, state="starting", pid=None, keeper=None)
            child = await self._launch(unit)
            kept.child = child
            self._set(kept, pid=child.pid, keeper=child.keeper)
            try:
                await launch.wait_ready(
                    child,
                    unit.probe(),
                    timeout=unit.timeout,
                    on_warming=lambda: self._set(kept, state="warming"),
                    sleep=self._sleep,
                )
            except BaseException as error:
                child.kill()
                code = await _uncancelled(child.wait())
                kept.child = None
                self._set(kept, pid=None, keeper=None)
                if isinstance(error, (ChildProcessError, ProbeError, TimeoutError)):
                    raise self._start_error(unit, error, code) from None
                raise
        kept.ready_at = self._clock()
        self._set(kept, state="ready", error=None)

    async def _launch(self, unit: Unit) -> Child:
        """Start the process; a cancellation that arrives meanwhile ends what was started."""
        starting = asyncio.ensure_future(self._launcher.start(unit.command, unit.log))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            child = await starting
            child.kill()
            await child.wait()
            raise

    def _start_error(self, unit: Unit, error: Exception, code: int) -> StartError:
        if isinstance(error, ChildProcessError):
            what = f"{launch.describe_exit(code)} before it was ready"
        elif isinstance(error, TimeoutError):
            what = f"was not healthy after {unit.timeout:.0f} s"
        else:
            what = f"started, but {error}"
        return StartError(unit.name, what, unit.log, launch.telling_lines(launch.tail(unit.log)))

    async def _watch(self, kept: _Kept) -> None:
        """Start it again whenever it ends, until it fails too often."""
        while kept.child is not None:
            code = await kept.child.wait()
            kept.child = None
            if self._clock() - kept.ready_at >= HEALTHY_AFTER:
                kept.failures = 0
            reason = launch.describe_exit(code)
            while kept.child is None:
                kept.failures += 1
                if kept.failures >= LIMIT:
                    text = f"{reason}; given up after {LIMIT} failures in a row, see {kept.unit.log}"
                    self._set(kept, state="failed", pid=None, keeper=None, error=text)
                    return
                pause = delay(kept.failures)
                text = f"{reason}; next start in {pause:.0f} s"
                self._set(kept, state="backoff", pid=None, keeper=None, error=text)
                await self._sleep(pause)
                self._set(kept, restarts=kept.state.restarts + 1)
                try:
                    await self._bring_up(kept)
                except StartError as error:
                    reason = _summary(error)
                except OSError as error:
                    reason = f"cannot be started: {error}"

    async def _stop(self, kept: _Kept) -> None:
        if kept.watch is not None:
            kept.watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await kept.watch
        child = kept.child
        if child is not None:
            self._set(kept, state="stopping")
            await launch.stop(child, kept.unit.grace)
            kept.child = None
        if kept.state.state != "failed":
            self._set(kept, state="stopped", pid=None, keeper=None)


def _summary(error: StartError) -> str:
    return f"{error.what}: {error.lines[0]}" if error.lines else error.what


async def _uncancelled(waiting: Awaitable[int]) -> int:
    """Wait to the end even where this task is cancelled meanwhile, then let the cancellation through."""
    task = asyncio.ensure_future(waiting)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    return task.result()
