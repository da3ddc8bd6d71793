"""What every long piece of making shares: telling how far it is, one error type, a lock, room on the disk."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

TAIL_LINES = 12


class Progress(Protocol):
    """Told what is being done now, and where it can be counted, how much of how many is done."""

    def __call__(self, message: str, done: int | None = None, total: int | None = None) -> None: ...


def silent(message: str, done: int | None = None, total: int | None = None) -> None:
    """A `Progress` that tells nobody."""


class MakingError(Exception):
    """Something could not be installed or made; the message says why and what to do."""


@contextlib.contextmanager
def locked(path: Path, progress: Progress) -> Iterator[int]:
    """Hold the lock file; yields its descriptor.

    A child that is given the descriptor holds the lock too, and goes on holding it if we are killed: nobody
    starts beside a pip that outlived its parent.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that does the same")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def check_room(folder: Path, needed: int, what: str) -> None:
    """Raise MakingError where the disk of `folder` (it need not exist) has less than `needed` bytes free."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise MakingError(
            f"{what} needs {_size(needed)} on the disk of {folder}, and {_size(free)} is free: "
            "free some space, or put the data elsewhere with DUALGAUGE_HOME"
        )


def size_of(folder: Path) -> int:
    """Bytes on disk below a folder, 0 where there is none; links are not followed."""
    return sum(
        (Path(parent) / name).lstat().st_blocks * 512
        for parent, _, names in os.walk(folder)
        for name in names
    )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.0f} MB"


def tail(log: Path, lines: int = TAIL_LINES, since: int = 0) -> str:
    """The last lines of a log file after byte `since`, indented; empty where there are none."""
    if not log.is_file():
        return ""
    text = log.read_bytes()[since:].decode("utf-8", errors="replace")
    return "".join(f"\n    {line}" for line in text.splitlines()[-lines:])
