"""One start at a time on a GPU, also between two `dualgauge up`s of one user: a file lock a GPU.

A vLLM measures free memory while it starts; what a neighbour takes meanwhile is charged to it, and what a
neighbour gives back makes it fail (vllm#55827, #56830). The system lets go of the lock when its holder ends,
however that was. Where the folder cannot be written to, starts go on without: a full disk is no reason to
leave a tier without an engine.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from engines.launch import Sleep

LOOK = 0.25


@asynccontextmanager
async def held(folder: Path, device: str, waits: Callable[[str], None], sleep: Sleep) -> AsyncIterator[None]:
    """Hold the device while the block runs. `waits` is told once by whom it is held, where it is not free."""
    try:
        descriptor = _open(folder, f"{device.replace(':', '-')}.lock")
    except OSError:
        yield
        return
    try:
        told = False
        while not _take(descriptor):
            if not told:
                waits(os.pread(descriptor, 32, 0).decode("ascii", "replace").strip())
                told = True
            await sleep(LOOK)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _open(folder: Path, name: str) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    return os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600)


def _take(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
