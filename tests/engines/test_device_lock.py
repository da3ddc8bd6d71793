from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from engines import device_lock

HOLDER = """
import asyncio, sys
from pathlib import Path
from engines import device_lock

async def main():
    async with device_lock.held(Path(sys.argv[1]), "gpu:0", print, asyncio.sleep):
        print("held", flush=True)
        sys.stdin.read()

asyncio.run(main())
"""


async def take(folder: Path, device: str, waits: list[str]) -> None:
    async with device_lock.held(folder, device, waits.append, asyncio.sleep):
        pass


def holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_another_process_is_waited_for_and_named(tmp_path: Path) -> None:
    async def main() -> list[str]:
        waits: list[str] = []
        with holder(tmp_path) as other:
            taking = asyncio.create_task(take(tmp_path, "gpu:0", waits))
            while not waits:
                await asyncio.sleep(0.01)
            await take(tmp_path, "gpu:1", waits)  # another GPU is free
            assert not taking.done()
            other.kill()
            await taking
            return [*waits, str(other.pid)]

    said, pid = asyncio.run(main())
    assert said == pid


def test_a_lock_is_let_go_however_its_block_ends(tmp_path: Path) -> None:
    async def main() -> None:
        try:
            async with device_lock.held(tmp_path, "gpu:0", print, asyncio.sleep):
                raise ValueError
        except ValueError:
            pass
        await take(tmp_path, "gpu:0", [])

    asyncio.run(asyncio.wait_for(main(), 30))


def test_only_its_owner_may_use_it(tmp_path: Path) -> None:
    asyncio.run(take(tmp_path, "gpu:0", []))
    assert os.stat(tmp_path / "gpu-0.lock").st_mode & 0o777 == 0o600  # noqa: PTH116


def test_without_a_folder_starts_go_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    asyncio.run(take(tmp_path / "file" / "locks", "gpu:0", []))
