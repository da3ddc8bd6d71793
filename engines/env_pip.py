"""Runs the pip of this interpreter on another environment, and tells how far it is.

The user's own pip configuration (indexes, certificates, local wheels) holds; only what would send files to
another place than the environment is taken out.
"""

from __future__ import annotations

import contextlib
import csv
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO

from engines.making import MakingError, Progress, silent, tail

_MISPLACING = ("TARGET", "PREFIX", "ROOT", "USER", "DRY_RUN", "PYTHON", "LOG", "QUIET", "VERBOSE", "REPORT")
_INHERITED_PYTHON = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")
_TAKEN = re.compile(r"(?:Collecting|Processing|Requirement already satisfied:) \S")
_LARGE = re.compile(r"\s+Downloading (\w+)-\S+ \((\d{2,}\.\d+ MB|\S+ GB)\)")
_INSTALLING = "Installing collected packages"
_POLL = 0.5


def clean_environment() -> dict[str, str]:
    """This process's environment without what would point a Python or a pip somewhere else."""
    dropped = {*_INHERITED_PYTHON, *(f"PIP_{name}" for name in _MISPLACING)}
    return {key: value for key, value in os.environ.items() if key not in dropped}


def drop_unfinished(site: Path) -> None:
    """Forget distributions of which an interrupted run wrote only a part, so that pip does them again.

    pip writes a distribution's RECORD last, with every file and its size.
    """
    for info in site.glob("*.dist-info"):
        if not _whole(info):
            shutil.rmtree(info)


def _whole(info: Path) -> bool:
    try:
        with (info / "RECORD").open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, ValueError):
        return False
    # The RECORD inside a wheel, copied like any file, does not list the installer yet.
    if f"{info.name}/INSTALLER" not in {row[0] for row in rows}:
        return False
    return all(_has_size(info.parent / name, size) for name, _, size in rows)


def _has_size(path: Path, size: str) -> bool:
    if path.suffix == ".pyc":
        return True
    try:
        return not size or path.stat().st_size == int(size)
    except OSError:
        return False


def install(
    python: Path,
    requirements: str,
    names: Sequence[str],
    *,
    site: Path,
    resolved: Sequence[str] | None,
    log: Path,
    progress: Progress,
    hold: int,
    builds: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Install a requirements file into the environment of `python`. Raises MakingError.

    `names` are the distributions it pins, for counting; `site` is where they land. What `resolved` names is
    installed first, with all that it asks for; None means that of every line. pip's output is added to `log`.
    pip keeps the descriptor `hold` open as long as it lives. `builds` is added to its environment.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "requirements.txt"
        file.write_text(requirements, encoding="utf-8")
        command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-compile"]
        if resolved:
            options = ["--constraint", str(file), *resolved]

            # How many packages that is, only pip finds out.
            progress(f"installing {' '.join(resolved)} and what it asks for")
            _run([*command, *options], 0, site=None, log=log, progress=progress, hold=hold)
        options = [*([] if resolved is None else ["--no-deps"]), "-r", str(file)]
        _run(
            [*command, *options],
            len(names),
            site=site,
            log=log,
            progress=progress,
            hold=hold,
            builds=builds,
        )


def download(requirement: str, into: Path, *, log: Path, progress: Progress = silent) -> Path:
    """Download one distribution, without what it depends on, into an empty folder. Raises MakingError."""
    options = ["--no-deps", "--only-binary", ":all:", "--dest", str(into), requirement]
    _run(
        [sys.executable, "-m", "pip", "download", *options],
        1,
        site=None,
        log=log,
        progress=progress,
        hold=None,
    )
    return next(into.iterdir())


def _run(
    command: Sequence[str],
    total: int,
    *,
    site: Path | None,
    log: Path,
    progress: Progress,
    hold: int | None,
    builds: Mapping[str, str] = MappingProxyType({}),
) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    env = clean_environment() | {"PIP_NO_COLOR": "1", "PIP_PROGRESS_BAR": "off", "PIP_NO_INPUT": "1"}
    env |= {"PYTHONUNBUFFERED": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **builds}
    with log.open("a", encoding="utf-8") as output:
        output.write(f"$ {' '.join(command)}\n")
        output.flush()
        with _started(command, env, hold) as process:
            _follow(process, output, total, site, progress)
    if process.returncode != 0:
        raise MakingError(
            f"pip ended with exit code {process.returncode}:{tail(log)}\n"
            f"  The whole log: {log}\n"
            "  What is installed so far is kept: run the same command again once that is mended."
        )


@contextlib.contextmanager
def _started(
    command: Sequence[str], env: dict[str, str], hold: int | None
) -> Iterator[subprocess.Popen[str]]:
    """A child that does not outlive an exception here, Ctrl-C included."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        text=True,
        encoding="utf-8",
        errors="replace",
        process_group=0,  # pip runs a second process in the other environment: both are ended together
        pass_fds=() if hold is None else (hold,),
    ) as process:
        try:
            yield process
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            raise


def _follow(
    process: subprocess.Popen[str], output: IO[str], total: int, site: Path | None, progress: Progress
) -> None:
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in process.stdout or ():
            lines.put(line)
        lines.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    taken = 0
    installing = False

    def tell(message: str, done: int) -> None:
        if total:
            progress(message, min(done, total), total)
        else:
            progress(message)

    while True:
        try:
            line = lines.get(timeout=_POLL)
        except queue.Empty:
            # pip says nothing while it unpacks; what has arrived can be counted.
            if installing and site is not None:
                tell("installing", _arrived(site))
            continue
        if line is None:
            break
        output.write(line)
        output.flush()
        if found := _TAKEN.match(line):
            taken += 1
            tell("collecting packages", taken)
        elif found := _LARGE.match(line):
            tell(f"downloading {found[1]} ({found[2]})", taken)
        elif line.startswith(_INSTALLING):
            installing = True
            tell("installing", 0)
    reader.join()


def _arrived(site: Path) -> int:
    return sum(1 for _ in site.glob("*.dist-info"))
