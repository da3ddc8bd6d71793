"""Measure configurations one after the other, cell by cell, each stored as soon as it is there."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from engines import hardware, launch
from engines.bench import load as loads
from engines.bench import memory, perplexity
from engines.bench.configurations import Configuration
from engines.bench.load import GeneratorError, Load
from engines.bench.memory import Peak
from engines.bench.results import TEXTS, Host, Measured, Memory, Results
from engines.hardware import Machine
from engines.integrity import IntegrityError
from engines.launch import Child, EngineProbe, Launcher, ProbeError, StartError
from engines.making import MakingError, Progress

if TYPE_CHECKING:
    import httpx2

START = 1800.0
STOP = 8.0
_UNKNOWN = "b0-unknown"
"""A llama-server that was compiled outside of llama.cpp's repository."""
_TAKEN = "is not measured: another process answers on its port"
WARM_UP = 4
"""Requests before the first that counts: kernels are chosen when a size is first met."""


@dataclass(frozen=True, slots=True)
class Bench:
    """One run. `python` is that of an environment with vLLM, whose load generator is used; `logs` is a folder
    and `save` is called after every cell."""

    configurations: Sequence[Configuration]
    results: Results
    python: Path
    logs: Path
    launcher: Launcher
    save: Callable[[], None]
    progress: Progress

    async def measure(self) -> None:
        """Fill in what the results lack. Where a configuration fails, its row says why and the next is
        measured. Raises GeneratorError."""
        missing = [c for c in self.configurations if not self._row(c).complete(self.results.workload)]
        if missing:
            async with loads.generator(self.python, self.logs) as load:
                for configuration in missing:
                    await self._try(configuration, load)

    def _row(self, configuration: Configuration) -> Measured:
        row = self.results.of(configuration.key)
        assert row is not None
        return row

    def _tell(self, configuration: Configuration, what: str) -> None:
        rows = [self._row(one) for one in self.configurations]
        done = sum(len(row.speeds) + len(row.scores) for row in rows)
        total = len(rows) * self.results.workload.cells
        self.progress(f"{configuration.title}: {what}", done, total)

    async def _try(self, configuration: Configuration, load: Load) -> None:
        import httpx2

        row = self._row(configuration)
        row.problem = ""
        try:
            await self._one(configuration, row, load)
        except StartError as error:
            row.problem = f"{error.what}: {' '.join(error.lines)} (log: {error.log})"
        except GeneratorError:
            raise
        except (MakingError, IntegrityError) as error:
            row.problem = str(error)
        except httpx2.HTTPError as error:
            row.problem = f"the server broke off: {type(error).__name__} {error}".strip()
        self.save()

    async def _one(self, configuration: Configuration, row: Measured, load: Load) -> None:
        self._tell(configuration, "starting")
        read, kind = _reader(configuration)
        await configuration.check()
        began = time.monotonic()
        async with (
            _running(configuration, self.logs / f"{configuration.key}.log", self.launcher) as child,
            launch.client(configuration.url) as client,
        ):
            row.start_seconds = time.monotonic() - began
            row.engine = await _version(client, configuration)
            peak = Peak(partial(read, child.pid), row.memory.peak if row.memory else 0)
            async with peak.watching():
                await self._score(configuration, row, client)
            await self._time(configuration, row, load, peak, kind)

    async def _score(self, configuration: Configuration, row: Measured, client: httpx2.AsyncClient) -> None:
        limit = self.results.workload.scored
        for text in TEXTS:
            if text not in row.scores:
                self._tell(configuration, f"perplexity of {text}")
                row.scores[text] = await perplexity.score(
                    client, configuration.dialect, configuration.served, text, limit
                )
                self.save()

    async def _time(
        self, configuration: Configuration, row: Measured, load: Load, peak: Peak, kind: str
    ) -> None:
        workload = self.results.workload
        to = (configuration.url, configuration.served, configuration.tokenizer, workload)
        self._tell(configuration, "warming up")
        await load.run(loads.arguments(*to, requests=WARM_UP, level=WARM_UP))
        for level in workload.levels:
            if level not in row.speeds:
                self._tell(configuration, f"{level} at a time")
                order = loads.arguments(*to, requests=workload.requests(level), level=level)
                async with peak.watching():
                    row.speeds[level] = loads.speed(await load.run(order))
                row.memory = Memory(peak.bytes, configuration.files, kind)
                self.save()
        self._tell(configuration, "done")


@contextlib.asynccontextmanager
async def _running(configuration: Configuration, log: Path, launcher: Launcher) -> AsyncIterator[Child]:
    """The server, ready; ended at the end. Raises StartError."""
    launch.rotate(log)
    child = await launcher.start(configuration.command, log)
    probe = EngineProbe(configuration.url, configuration.served)
    try:
        try:
            await launch.wait_ready(child, probe, timeout=START, on_warming=lambda: None, sleep=asyncio.sleep)
        except (ProbeError, TimeoutError) as error:
            raise _start_error(configuration, str(error), log) from None
        except ChildProcessError as error:
            raise _start_error(configuration, launch.describe_exit(int(error.args[0])), log) from None
        if not memory.listens(child.pid, configuration.port):
            raise _start_error(configuration, f"{_TAKEN} {configuration.port}", log)
        yield child
    finally:
        await launch.stop(child, STOP)


def _start_error(configuration: Configuration, what: str, log: Path) -> StartError:
    return StartError(configuration.title, what, log, launch.telling_lines(launch.tail(log)))


def _reader(configuration: Configuration) -> tuple[Callable[[int], int], str]:
    """How to read what the server holds: of its processes, or of the GPU since before it was started."""
    index = configuration.gpu
    if index is None:
        return memory.resident, "resident"
    before = _used(index)
    return lambda _pid: _used(index) - before, "GPU"


def _used(index: int) -> int:
    return sum(gpu.total - gpu.free for gpu in hardware.look().gpus if gpu.index == index)


async def _version(client: httpx2.AsyncClient, configuration: Configuration) -> str:
    """What the server says of itself; only the program's name where it does not."""
    props = configuration.dialect == "llama.cpp"
    reply = await client.get("/props" if props else "/version")
    told = reply.json().get("build_info" if props else "version", "") if reply.status_code == 200 else ""
    return configuration.engine if told in ("", _UNKNOWN) else f"{configuration.engine} {told}"


def host(machine: Machine, system: str) -> Host:
    """`system` names kernel and Python."""
    return Host(
        processor=machine.processor or machine.architecture,
        cores=len(machine.cpus),
        memory=machine.memory,
        gpus=tuple(f"{gpu.name}, {hardware.gib(gpu.total)}" for gpu in machine.gpus),
        system=system,
    )
