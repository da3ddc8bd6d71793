"""Keeps the processes of one deployment running: starts them in turn, restarts what dies, stops all.

A start of an engine ends with its proof; no two engines of one GPU start at the same time, here or in
another `dualgauge up` (`device_lock`). What dies is started again after 1 s, then 2, 4 … 60; after `LIMIT`
failures in a row it stays down and says so. What an operator asks for (drain, restart, sleep, wake) waits for
the requests that run, one thing at a time for each engine. Time, sleeping and the start of processes are
handed in.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from engines import device_lock, launch
from engines.integrity import IntegrityError
from engines.launch import Child, Command, Launcher, Probe, ProbeError, Proof, Sleep, StartError
from engines.runfile import UnitState
from engines.sleeping import NO_SLEEP_MODE, Sleeper
from engines.trouble import LogFollower

FIRST_DELAY = 1.0
LONGEST_DELAY = 60.0
HEALTHY_AFTER = 180.0
LIMIT = 5
_RESTARTABLE = ("ready", "drained", "asleep", "backoff", "failed")


@dataclass(frozen=True, slots=True)
class Unit:
    """One process to keep. `device` is what its start may not share with another's.

    `timeout` is how long it may take to become healthy, `grace` how long it may take to end, in seconds.
    `sleeper` is None for what cannot sleep. `check` is asked before each start whether what it will open may
    be opened; it raises IntegrityError.
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
    sleeper: Sleeper | None = None
    check: Callable[[], Awaitable[None]] | None = None


NOTHING_YET = Proof()


Idle = Callable[[], Awaitable[None]]
"""Returns once an engine that is no longer `ready` gets nothing new and nothing runs on it any more."""


class OperationError(Exception):
    """What was asked of an engine was not done; the message says why, and how the engine is now."""


@dataclass(slots=True)
class _Kept:
    """`parked` is the state that an operator chose for it, which outlasts a restart; else empty. `hung` is
    why it was killed, where it was."""

    unit: Unit
    state: UnitState
    follower: LogFollower
    child: Child | None = None
    ready_at: float = 0.0
    failures: int = 0
    parked: str = ""
    proof: Proof = NOTHING_YET
    trouble: tuple[str, ...] = ()
    hung: str = ""
    busy: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    watch: asyncio.Task[None] | None = field(default=None, repr=False)


def delay(failures: int) -> float:
    """Seconds before the next start after so many failures in a row."""
    return min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** (failures - 1))


