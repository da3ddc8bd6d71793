"""Engines that somebody else hosts, reached through LiteLLM's SDK: any provider that it knows.

LiteLLM takes seconds to load and milliseconds of CPU for each request, which would delay every token of the
engines beside it. So each hosted engine has a process of its own (`hosted_server`), a child of the gateway,
which speaks OpenAI's and Anthropic's HTTP on a unix socket: to the pipeline it is an engine like any other,
and the byte path knows nothing of it. A client that leaves closes the socket's connection, which cancels the
provider's request.

The provider's key goes to the child by its standard input, where no other process reads it; the end of that
input ends the child, however the gateway ended. Fails towards "not ready": without its child an engine is
down, and the child is started again after 1 s, then 2, 4 … 60. One that hangs is ended, so that it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import shutil
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from engines.spec import EngineSpec

logger = logging.getLogger("dualgauge.engines")

FIRST_DELAY = 1.0
LONGEST_DELAY = 60.0
GRACE = 5.0
LOOK = 5.0
SILENT = 30.0
"""Seconds without an answer of a child that has answered before, after which it hangs."""
LOADING = 180.0
"""Seconds within which the SDK must be loaded."""
PACKAGE = "litellm"
_QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks the network while it is imported
    "LITELLM_LOG": "CRITICAL",
    "LITELLM_MODE": "PRODUCTION",  # else it reads a file `.env` of wherever it stands
}


def missing() -> bool:
    """Whether the package that hosted engines need is not installed; nothing of it is loaded."""
    return importlib.util.find_spec(PACKAGE) is None


def at_sockets(specs: Sequence[EngineSpec], folder: Path) -> tuple[EngineSpec, ...]:
    """The engines as the gateway reaches them: hosted ones on a socket in `folder`, and without their key."""
    return tuple(
        replace(spec, url=f"unix:{_socket(folder, index)}", api_key=None) if spec.kind == "hosted" else spec
        for index, spec in enumerate(specs)
    )


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of an engine's process; `own` is what its operator adds."""
    return {**os.environ, **_QUIET, **own}


def _socket(folder: Path, index: int) -> Path:
    return folder / f"{index}.sock"  # a socket's path has 107 bytes at most


@contextlib.asynccontextmanager
async def running(specs: Sequence[EngineSpec], folder: Path) -> AsyncIterator[None]:
    """Keep the processes of the hosted engines among `specs`; nothing of them is left at the end.

    `folder` must not exist; it is this user's alone. Raises OSError where it cannot be made.
    """
    hosted = [(spec, _socket(folder, index)) for index, spec in enumerate(specs) if spec.kind == "hosted"]
    if not hosted:
        yield
        return
    folder.mkdir(mode=0o700)  # noqa: ASYNC240 - one call at the start
    tasks = [asyncio.create_task(_keep(spec, socket), name=f"hosted {spec.name}") for spec, socket in hosted]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        shutil.rmtree(folder, ignore_errors=True)


async def _keep(spec: EngineSpec, socket: Path) -> None:
    """Start the child again whenever it ends."""
    pause = FIRST_DELAY
    while True:
        socket.unlink(missing_ok=True)  # noqa: ASYNC240 - before a process is started
        began = asyncio.get_running_loop().time()
        try:
            how = await _run(spec, socket)
            logger.warning("the process of engine %s %s", spec.name, how)
        except OSError as error:
            logger.warning("the process of engine %s cannot be started: %s", spec.name, error)
        if asyncio.get_running_loop().time() - began > LONGEST_DELAY:
            pause = FIRST_DELAY
        await asyncio.sleep(pause)
        pause = min(LONGEST_DELAY, pause * 2)


async def _run(spec: EngineSpec, socket: Path) -> str:
    """One life of the child; how it ended. Cancelled, it ends the child."""
    settings = {
        "model": spec.model,
        "api_key": spec.api_key,
        "api_base": spec.api_base,
        "timeout": spec.timeouts.total,
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "engines.hosted_server", str(socket)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        env=environment(spec.env),
    )
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        ended, hung = asyncio.ensure_future(process.wait()), asyncio.ensure_future(_hung(socket))
        try:
            await asyncio.wait({ended, hung}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return f"ended with exit code {ended.result()}"
            process.kill()
            return f"was ended: {hung.result()}"
        finally:
            hung.cancel()
            await asyncio.gather(hung, return_exceptions=True)
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(GRACE):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


async def _hung(socket: Path) -> str:
    """Return why, once the child does not answer any more."""
    clock = asyncio.get_running_loop().time
    last, patience = clock(), LOADING
    while clock() - last < patience:
        if await _answers(socket):
            last, patience = clock(), SILENT
        await asyncio.sleep(LOOK)
    return f"it has not answered for {clock() - last:.0f} s"


async def _answers(socket: Path) -> bool:
    try:
        async with asyncio.timeout(LOOK):
            reader, writer = await asyncio.open_unix_connection(socket)
            try:
                writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                return (await reader.readline()).startswith(b"HTTP/1.1 200")
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
