"""What an engine's processes hold in memory, read from outside."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from pathlib import Path

EVERY = 1.0
PROC = Path("/proc")


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
