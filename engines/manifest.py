"""The sha256 of every file of a model folder, in its `manifest.json`: written once, checked on demand."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

NAME = "manifest.json"


class ManifestError(Exception):
    """The folder has no readable manifest."""


def write(folder: Path) -> Path:
    """Write the manifest of what is in the folder now: the last file, whose presence means completeness."""
    files = {
        name: {"size": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
        for name in _names(folder)
    }
    beside = folder / f".{NAME}.tmp"
    beside.write_text(json.dumps({"version": 1, "files": files}, indent=2) + "\n", encoding="utf-8")
    return beside.replace(folder / NAME)


def complete(folder: Path) -> bool:
    """Whether every file of the manifest is there with its size: what is asked at each start."""
    try:
        files = read(folder)
    except ManifestError:
        return False
    return all(not problem for problem in (_missing(folder, name, size) for name, (size, _) in files.items()))


def problems(folder: Path) -> list[str]:
    """Everything in which the folder differs from its manifest, every byte read. Raises ManifestError."""
    files = read(folder)
    found = []
    for name, (size, digest) in files.items():
        missing = _missing(folder, name, size)
        if missing:
            found.append(missing)
        elif sha256(folder / name) != digest:
            found.append(f"{name} has other contents than when it was made")
    found += [f"{name} is not in the manifest" for name in _names(folder) if name not in files]
    return found


def read(folder: Path) -> dict[str, tuple[int, str]]:
    """Name -> size in bytes and sha256. Raises ManifestError."""
    path = folder / NAME
    try:
        files = json.loads(path.read_bytes())["files"]
        return {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in files.items()}
    except FileNotFoundError:
        raise ManifestError(f"{folder} has no {NAME}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ManifestError(f"{path} is not readable: {error}") from error


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _names(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        if (path.is_file() or path.is_symlink()) and path.name not in (NAME, f".{NAME}.tmp"):
            yield path.relative_to(folder).as_posix()


def _missing(folder: Path, name: str, size: int) -> str | None:
    path = folder / name
    if path.is_symlink() or not path.is_file():
        return f"{name} is missing"
    found = path.stat().st_size
    return None if found == size else f"{name} has {found} bytes, not {size}"
