"""Lines on their way to standard error."""

from __future__ import annotations

import io
import os
import select
import stat
import threading
from collections.abc import Callable, Iterator
from typing import TextIO


def writing(stream: TextIO) -> Callable[[bytes], None]:
    """What writes lines to a stream, on any thread. It raises OSError."""
    if isinstance(stream, io.TextIOWrapper):
        return _Out(stream).write
    # Somebody has put something else in its place, Ray say, and wants what is written to it.
    lock = threading.Lock()

    def write(data: bytes) -> None:
        with lock:
            stream.write(data.decode())
            stream.flush()

    return write


class _Out:
    """Writes to a stream's file, past its buffer: what was not written is not to stay there, and no thread
    may hold its lock where the interpreter ends. May be called on several threads."""

    def __init__(self, stream: TextIO) -> None:
        # Kept, since its file is closed when nobody has it any more.
        self._stream = stream
        self._fd = stream.fileno()
        self._lock = threading.Lock()
        self._torn = False

    def write(self, data: bytes) -> None:
        """Raises OSError."""
        with self._lock:
            # A full disk has cut a line: the next ones are not to be a part of it.
            left = memoryview(b"\n" + data if self._torn else data)
            while left:
                try:
                    done = os.write(self._fd, left)
                except BlockingIOError:  # whoever shares the file has made it so
                    room = select.poll()
                    room.register(self._fd, select.POLLOUT)
                    room.poll()
                else:
                    self._torn = True
                    left = left[done:]
            self._torn = False


def mixes(stream: TextIO) -> bool:
    """Whether what several processes write there at one time may be mixed: each write to a file is whole."""
    try:
        return not stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except OSError:
        return True


def pieces(data: bytes) -> Iterator[bytes]:
    """Whole lines, as many in a piece as a pipe takes without mixing them with others'."""
    while len(data) > select.PIPE_BUF:
        end = data.rfind(b"\n", 0, select.PIPE_BUF) + 1 or data.find(b"\n") + 1 or len(data)
        yield data[:end]
        data = data[end:]
    if data:
        yield data
