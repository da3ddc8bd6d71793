"""What measuring takes of this machine, and what others take of it meanwhile: a busy one measures wrongly."""

from __future__ import annotations

import os
import time
from pathlib import Path

from engines.bench.results import Spent

PROC = Path("/proc")
_IDLE = slice(3, 5)
"""Of a line of /proc/stat: idle, and waiting for a disk."""
_ALL = slice(0, 8)
"""Without the last two, guests: these are in the first two already."""


def now(proc: Path = PROC) -> Spent:
    """Seconds since some time in the past, for `Spent.since`.

    A child of ours counts when it has ended and was waited for, its own children likewise.
    """
    ours = os.times()
    cpu = ours.user + ours.system + ours.children_user + ours.children_system
    ticks = [int(field) for field in (proc / "stat").read_text("ascii").split("\n", 1)[0].split()[1:]]
    second = os.sysconf("SC_CLK_TCK")
    idle = sum(ticks[_IDLE]) / second
    return Spent(time.monotonic(), cpu, sum(ticks[_ALL]) / second - idle - cpu, idle)
