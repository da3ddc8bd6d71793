"""What `up` and `down` show of a run: one line at each milestone, on a terminal a live line below."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from engines import launch
from engines.runfile import Run, UnitState

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from engines.making import Progress

OFTEN = 5.0
STILL = 15.0
_BUSY = {"starting": "starting", "warming": "proving", "stopping": "stopping"}


class View:
    """Tells changes between one state of a run and the next. `clock` is in seconds."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._known: dict[str, UnitState] = {}
        self._since: dict[str, float] = {}
        self._told: dict[str, float] = {}
        self._status: Status | None = None

    def say(self, text: str, *, style: str = "") -> None:
        with suppress(OSError, SystemExit):  # rich's answer to a closed pipe; what runs must not end with it
            self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def begin(self, run: Run) -> None:
        """Take this as known: nothing is told of how it came to be so."""
        self._known = {unit.name: unit for unit in _units(run)}

    def show(self, run: Run) -> None:
        """Tell what has changed since the last call."""
        for unit in _units(run):
            before = self._known.get(unit.name)
            if before is None or before.state != unit.state or before.error != unit.error:
                self._known[unit.name] = unit
                self._changed(unit, before, run.phase)
        self.tick()

    def _changed(self, unit: UnitState, before: UnitState | None, phase: str) -> None:
        now = self._clock()
        since = self._since.get(unit.name, now)
        if unit.state in ("starting", "stopping"):
            self._since[unit.name] = now
        if unit.state == "ready":
            self.say(f"✓ {unit.name} is ready after {now - since:.0f} s, {unit.url}", style="green")
        elif unit.state in ("draining", "drained", "asleep", "waking"):
            self.say(f"  {unit.name} is {unit.state}")
        elif unit.state == "stopped" and before is not None and before.state == "stopping":
            self.say(f"✓ {unit.name} stopped after {now - since:.0f} s", style="green")
        elif unit.state == "backoff":
            self.say(f"! {unit.name} {unit.error}", style="yellow")
        elif unit.state == "failed" and phase == "ready":  # else the command's own error says it
            self.say(f"✗ {unit.name} {unit.error}", style="red")
        elif unit.state == "starting" and not self._console.is_terminal:
            self.say(f"  {unit.name}: starting, log: {_shown(Path(unit.log))}")

    def tick(self) -> None:
        """Bring the live line up to date: who is busy, for how long, and the last line of its log."""
        busy = [unit for unit in self._known.values() if unit.state in _BUSY]
        if not busy:
            self.close()
            return
        now = self._clock()
        if not self._console.is_terminal:
            self._still_busy(busy, now)
            return
        text = ", ".join(
            f"{_BUSY[unit.state]} {unit.name} {now - self._since.get(unit.name, now):.0f} s" for unit in busy
        )
        said = _last_line(Path(busy[0].log)) if busy[0].state != "stopping" else ""
        self._live(f"{text}  {said}")

    @contextmanager
    def making(self, what: str) -> Iterator[Progress]:
        """A `Progress` for one piece of work; it leaves a line only where there was something to do."""
        began = told = self._clock()
        last = ""

        def progress(message: str, done: int | None = None, total: int | None = None) -> None:
            nonlocal told, last
            share = f" {done / total:.0%}" if done is not None and total else ""
            now = self._clock()
            if self._console.is_terminal:
                self._live(f"{what}: {message}{share}  {now - began:.0f} s")
            elif not last or now - told >= (OFTEN if message != last else STILL):
                told, last = now, message
                self.say(f"  {what}: {message}{share}")

        try:
            yield progress
        finally:
            self.close()
        if self._clock() - began >= 1:
            self.say(f"✓ {what} after {self._clock() - began:.0f} s", style="green")

    def _live(self, line: str) -> None:
        from rich.text import Text

        text = Text(line[: max(20, self._console.width - 4)])
        if self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        else:
            self._status.update(text)

    def _still_busy(self, busy: list[UnitState], now: float) -> None:
        """Where there is no live line: a line every `STILL` seconds."""
        for unit in busy:
            since = self._since.get(unit.name, now)
            if now - max(since, self._told.get(unit.name, since)) >= STILL:
                self._told[unit.name] = now
                said = "" if unit.state == "stopping" else _last_line(Path(unit.log))[:100]
                text = f"{_BUSY[unit.state]} for {now - since:.0f} s"
                self.say(f"  {unit.name}: {text}, {said}" if said else f"  {unit.name}: {text}")

    def close(self) -> None:
        """Take the live line away."""
        if self._status is not None:
            self._status.stop()
            self._status = None


def _units(run: Run) -> tuple[UnitState, ...]:
    return (*run.engines, *((run.gateway,) if run.gateway else ()))


def _last_line(log: Path) -> str:
    lines = launch.tail(log, 4096).strip().splitlines()
    return launch.strip_prefix(lines[-1]).strip() if lines else ""


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
