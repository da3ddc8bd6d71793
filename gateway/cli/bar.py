"""A progress bar for what takes longer than a moment, on terminals only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PATIENCE = 2.0


class Bar:
    """`clock` is in seconds; `total` is what `show` counts to."""

    def __init__(self, what: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._total = total
        self._clock = clock
        self._began = clock()
        self._bar: tuple[Progress, TaskID] | None = None

    def show(self, done: int) -> None:
        """Bring the bar up to date; nothing is shown before `PATIENCE` is over."""
        if self._bar is not None:
            self._bar[0].update(self._bar[1], completed=done)
        elif self._clock() - self._began > PATIENCE:
            from rich.console import Console
            from rich.progress import Progress

            console = Console(stderr=True)
            bar = Progress(console=console, transient=True, disable=not console.is_terminal)
            self._bar = (bar, bar.add_task(self._what, total=self._total, completed=done))
            bar.start()

    def close(self) -> None:
        if self._bar is not None:
            self._bar[0].stop()


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields what is to be called with how much of `total` is done."""
    bar = Bar(what, total)
    try:
        yield bar.show
    finally:
        bar.close()
