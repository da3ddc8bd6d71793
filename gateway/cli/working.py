"""Around long work of a command: progress is shown, errors are told, a stop ends the children too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gateway.cli.failures import interruptible, told

if TYPE_CHECKING:
    from engines.making import Progress

_STOPPED = "stopped; the same command goes on from there"


@contextmanager
def working(what: str) -> Iterator[Progress]:
    """Yields where to report. SIGTERM and SIGHUP end the work as Ctrl-C does, children included."""
    from rich.console import Console

    from gateway.cli.view import View

    with interruptible(), told(_STOPPED), View(Console(stderr=True)).making(what) as progress:
        yield progress
