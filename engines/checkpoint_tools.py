"""Runs a module of `scripts/checkpoints` with an engine environment's Python, and follows its progress."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from engines import env_pip
from engines.making import MakingError, Progress, tail

PROGRESS_FD = "DUALGAUGE_PROGRESS_FD"
_SCRIPTS = Path(__file__).parent / "scripts"


def run(
    python: Path, module: str, arguments: Sequence[str], *, log: Path, progress: Progress, hold: int
) -> None:
    """Run `checkpoints.<module>`, which tells its progress; what it prints goes to `log`.

    `hold` is a lock's descriptor that the child keeps open. Raises MakingError with the end of the log.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        start = output.tell()
        command = [str(python), "-P", "-s", "-m", f"checkpoints.{module}", *arguments]
        with _started(command, output.fileno(), hold) as (process, lines):
            for line in lines:
                said = json.loads(line)
                progress(said["message"], said["done"], said["total"])
    if process.returncode != 0:
        raise MakingError(
            f"{module} ended with exit code {process.returncode}:{tail(log, since=start)}\n"
            f"  The whole log: {log}"
        )


@contextlib.contextmanager
def _started(
    command: Sequence[str], output: int, hold: int
) -> Iterator[tuple[subprocess.Popen[bytes], IO[str]]]:
    # A pipe of its own, since the libraries in there print to standard output as they please.
    reading, writing = os.pipe()
    env = env_pip.clean_environment() | {"PYTHONPATH": str(_SCRIPTS), PROGRESS_FD: str(writing)}
    # Nothing in there may ask a hub: what it works on is on this disk.
    env |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    # Spinning at barriers costs more than it saves where cores are shared.
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with os.fdopen(reading, encoding="utf-8") as lines:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                pass_fds=(hold, writing),
            )
        finally:
            os.close(writing)
        with process:
            try:
                yield process, lines
            except BaseException:
                process.terminate()
                raise