class Supervisor:
    """Owns the processes from their start to their end. One event loop, no threads.

    `changed` is called with the new state at every change, before anything else happens. `locks` is the
    folder of locks that the `dualgauge up`s of this user share; without one, GPUs are locked in this process
    alone.
    """

    def __init__(
        self,
        launcher: Launcher,
        changed: Callable[[UnitState], None],
        *,
        clock: Callable[[], float],
        sleep: Sleep = asyncio.sleep,
        locks: Path | None = None,
    ) -> None:
        self._locks = locks
        self._launcher = launcher
        self._changed = changed
        self._clock = clock
        self._sleep = sleep
        self._devices: dict[str, asyncio.Lock] = {}
        self._ending = False
        self._kept: dict[str, _Kept] = {}

    async def start(self, unit: Unit) -> None:
        """Start it and return once it serves; from then on it is restarted when it dies.

        Raises StartError; then it is not running.
        """
        kept = _Kept(
            unit, UnitState(unit.name, unit.url, str(unit.log), tier=unit.tier), LogFollower(unit.log)
        )
        self._kept[unit.name] = kept
        try:
            await self._bring_up(kept)
        except StartError as error:
            self._set(kept, state="failed", error=_summary(error))
            raise
        self._watch_over(kept)

    def look(self) -> None:
        """Look for trouble in what the engines have logged since the last look."""
        for kept in self._kept.values():
            trouble = kept.follower.look()
            if trouble != kept.trouble:
                kept.trouble = trouble
                self._set(kept)

    def kill_hung(self, name: str, why: str) -> None:
        """End one that lives and does not work; it is started again as after a crash. One that is not in
        service, or of which something is asked, is left alone."""
        kept = self._kept[name]
        if kept.state.state == "ready" and kept.child is not None and not kept.busy.locked():
            kept.hung = why
            kept.child.kill()

    # What an operator asks for. Each raises OperationError; cancelled while requests still run, it is undone.

    async def drain(self, name: str, idle: Idle) -> None:
        """Return once nothing runs on the engine. It stays without requests until `resume`."""
        async with self._operating(name) as kept:
            await self._empty(kept, idle)
            kept.parked = "drained"
            self._set(kept, state="drained")

    async def resume(self, name: str) -> None:
        """Let it have requests again."""
        async with self._operating(name, "drained") as kept:
            kept.parked = ""
            self._set(kept, state="ready")

    async def restart(self, name: str, idle: Idle | None) -> None:
        """End it once nothing runs on it, or with `idle` None at once, and return when it serves again."""
        async with self._operating(name, *_RESTARTABLE) as kept:
            if idle is not None and kept.state.state in ("ready", "drained"):
                await self._empty(kept, idle)
            await self._again(kept)

    async def sleep(self, name: str, idle: Idle) -> None:
        """Put it to sleep once nothing runs on it."""
        async with self._operating(name, "ready", "drained") as kept:
            sleeper = self._sleeper(kept)
            if await sleeper.asleep() is None:  # known before a request had to go elsewhere
                raise OperationError(f"{name} {NO_SLEEP_MODE}")
            await self._empty(kept, idle)
            try:
                await sleeper.sleep()
            except ProbeError as error:
                # It may be asleep or not: only a wake-up with its proof tells.
                failure = await self._rouse(kept, sleeper)
                now = f"it was restarted ({failure})" if failure else "it serves on"
                raise OperationError(f"{name}: {error}; {now}") from None
            kept.parked = "asleep"
            self._set(kept, state="asleep")

    async def wake(self, name: str) -> str | None:
        """Wake it, prove it, let it have requests. Returns why it had to be restarted, where it had."""
        async with self._operating(name, "asleep") as kept:
            return await self._rouse(kept, self._sleeper(kept))

    @contextlib.asynccontextmanager
    async def _operating(self, name: str, *states: str) -> AsyncIterator[_Kept]:
        kept = self._kept.get(name)
        if kept is None:
            raise OperationError(f"no engine `{name}` runs here: {', '.join(self._kept)}")
        state = kept.state.state
        if kept.busy.locked():
            raise OperationError(f"{name} is {state}: wait until that has ended")
        wanted = states or ("ready",)
        if state not in wanted:
            raise OperationError(f"{name} is {state}; this needs one that is {' or '.join(wanted)}")
        async with kept.busy:
            yield kept

    def _sleeper(self, kept: _Kept) -> Sleeper:
        if kept.unit.sleeper is None:
            raise OperationError(f"{kept.unit.name} cannot sleep: only engines of kind vllm can")
        return kept.unit.sleeper

    async def _empty(self, kept: _Kept, idle: Idle) -> None:
        """Wait until nothing runs on it; where that is cancelled, it gets requests again."""
        before = kept.state.state
        self._set(kept, state="draining")
        try:
            await idle()
        except BaseException:
            if kept.state.state == "draining":
                self._set(kept, state=before)
            raise
        if kept.child is None:
            raise OperationError(f"{kept.unit.name} ended by itself meanwhile, and is started again")

    async def _rouse(self, kept: _Kept, sleeper: Sleeper) -> str | None:
        """Wake it and prove it, else start it anew; returns why that was needed."""
        if kept.child is None:
            why = kept.state.error or "it had ended"
            await self._again(kept)
            return why
        self._set(kept, state="waking")
        probe = kept.unit.probe()
        try:
            await sleeper.wake()
            kept.proof = await probe.warm_up()
        except ProbeError as error:
            await self._again(kept)
            return str(error)
        finally:
            await probe.close()
        kept.parked = ""
        self._set(kept, state="ready")
        return None

    async def _again(self, kept: _Kept) -> None:
        """End it and start it. Where it does not come up it is tried again, as after a crash."""
        kept.parked = ""
        await self._end_watch(kept)
        reason = None
        try:
            if kept.child is not None:
                self._set(kept, state="stopping")
                await launch.stop(kept.child, kept.unit.grace)
                kept.child = None
            kept.failures = 0
            self._set(kept, restarts=kept.state.restarts + 1)
            await self._bring_up(kept)
        except StartError as error:
            reason = _summary(error)
            raise OperationError(f"{kept.unit.name} {reason}; it is tried again") from None
        except OSError as error:
            reason = f"cannot be started: {error}"
            raise OperationError(f"{kept.unit.name} {reason}; it is tried again") from None
        except asyncio.CancelledError:
            reason = "its restart was cut short"
            raise
        finally:
            if not self._ending:
                self._watch_over(kept, reason)

    def state(self, name: str) -> str:
        return self._kept[name].state.state

    async def stop(self, names: Sequence[str]) -> None:
        """End these, all at once, each within its grace. Nothing may be asked of an engine any more."""
        self._ending = True
        await asyncio.gather(*(self._stop(self._kept[name]) for name in names if name in self._kept))

    def kill(self) -> None:
        """End everything this instant, whatever is lost."""
        for kept in self._kept.values():
            if kept.watch is not None:
                kept.watch.cancel()
            if kept.child is not None:
                kept.child.kill()

    def _set(self, kept: _Kept, **changes: object) -> None:
        found = {"notes": kept.proof.notes, "warnings": (*kept.proof.warnings, *kept.trouble)}
        kept.state = msgspec.structs.replace(kept.state, **found, **changes)
        self._changed(kept.state)

    def _watch_over(self, kept: _Kept, reason: str | None = None) -> None:
        kept.watch = asyncio.create_task(self._watch(kept, reason), name=f"watch {kept.unit.name}")

    async def _end_watch(self, kept: _Kept) -> None:
        if kept.watch is not None:
            kept.watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await kept.watch
            kept.watch = None

    async def _bring_up(self, kept: _Kept) -> None:
        """One start, under the device's lock. Where it fails or is cancelled nothing of it is left."""
        unit = kept.unit
        async with self._turn(kept):
            if await launch.taken(unit.url):
                # Its answers would be taken for our own process's.
                what = f"was not started: another process answers at {unit.url}; end it, or change the port"
                raise StartError(unit.name, what, unit.log)
            self._set(kept, state="starting", pid=None, keeper=None)
            if unit.check is not None:
                try:
                    await unit.check()
                except IntegrityError as error:
                    what = "was not started: its model is not what it should be"
                    raise StartError(unit.name, what, unit.log, error.problems) from None
            child = await self._launch(unit)
            kept.child = child
            self._set(kept, pid=child.pid, keeper=child.keeper)
            try:
                kept.proof = await launch.wait_ready(
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
        if kept.parked != "drained":
            kept.parked = ""
        self._set(kept, state=kept.parked or "ready", error=None)

    @contextlib.asynccontextmanager
    async def _turn(self, kept: _Kept) -> AsyncIterator[None]:
        """Its device's turn to start."""
        device = kept.unit.device

        def waits(holder: str) -> None:
            self._set(
                kept,
                state="waiting",
                error=f"another `dualgauge up` (pid {holder}) starts an engine on {device}",
            )

        async with self._devices.setdefault(device, asyncio.Lock()):
            if self._locks is None or not device.startswith("gpu"):
                yield
                return
            async with device_lock.held(self._locks, device, waits, self._sleep):
                yield

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

    async def _watch(self, kept: _Kept, reason: str | None) -> None:
        """Start it again whenever it ends, until it fails too often. `reason`: it has ended already."""
        while True:
            if reason is None:
                assert kept.child is not None
                code = await kept.child.wait()
                kept.child = None
                if self._clock() - kept.ready_at >= HEALTHY_AFTER:
                    kept.failures = 0
                reason = kept.hung or launch.describe_exit(code)
                kept.hung = ""
                if kept.parked == "asleep":
                    # Its memory may be in use by whoever is awake: it has none to start with before its turn.
                    text = f"{reason} while it slept; it is started when it is woken"
                    self._set(kept, state="asleep", pid=None, keeper=None, error=text)
                    return
            while reason is not None:
                kept.failures += 1
                if kept.failures >= LIMIT:
                    text = f"{reason}; given up after {LIMIT} failures in a row, see {kept.unit.log}"
                    self._set(kept, state="failed", pid=None, keeper=None, error=text)
                    return
                pause = delay(kept.failures)
                text = f"{reason}; next start in {pause:.0f} s"
                self._set(kept, state="backoff", pid=None, keeper=None, error=text)
                await self._sleep(pause)
                reason = await self._try(kept)

    async def _try(self, kept: _Kept) -> str | None:
        """One more start; why it failed."""
        async with kept.busy:
            self._set(kept, restarts=kept.state.restarts + 1)
            try:
                await self._bring_up(kept)
            except StartError as error:
                return _summary(error)
            except OSError as error:
                return f"cannot be started: {error}"
        return None

    async def _stop(self, kept: _Kept) -> None:
        await self._end_watch(kept)
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
