"""Lines of an engine's log that mean trouble while it serves on, and what to do about each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engines.launch import strip_prefix

CHUNK = 4 << 20
"""Bytes of a log that are read at one look; what is more waits for the next."""
LONGEST = 64 << 10
SHOWN = 160


@dataclass(frozen=True, slots=True)
class Trouble:
    """`sign` is what the line holds. `advice` says what it means and what helps."""

    name: str
    sign: re.Pattern[str]
    advice: str


TROUBLES = (
    Trouble(
        "slow AWQ kernels",
        re.compile(r"[Ff]alling back to unoptimized AWQ kernels|awq quantization is not fully optimized"),
        "4 bits are slower than they could be: take `--quantization awq` out of its `args`, or take a "
        "checkpoint that Marlin kernels can run (groups of 128, 64 or 32; compute capability 8.0)",
    ),
    Trouble(
        "preemption",
        re.compile(r"Preemptions: [1-9]|is preempted by|Preempted request|PreemptionMode"),
        "its KV cache is too small for what runs at once, requests are computed twice: lower --max-num-seqs "
        "in its `args`, or raise its `share`",
    ),
    Trouble(
        "out of memory",
        re.compile(r"OutOfMemoryError|CUDA out of memory|HIP out of memory|CUBLAS_STATUS_ALLOC_FAILED"),
        "lower its `share`, or --max-num-seqs in its `args`; see with nvidia-smi who else uses the GPU",
    ),
    Trouble(
        "CUDA error",
        re.compile(
            r"CUDA error|CUDA driver error|illegal memory access|device-side assert|NCCL error|\bXid\b"
        ),
        "the GPU or its driver failed: see `dmesg`; where it comes again, restart the machine",
    ),
    Trouble(
        "broken numbers",
        re.compile(r"Corrupted: [1-9]\d* reqs|\b[Nn]a[Nn]s? (?:detected|found) in (?:the )?logits"),
        "some replies are gibberish: restart the engine, and check its folder with `dualgauge models verify`",
    ),
)


@dataclass(slots=True)
class _Seen:
    count: int
    line: str


class LogFollower:
    """Reads what a log has got since the last look. One that became shorter was begun anew."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._at = 0
        self._rest = b""
        self._seen: dict[str, _Seen] = {}

    def look(self) -> tuple[str, ...]:
        """All troubles that were seen so far, one text each."""
        for line in self._lines():
            for trouble in TROUBLES:
                if trouble.sign.search(line):
                    before = self._seen.get(trouble.name)
                    text = strip_prefix(line).strip()[:SHOWN]
                    self._seen[trouble.name] = _Seen(1 + (before.count if before else 0), text)
        return tuple(
            f"{trouble.name}{_times(seen.count)}: {trouble.advice}. Its log says: {seen.line}"
            for trouble in TROUBLES
            if (seen := self._seen.get(trouble.name)) is not None
        )

    def _lines(self) -> Iterator[str]:
        """Whole lines only: a line that is still written is looked at when it is there."""
        try:
            with self._log.open("rb") as log:
                if log.seek(0, 2) < self._at:
                    self._at, self._rest = 0, b""
                log.seek(self._at)
                new = log.read(CHUNK)
        except OSError:
            return
        self._at += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        self._rest = self._rest[-LONGEST:]
        for line in lines:
            yield line.decode("utf-8", "replace")


def _times(count: int) -> str:
    return "" if count == 1 else f" ({count:,} times)"
