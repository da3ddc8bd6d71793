"""An append-only file of lines with rotation, written by a thread of its own.

Whoever appends never waits: lines go to a bounded queue, and are counted as dropped where the disk is full or
cannot keep up. The file never holds a part of a line: a write that was cut short is cut back to the last line
that is whole, and the rest is tried again. A failing disk is told when it begins and when it has ended.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from pathlib import Path

from gateway.telemetry.decision_files import MAX_LINE, names, older
from policies.logged import Fields

logger = logging.getLogger("dualgauge.decisions")

MAX_QUEUE = 20_000
BATCH = 1000
EVERY_SECONDS = 0.2
AGAIN_SECONDS = 1.0
MODE = 0o600
"""Names of tenants and what they ask for are nobody else's business."""

Entry = tuple[Fields | None, bytes]


class DecisionLog:
    """`size` is in bytes, `keep` the number of older files; `dropped` is told how many lines were lost,
    on the thread that appends or closes. `start` it before the first line, `close` it after the last one.
    `shared`: other processes have this path too, and each writes files of its own."""

    def __init__(
        self, path: Path, size: int, keep: int, dropped: Callable[[int], None], *, shared: bool = False
    ) -> None:
        self._path = path
        self._names = names(path) if shared else [path]
        self._limit = size
        self._keep = keep
        self._dropped = dropped
        self._queue: deque[Entry] = deque()
        self._batch: deque[Entry] = deque()
        self._told: set[str] = set()
        self._fd = -1
        self._size = 0
        self._failing = False
        self._dropping = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="decision-log", daemon=True)

    def start(self) -> None:
        """Open the file and begin. Raises OSError, which says what to change."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._open_free()
        except BlockingIOError:
            message = f"decision_log.path: {self._path} is written by another gateway: name another file"
            raise OSError(errno.EAGAIN, message) from None
        except OSError as error:
            message = f"decision_log.path: {self._path} cannot be written: {error.strerror}"
            raise OSError(error.errno, message) from None
        self._thread.start()

    def _open_free(self) -> None:
        """The first file that nobody else writes. Raises BlockingIOError where there is none, OSError."""
        *names, last = self._names
        for name in names:
            self._path = name
            with contextlib.suppress(BlockingIOError):
                self._open()
                return
        self._path = last
        self._open()

    def append(self, fields: Fields | None, line: bytes) -> None:
        """One line, newline included; `fields` is put before it where the file does not have it yet."""
        if len(self._queue) >= MAX_QUEUE:
            self._dropped(1)
            if not self._dropping:
                self._dropping = True
                logger.error("%s: the disk cannot keep up, decisions are dropped", self._path)
            return
        self._queue.append((fields, line))

    def drop(self) -> None:
        """Count a line that could not even be made."""
        self._dropped(1)

    def close(self, seconds: float) -> None:
        """Write what is left, and end; what is not written after so many seconds is dropped."""
        if self._thread.ident is None:
            return
        self._end.set()
        self._thread.join(seconds)
        left = len(self._queue) + len(self._batch)
        if left:
            self._dropped(left)
            logger.error("%s: %d decisions could not be written at the end", self._path, left)

    # the thread's side

    def _run(self) -> None:
        while not self._end.wait(AGAIN_SECONDS if self._failing else EVERY_SECONDS):
            self._drain()
        self._drain()
        os.close(self._fd)

    def _drain(self) -> None:
        if not self._queue and not self._batch:
            return
        try:
            if self._failing:
                self._size = _cut(self._fd, self._path)
            self._follow()
            while self._queue or self._batch:
                while self._queue and len(self._batch) < BATCH:
                    self._batch.append(self._queue.popleft())
                self._write()
        except OSError as error:
            if not self._failing:
                self._failing = True
                why = error.strerror or error
                logger.error("%s cannot be written: %s; it is tried again", self._path, why)
            return
        except Exception:
            # A fault of ours: without this thread every later line would be lost without a word.
            if not self._failing:
                self._failing = True
                logger.exception("%s cannot be written; it is tried again", self._path)
            return
        if self._failing or self._dropping:
            self._failing = self._dropping = False
            logger.warning("%s is written again", self._path)

    def _write(self) -> None:
        """As much of the batch as this file takes. Raises OSError; what was not written is kept then."""
        ends: list[int] = []
        chunk, told = bytearray(), set(self._told)
        for fields, line in self._batch:
            data = line
            if fields is not None and fields.id not in told:
                data = fields.line + line
            if self._size + len(chunk) + len(data) > self._limit and self._size + len(chunk) > 0:
                break
            if fields is not None:
                told.add(fields.id)
            chunk += data
            ends.append(len(chunk))
        if not ends:
            self._rotate()
            return
        start, done = self._size, 0
        try:
            while done < len(chunk):
                done += os.write(self._fd, memoryview(chunk)[done:])
        finally:
            whole = bisect_right(ends, done)
            kept = ends[whole - 1] if whole else 0
            self._size = start + kept
            for _ in range(whole):
                fields, _line = self._batch.popleft()
                if fields is not None:
                    self._told.add(fields.id)
            if kept < done:
                os.ftruncate(self._fd, start + kept)

    def _rotate(self) -> None:
        for number, file in older(self._path):
            if number >= self._keep:
                file.unlink(missing_ok=True)
            else:
                suffix = ".gz" if file.suffix == ".gz" else ""
                file.replace(self._path.with_name(f"{self._path.name}.{number + 1}{suffix}"))
        self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        self._open()

    def _follow(self) -> None:
        """Open the file anew where somebody has taken it away."""
        own = os.fstat(self._fd)
        try:
            there = self._path.stat()
        except FileNotFoundError:
            self._open()
            return
        if (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino):
            self._open()

    def _open(self) -> None:
        """Go on in the file at `path`, and close the one before. Raises OSError; that one is kept then."""
        fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, MODE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = _cut(fd, self._path)
        except OSError:
            os.close(fd)
            raise
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
        self._fd, self._size = fd, size
        self._told = set()


def _cut(fd: int, path: Path) -> int:
    """The size of the file; a last line that a crash has left unfinished is cut off."""
    size = os.fstat(fd).st_size
    tail = os.pread(fd, MAX_LINE, max(0, size - MAX_LINE))
    torn = len(tail) - (tail.rfind(b"\n") + 1)
    if torn:
        os.ftruncate(fd, size - torn)
        logger.warning("%s: cut off a line that was not finished, %d bytes", path, torn)
    return size - torn
