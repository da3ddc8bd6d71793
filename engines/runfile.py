"""What one `dualgauge up` runs, in a file that others may read at any moment: `.dualgauge/run.json`.

The file is replaced as a whole at every change. Pids are stored with the start time of their process, so that
a pid which the system gave to something else is never taken for ours.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

STATE_FOLDER = ".dualgauge"


class Process(msgspec.Struct, frozen=True):
    """A process that can be recognised later; `started` is its start time in clock ticks since boot."""

    pid: int
    started: int

    def alive(self) -> bool:
        return self.started > 0 and started(self.pid) == self.started


class UnitState(msgspec.Struct, frozen=True):
    """An engine or the gateway. `keeper` leads the session in which everything of it runs. `notes` and
    `warnings` are what its start found out, and what its log says.

    `state`: waiting, starting, warming, ready, draining, drained, asleep, waking, backoff, failed, stopping,
    stopped. In all but `ready` the gateway gives it no requests.
    """

    name: str
    url: str
    log: str
    state: str = "waiting"
    tier: str | None = None
    pid: int | None = None
    keeper: Process | None = None
    restarts: int = 0
    error: str | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class Run(msgspec.Struct, frozen=True):
    """`phase`: starting, ready, stopping, failed. `error` is why a start failed.

    `longest_stop` is how many seconds an orderly end may take. `swap`: whose turn it is, where two tiers take
    turns. `beside` are engines that somebody else runs: `ready` unless they were drained here.
    """

    config: str
    owner: Process
    boot: str
    phase: str
    base_url: str
    admin_url: str
    longest_stop: float = 0.0
    gateway: UnitState | None = None
    engines: tuple[UnitState, ...] = ()
    error: str | None = None
    swap: str | None = None
    beside: tuple[UnitState, ...] = ()


@dataclass(frozen=True, slots=True)
class Paths:
    """Where a configuration's run keeps its state and logs."""

    folder: Path

    @property
    def state(self) -> Path:
        return self.folder / "run.json"

    @property
    def lock(self) -> Path:
        return self.folder / "lock"

    @property
    def control(self) -> Path:
        return self.folder / "control.sock"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"


def why_held(unit: UnitState) -> str:
    """Why an engine gets no requests; empty where it may have some."""
    return "" if unit.state == "ready" else f"{unit.state}, by `dualgauge up`"


def paths(config: Path) -> Paths:
    return Paths(config.absolute().parent / STATE_FOLDER)


def started(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 where there is none (a zombie counts as none)."""
    try:
        fields = _stat(Path(f"/proc/{pid}"))
    except OSError:
        return 0
    return 0 if fields[0] in ("Z", "X") else int(fields[19])


def _stat(folder: Path) -> list[str]:
    """The fields of a process's `stat` from its state on: the name before them may hold anything."""
    return (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def process(pid: int) -> Process:
    return Process(pid, started(pid))


def boot_id() -> str:
    """Changes with every boot of the system: start times of another boot mean nothing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def write(path: Path, run: Run) -> None:
    """Replace the file as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=2) + b"\n")
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def read(path: Path) -> Run | None:
    """What the file says; None where there is none, or one that another version wrote."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Run)
    except (OSError, msgspec.DecodeError):
        return None


@contextlib.contextmanager
def hold(path: Path) -> Iterator[bool]:
    """Hold the lock while the block runs; yields False at once where another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="ascii") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def leftovers(run: Run) -> tuple[int, ...]:
    """Pids of what a run left behind: members of its units' sessions, the leaders included.

    A keeper that was never seen alive proves nothing, and session 0 is that of everything whose leader lives
    outside this container.
    """
    if run.boot != boot_id():
        return ()
    seen = (unit.keeper for unit in _units(run) if unit.keeper is not None and unit.keeper.started > 0)
    keepers = {keeper.pid: keeper for keeper in seen if keeper.pid > 0}
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = _stat(entry)
        except OSError:
            continue
        session, began = int(fields[3]), int(fields[19])
        keeper = keepers.get(session)
        if keeper is None or fields[0] in ("Z", "X") or began < keeper.started:
            continue
        leader = started(session)
        if leader in (0, keeper.started):  # else the number belongs to somebody else's session by now
            found.append(int(entry.name))
    return tuple(sorted(found))


def _units(run: Run) -> tuple[UnitState, ...]:
    return (*run.engines, *((run.gateway,) if run.gateway else ()))


def sweep(run: Run, *, grace: float = 15.0) -> int:
    """End what a run left behind: SIGTERM, SIGKILL after `grace` seconds. Returns how many there were."""
    first = leftovers(run)
    _signal(first, signal.SIGTERM)
    end = time.monotonic() + grace
    while remaining := leftovers(run):
        if time.monotonic() >= end:
            _signal(remaining, signal.SIGKILL)
        time.sleep(0.1)
    return len(first)


def _signal(pids: tuple[int, ...], signum: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)
