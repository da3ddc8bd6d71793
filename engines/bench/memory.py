"""What an engine's processes hold, read from outside: memory, and the port on which they listen."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from pathlib import Path

EVERY = 1.0
PROC = Path("/proc")
_LISTENS = "0A"


def tree(pid: int, proc: Path = PROC) -> list[int]:
    """A process and everything that it started and that still runs."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in proc.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = (entry / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
                children[int(fields[1])].append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def resident(pid: int, proc: Path = PROC) -> int:
    """Bytes of a process and its children: proportional set sizes, so that shared pages count once."""
    total = 0
    for one in tree(pid, proc):
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = (proc / str(one) / "smaps_rollup").read_text("ascii", "replace")
            total += int(text.partition("\nPss:")[2].split()[0]) * 1024
    return total


def listens(pid: int, port: int, proc: Path = PROC) -> bool:
    """Whether a process or one of its children is who accepts connections on this port."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / "net" / table).read_text("ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{fields[9]}]")
    for one in tree(pid, proc):
        with contextlib.suppress(OSError):
            for held in (proc / str(one) / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(held.readlink()) in sockets:
                        return True
    return False


class Peak:
    """The most that `read` has told so far, bytes; at least `least`."""

    def __init__(self, read: Callable[[], int], least: int = 0) -> None:
        self._read = read
        self.bytes = least

    async def look(self) -> None:
        self.bytes = max(self.bytes, await asyncio.to_thread(self._read))

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Looks every `EVERY` seconds, and at the end."""

        async def watch() -> None:
            while True:
                await self.look()
                await asyncio.sleep(EVERY)

        task = asyncio.create_task(watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.look()
