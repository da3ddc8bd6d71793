"""Models by their hub name: fetched once by the engine environment's client, then taken from the cache."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from engines import hub_fetch
from engines.making import MakingError, Progress


def fetch(model: str, python: Path, progress: Progress, env: Mapping[str, str] = os.environ) -> Path:
    """The folder of a model, downloaded where it is not in the cache. Progress is in bytes.

    Raises MakingError. Interrupted, the next call goes on from where it was.
    """
    progress(f"looking for {model}")
    command = [str(python), "-I", hub_fetch.__file__, model]
    folder = error = None
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            env=dict(env),
        ) as process,
    ):
        try:
            for line in process.stdout or ():
                said = json.loads(line)
                if "done" in said:
                    progress(f"downloading {model}", said["done"], said["total"])
                folder, error = said.get("folder", folder), said.get("error", error)
            process.wait()
        except BaseException:
            process.kill()
            raise
        complaints.seek(0)
        complaint = complaints.read()
    if folder is not None and process.returncode == 0:
        return Path(folder)
    if error is None:
        last = complaint.strip().rpartition("\n")[2]
        error = f"{model}: the download ended with exit code {process.returncode}: {last}"
    raise MakingError(error)


def cached(model: str, env: Mapping[str, str] = os.environ) -> Path | None:
    """The folder of a model that the client has in its cache, as far as it is there; nothing is fetched."""
    home = env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    place = Path(env.get("HF_HUB_CACHE") or Path(home) / "hub") / f"models--{model.replace('/', '--')}"
    try:
        revision = (place / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    folder = place / "snapshots" / revision
    return folder if (folder / "config.json").is_file() else None
