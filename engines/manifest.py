"""The sha256 of every file of a model folder, and its chat templates, in its `manifest.json`.

Written once, checked before an engine opens the folder. A manifest tells what has changed; who wrote it, only
a signature over the folder tells (`engines.signing`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engines import changes, gguf, templates

NAME = "manifest.json"
SIGNATURE = "model.sig"
VERSION = 2
READ = 4 << 20
READERS = 4
_OURS = frozenset({NAME, f".{NAME}.tmp", SIGNATURE})
_SHOWN = 12


class ManifestError(Exception):
    """The folder has no readable manifest, or cannot get one."""


class StoppedError(Exception):
    """Reading ended because nobody waits for it any more."""


def sha256(path: Path, stop: threading.Event | None = None) -> str:
    """In hex. Raises StoppedError soon after `stop` is set."""
    return file_hash(path, hashlib.sha256(), stop)


def file_hash(path: Path, hash_: hashlib._Hash, stop: threading.Event | None = None) -> str:
    """The hash of a file's bytes, added to what `hash_` has already. Raises StoppedError."""
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(READ)
        view = memoryview(buffer)
        while size := file.readinto(buffer):
            if stop is not None and stop.is_set():
                raise StoppedError
            hash_.update(view[:size])
    return hash_.hexdigest()


def write(folder: Path) -> Path:
    """Write the manifest of what is in the folder now: the last file, whose presence means completeness.

    Raises ManifestError where there is no file, one is a link (its target can change without the folder) or
    cannot be read, and where the manifest cannot be written; then there is none that is half written.
    """
    names = list(_names(folder))
    if not names:
        raise ManifestError(f"{folder} holds no files: a manifest of nothing would vouch for nothing")
    links = [name for name in names if (folder / name).is_symlink()]
    if links:
        raise ManifestError(
            f"{folder}: {links[0]} is a link; copy the files themselves first: cp -rL FROM TO"
        )
    try:
        manifest = {
            "version": VERSION,
            "files": {
                name: {"size": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
                for name in names
            },
            "chat_templates": {
                name: {"sha256": _digest(text), "text": text} for name, text in chat_templates(folder).items()
            },
        }
    except (gguf.GGUFError, templates.TemplateError) as error:
        raise ManifestError(str(error)) from error
    except OSError as error:
        raise ManifestError(f"{error.filename or folder} cannot be read: {error.strerror}") from error
    beside = folder / f".{NAME}.tmp"
    try:
        beside.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        return beside.replace(folder / NAME)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise ManifestError(f"{folder / NAME} cannot be written: {error.strerror}") from error


def chat_templates(folder: Path) -> dict[str, str]:
    """By name, of a checkpoint's files and of its GGUF files. Raises GGUFError, TemplateError."""
    found = templates.of_folder(folder)
    for path in sorted(folder.glob("*.gguf")):
        found |= gguf.read(path).templates
    return found


def complete(folder: Path) -> bool:
    """Whether every file of the manifest is there with its size, which is seen at once."""
    try:
        files = read(folder)
    except ManifestError:
        return False
    return all(not problem for problem in (_missing(folder, name, size) for name, (size, _) in files.items()))


def digest(folder: Path) -> str | None:
    """`sha256:` and the hash of the manifest itself, which stands for the whole folder; None without one."""
    try:
        return f"sha256:{sha256(folder / NAME)}"
    except OSError:
        return None


def problems(folder: Path, stop: threading.Event | None = None) -> list[str]:
    """Everything in which the folder differs from its manifest, every byte read.

    Raises ManifestError, and StoppedError soon after `stop` is set.
    """
    files = read(folder)

    def changed(name: str) -> str | None:
        size, expected = files[name]
        missing = _missing(folder, name, size)
        if missing:
            return missing
        actual = sha256(folder / name, stop)
        shown = f"sha256 {actual[:_SHOWN]}…, not {expected[:_SHOWN]}…"
        return None if actual == expected else f"{name} has other contents than when it was made: {shown}"

    with ThreadPoolExecutor(READERS) as pool:  # hashing lets go of the interpreter's lock
        found = [problem for problem in pool.map(changed, files) if problem]
    found += [f"{name} is not in the manifest" for name in _names(folder) if name not in files]
    return found + _template_problems(folder)


def read(folder: Path) -> dict[str, tuple[int, str]]:
    """Name -> size in bytes and sha256. Raises ManifestError."""
    manifest = _load(folder)
    try:
        return {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ManifestError(
            f"{folder / NAME} is no manifest: it needs `files`, and `size` and `sha256` of each"
        ) from error


def _load(folder: Path) -> dict[str, Any]:
    path = folder / NAME
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ManifestError(f"{folder} has no {NAME}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ManifestError(f"{path} is not readable: {error}") from error
    if not isinstance(manifest, dict):
        raise ManifestError(f"{path} is not readable: it holds no object")
    return manifest


def _template_problems(folder: Path) -> list[str]:
    """Templates that are not the pinned ones, with the lines that differ. The files they are in differ too:
    this is what that means for prompts."""
    pinned = _load(folder).get("chat_templates")
    if not isinstance(pinned, dict):
        return []  # of version 1: the files' own hashes pin them
    try:
        actual = chat_templates(folder)
    except (gguf.GGUFError, templates.TemplateError) as error:
        return [str(error)]
    found = []
    for name in sorted(pinned.keys() | actual.keys()):
        before = pinned.get(name)
        if name not in actual:
            found.append(f"the chat template `{name}` is missing")
        elif not isinstance(before, dict):
            found.append(f"the chat template `{name}` is not in the manifest")
        elif before.get("sha256") != _digest(actual[name]):
            shown = "".join(
                f"\n      {line}" for line in changes.lines(str(before.get("text")), actual[name])
            )
            found.append(f"the chat template `{name}` is another:{shown}")
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _names(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if (path.is_file() or path.is_symlink()) and name not in _OURS:
            yield name


def _missing(folder: Path, name: str, size: int) -> str | None:
    path = folder / name
    if path.is_symlink() or not path.is_file():
        return f"{name} is missing"
    found = path.stat().st_size
    return None if found == size else f"{name} has {found} bytes, not {size}"
