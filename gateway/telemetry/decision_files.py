"""The files of a decision log: `PATH`, which is written, and older ones, of which `PATH.1` is the newest. An
operator may compress any of these, to `PATH.2.gz`. Where several processes write at the same time, each has a
log of its own: the second beside `decisions.jsonl` is `decisions-2.jsonl`."""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

MAX_LINE = 1 << 20
MOST = 64
"""Processes that may write beside each other."""
_BLOCK = 1 << 16


class Placed(NamedTuple):
    """A line and where it stands; `data` is None where the file cannot be read on, for the reason `why`."""

    file: Path
    number: int
    data: bytes | None
    why: str = ""


def older(path: Path) -> list[tuple[int, Path]]:
    """The rotated files that there are, with their numbers, from the oldest to the newest."""
    name = re.compile(rf"{re.escape(path.name)}\.([1-9][0-9]{{0,8}})(?:\.gz)?")
    try:
        names = os.listdir(path.parent)  # noqa: PTH208 - iterdir is no better, and slower
    except OSError:
        return []
    found = [(int(match[1]), path.parent / match[0]) for match in map(name.fullmatch, names) if match]
    return sorted(found, key=lambda pair: (-pair[0], str(pair[1])))


def names(path: Path) -> list[Path]:
    """The paths of the logs that several processes may write."""
    return [path, *(path.with_name(f"{path.stem}-{number}{path.suffix}") for number in range(2, MOST + 1))]


def logs(path: Path) -> list[list[Path]]:
    """The files of each process that has written, in the order in which it has."""
    found = ([*(file for _, file in older(one)), *([one] if one.exists() else [])] for one in names(path))
    return [files for files in found if files]


def whole(path: Path) -> list[Path]:
    """All files of the log at `path`, each process's in the order in which they were written."""
    return [file for files in logs(path) for file in files]


def lines(files: list[Path], progress: Callable[[int], None]) -> Iterator[Placed]:
    """The lines of these files. `progress` hears how many bytes of the files have been read.

    All are opened at once: a rotation meanwhile gives them other names, and changes nothing of what is read.
    """
    before = 0
    with contextlib.ExitStack() as stack:
        opened: list[tuple[Path, IO[bytes]]] = []
        for file in files:
            try:
                opened.append((file, stack.enter_context(file.open("rb"))))
            except OSError as error:
                yield Placed(file, 1, None, _said(error))
        for file, raw in opened:
            number, stream = 0, raw
            if file.suffix == ".gz":
                stream = gzip.GzipFile(fileobj=raw)  # type: ignore[assignment]
            try:
                while data := stream.readline(MAX_LINE):
                    number += 1
                    if not number & 0xFFF:
                        progress(before + raw.tell())
                    if data[-1:] != b"\n" and len(data) == MAX_LINE:
                        _skip_line(stream)
                    yield Placed(file, number, data)
            except (OSError, EOFError, zlib.error) as error:
                yield Placed(file, number + 1, None, _said(error))
            before += raw.tell()
            raw.close()
    progress(before)


def _skip_line(stream: IO[bytes]) -> None:
    while data := stream.readline(_BLOCK):
        if data[-1:] == b"\n":
            return


def _said(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def backwards(files: list[Path]) -> Iterator[bytes]:
    """The lines of these files from the last to the first, compressed ones left out. Raises OSError."""
    for file in reversed(files):
        # A rotation meanwhile may have taken away the oldest.
        with contextlib.suppress(FileNotFoundError):
            if file.suffix != ".gz":
                with file.open("rb") as raw:
                    yield from _backwards(raw)


def _backwards(raw: IO[bytes]) -> Iterator[bytes]:
    at, rest = raw.seek(0, os.SEEK_END), b""
    while at:
        size = min(_BLOCK, at)
        at -= size
        raw.seek(at)
        first, *others = (raw.read(size) + rest).split(b"\n")
        yield from (line for line in reversed(others) if line)
        rest = first if len(first) < MAX_LINE else b""
    if rest:
        yield rest
