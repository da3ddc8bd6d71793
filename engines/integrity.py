"""Whether an engine may open its model: asked before each of its starts, of the very folder it will open.

What is in the folder (`contents`), whether it is what its manifest says and the manifest the one that is
pinned, and, where a public key is given, whether its owner signed all of it. Fails closed: what cannot be
read is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines import contents, gguf, manifest, signing

_GIT, _LFS = 40, 64
_HEX = re.compile(r"[0-9a-f]+")


class IntegrityError(Exception):
    """A model that is not opened; `problems` says each reason."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(problems))


@dataclass(frozen=True, slots=True)
class Expected:
    """What an operator asks of a model. `pinned` is a manifest's `sha256:…`; `public_key` that of whoever
    signs models, `python` the environment that checks signatures."""

    args: tuple[str, ...] = ()
    allow: frozenset[str] = frozenset()
    pinned: str | None = None
    manifest_required: bool = False
    public_key: Path | None = None
    python: Path | None = None


class Checker:
    """The checks of one engine's model, a folder or a GGUF file, over all its starts.

    Every byte is read before the first start. Before a restart, as long as no file changed since (by inode,
    size and the times of change, the second of which a program cannot set), nothing is read again.
    """

    def __init__(self, model: Path, expected: Expected) -> None:
        self._model = model
        self._folder = model if model.is_dir() else model.parent
        self._expected = expected
        self._digest: str | None = None
        self._named: dict[Path, str] | None = None
        self._passed: tuple[object, ...] | None = None

    async def check(self) -> None:
        """Raises IntegrityError. Cancelled, it stops reading soon."""
        stop = threading.Event()
        try:
            await asyncio.to_thread(self.check_now, stop)
        except asyncio.CancelledError:
            stop.set()
            raise

    def check_now(self, stop: threading.Event | None = None) -> None:
        """Raises IntegrityError, and StoppedError soon after `stop` is set."""
        try:
            self._model.stat()
            stamp = _stamp([*self._opened(), *contents.named(self._expected.args)])
            problems = [] if stamp == self._passed else list(self._problems(stop))
        except OSError as error:
            raise IntegrityError(
                [f"{error.filename or self._folder} cannot be read: {error.strerror}"]
            ) from None
        self._passed = None if problems else stamp
        if problems:
            raise IntegrityError(problems)

    def _opened(self) -> list[Path]:
        """What the engine opens, or a manifest tells of: of a GGUF file's folder without one, that file."""
        if self._model.is_dir() or (self._folder / manifest.NAME).exists():
            return sorted(self._folder.rglob("*"))
        return gguf.parts(self._model)

    def _problems(self, stop: threading.Event | None) -> Iterator[str]:
        expected = self._expected
        yield from contents.problems(self._model, expected.args, expected.allow)
        yield from self._manifest(stop)
        yield from self._changed(stop)
        if expected.public_key is not None and expected.python is not None:
            try:
                signing.verify(self._folder, expected.public_key, python=expected.python, stop=stop)
            except signing.SigningError as error:
                yield str(error)

    def _changed(self, stop: threading.Event | None) -> Iterator[str]:
        """No manifest tells of files that the arguments name: they stay as they were at the first start."""
        now = {path: manifest.sha256(path, stop) for path in contents.named(self._expected.args)}
        before = self._named = now if self._named is None else self._named
        for path in dict.fromkeys((*before, *now)):
            if before.get(path) != now.get(path):
                yield f"{path} (of `args`) is not what it was when the engine was started first"

    def _manifest(self, stop: threading.Event | None) -> Iterator[str]:
        folder, expected = self._folder, self._expected
        found = manifest.digest(folder)
        wanted = expected.pinned or self._digest
        if found is None:
            if wanted or expected.manifest_required:
                yield f"{folder} has no {manifest.NAME}: `dualgauge models manifest {folder}` writes one"
            else:
                yield from _cache_problems(folder, self._opened(), stop)
            return
        if wanted is not None and found != wanted:
            whose = "the configuration pins" if expected.pinned else "it had when it was started first"
            yield f"{folder / manifest.NAME} is {found}, not {wanted}, which {whose}"
        try:
            problems = manifest.problems(folder, stop)
        except manifest.ManifestError as error:
            problems = [str(error)]
        yield from problems
        if not problems:
            self._digest = self._digest or found


def _cache_problems(folder: Path, paths: Sequence[Path], stop: threading.Event | None) -> Iterator[str]:
    """In the hub's cache, links lead to files that are named by their own hash: sha256 for large ones, else
    that of git (https://git-scm.com/book/en/v2/Git-Internals-Git-Objects)."""
    blobs = folder.parent.parent / "blobs"
    for path in paths:
        if not path.is_symlink():
            continue
        name = path.relative_to(folder).as_posix()
        blob = path.resolve()
        if blob.parent != blobs.resolve():
            yield f"{name} is a link that leads out of the model's folder, to {blob}"
        elif _HEX.fullmatch(blob.name) and len(blob.name) in (_GIT, _LFS):
            if len(blob.name) == _LFS:
                actual = manifest.sha256(blob, stop)
            else:
                head = b"blob %d\0" % blob.stat().st_size
                actual = manifest.file_hash(blob, hashlib.sha1(head, usedforsecurity=False), stop)
            if actual != blob.name:
                yield f"{name} is not what was downloaded: its hash is {actual}, not {blob.name}"


def _stamp(paths: Sequence[Path]) -> tuple[object, ...]:
    """Changes with any change of one of these files; the target of a link counts as the file."""
    found: list[object] = []
    for path in paths:
        at = path.stat()
        found.append((str(path), at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns))
    return tuple(found)
