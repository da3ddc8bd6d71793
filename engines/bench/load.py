"""The load on an engine: `vllm bench serve`, in one process for all runs (`scripts/benchmark/load.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from engines import env_pip
from engines.bench.results import Quantiles, Speed, Workload
from engines.making import MakingError, tail

SCRIPTS = Path(__file__).parents[1] / "scripts"
LOG = "load.log"
_LINE = 1 << 20


def script_environment() -> dict[str, str]:
    """Of a script that an engine environment's Python runs: nothing of it may ask a hub."""
    env = env_pip.clean_environment() | {"PYTHONPATH": str(SCRIPTS), "PYTHONUNBUFFERED": "1"}
    return env | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def arguments(
    url: str, model: str, tokenizer: Path, workload: Workload, *, requests: int, level: int
) -> list[str]:
    """What `vllm bench serve` is told: so many requests, `level` at a time.

    Both make the seed of the prompts, so that no two levels share any: a prefix cache would know them.
    Every request has a connection of its own: llama-server promises to keep them and ends each behind its
    stream, so that another request that is just being sent on it is lost. Asked to close, it says so.
    """
    return [
        *("--base-url", url, "--model", model, "--served-model-name", model, "--tokenizer", str(tokenizer)),
        *("--dataset-name", "random", "--seed", str(1000 * level + requests), "--num-prompts", str(requests)),
        *("--input-len", str(workload.input_tokens), "--output-len", str(workload.output_tokens)),
        *("--max-concurrency", str(level), "--ignore-eos", "--temperature", "0", "--disable-tqdm"),
        *("--header", "Connection=close"),
        *("--ready-check-timeout-sec", "0", "--percentile-metrics", "ttft,itl,e2el"),
        *("--metric-percentiles", "50,90,99"),
    ]


def speed(told: Mapping[str, Any]) -> Speed:
    """From what the tool tells. Raises MakingError where no request was answered."""
    completed, failed = int(told["completed"]), int(told["failed"])
    if not completed:
        raise MakingError(f"none of {failed} requests was answered")

    def quantiles(name: str) -> Quantiles:
        return Quantiles(*(float(told[f"p{part}_{name}_ms"]) for part in (50, 90, 99)))

    return Speed(
        requests=completed + failed,
        failed=failed,
        seconds=float(told["duration"]),
        output=float(told["output_throughput"]),
        total=float(told["total_token_throughput"]),
        latency=quantiles("e2el"),
        ttft=quantiles("ttft"),
        itl=quantiles("itl"),
    )


class GeneratorError(MakingError):
    """The load generator itself is gone: nothing more can be measured."""


class Load:
    """A running load generator; one order at a time."""

    def __init__(self, process: asyncio.subprocess.Process, answers: asyncio.StreamReader, log: Path) -> None:
        self._process = process
        self._answers = answers
        self._log = log
        self._ready = False

    async def run(self, order: list[str]) -> dict[str, Any]:
        """What the tool tells of one run. Raises MakingError, GeneratorError."""
        if not self._ready:
            await self._answer()  # it is there
            self._ready = True
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # its log says why it ended
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            await self._process.stdin.drain()
        return await self._answer()

    async def _answer(self) -> dict[str, Any]:
        line = await self._answers.readline()
        if not line:
            raise GeneratorError(f"the load generator ended:{tail(self._log)}\n  The whole log: {self._log}")
        told: dict[str, Any] = json.loads(line)
        if "error" in told:
            raise MakingError(f"the load generator failed: {told['error']}; its log: {self._log}")
        return told


@contextlib.asynccontextmanager
async def generator(python: Path, logs: Path) -> AsyncIterator[Load]:
    """Start it; it is asked at once and answers when it is there. Ended at the end of the block."""
    log = logs / LOG
    reading, writing = os.pipe()
    env = script_environment() | {"DUALGAUGE_ANSWERS_FD": str(writing)}
    try:
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(str(python), "-P", "-s", "-m", "benchmark.load"),
                env=env,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(writing,),
            )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    answers = asyncio.StreamReader(limit=_LINE)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(answers), os.fdopen(reading, "rb")
    )
    try:
        yield Load(process, answers, log)
    finally:
        transport.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
