"""One process of ours: start it under a keeper, wait until it serves, stop it, say why it died.

`Launcher` and `Child` are the seam: supervision and its tests need no real process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engines import launch_child, runfile
from engines.address import Address
from engines.spec import bearer

if TYPE_CHECKING:
    import httpx2

HEALTH_EVERY = 0.25
TAKEN_TIMEOUT = 1.0
WARM_UP_TIMEOUT = 180.0
TAIL = 256 * 1024
AGAIN = "--- started again ---\n"

Sleep = Callable[[float], Awaitable[None]]


class StartError(Exception):
    """A process that did not come up. `lines` are the telling ones of its log."""

    def __init__(self, name: str, what: str, log: Path, lines: Sequence[str] = ()) -> None:
        self.name = name
        self.what = what
        self.log = log
        self.lines = tuple(lines)
        super().__init__(f"{name} {what}")


@dataclass(frozen=True, slots=True)
class Command:
    """What to run: `env` is the whole environment of the process."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


class Child(Protocol):
    """A running program, with everything that it started."""

    @property
    def pid(self) -> int: ...

    @property
    def keeper(self) -> runfile.Process: ...

    async def wait(self) -> int:
        """Its exit code; 128 + signal where one ended it. May be awaited by several at a time."""

    def terminate(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """End it and all that it started, at once."""


class Launcher(Protocol):
    async def start(self, command: Command, log: Path) -> Child: ...


class KeptChild:
    """A program under its keeper (`launch_child`); `control` is our end of the keeper's socket."""

    def __init__(self, keeper: asyncio.subprocess.Process, pid: int, control: socket.socket) -> None:
        self._keeper = keeper
        self._control = control
        self._pid = pid
        self._identity = runfile.process(keeper.pid)

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def keeper(self) -> runfile.Process:
        return self._identity

    async def wait(self) -> int:
        code = await self._keeper.wait()
        self._control.close()
        return code if code >= 0 else 128 - code

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._keeper.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._control.send(b"K")


class ProcessLauncher:
    """Starts real processes. Their output is appended to the log, after a line `AGAIN` where it has some."""

    async def start(self, command: Command, log: Path) -> KeptChild:
        log.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        script = str(Path(launch_child.__file__))
        try:
            with log.open("ab") as output:
                if output.tell() > 0:
                    output.write(AGAIN.encode())
                    output.flush()
                keeper = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", script, str(theirs.fileno()), *command.argv),
                    env=dict(command.env),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            theirs.close()
            ours.setblocking(False)
            answer = await asyncio.get_running_loop().sock_recv(ours, 32)
        except BaseException:
            ours.close()
            theirs.close()
            raise
        return KeptChild(keeper, int(answer or b"0"), ours)


async def taken(url: str) -> bool:
    """Whether some process accepts connections there already."""
    address = Address.parse(url)
    try:
        async with asyncio.timeout(TAKEN_TIMEOUT):
            if address.uds is not None:
                _, writer = await asyncio.open_unix_connection(address.uds)
            else:
                _, writer = await asyncio.open_connection(address.host, address.port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def rotate(log: Path) -> None:
    """Keep the previous run's log as `.1`."""
    with contextlib.suppress(FileNotFoundError):
        log.replace(log.with_name(log.name + ".1"))


@dataclass(frozen=True, slots=True)
class Proof:
    """What was found out about a process that may serve; `warnings` ask for somebody to act."""

    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class Probe(Protocol):
    async def healthy(self) -> bool: ...

    async def warm_up(self) -> Proof:
        """Do real pieces of work; raises ProbeError."""

    async def close(self) -> None: ...


class ProbeError(Exception):
    """The process answers, but not as it should."""


def client(url: str) -> httpx2.AsyncClient:
    """A client for one engine's or gateway's own address (`http://…` or `unix:/path`), proxies left out."""
    import httpx2

    if url.startswith("unix:"):
        transport = httpx2.AsyncHTTPTransport(uds=url.removeprefix("unix:"))
        return httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=5.0)
    return httpx2.AsyncClient(base_url=url, timeout=5.0, trust_env=False)


class EngineProbe:
    """`/health`, then one short completion, then what `prove` asks for."""

    def __init__(
        self,
        url: str,
        served_model: str,
        api_key: str | None = None,
        prove: Callable[[httpx2.AsyncClient], Awaitable[Proof]] | None = None,
    ) -> None:
        self._client = client(url)
        self._model = served_model
        self._headers = bearer(api_key)
        self._prove = prove

    async def healthy(self) -> bool:
        import httpx2

        try:
            return (await self._client.get("/health")).status_code == 200
        except httpx2.HTTPError:
            return False

    async def warm_up(self) -> Proof:
        import httpx2

        body = {"model": self._model, "prompt": "The capital of France is", "max_tokens": 4}
        try:
            reply = await self._client.post(
                "/v1/completions", json=body, headers=self._headers, timeout=WARM_UP_TIMEOUT
            )
        except httpx2.HTTPError as error:
            raise ProbeError(
                f"the warm-up completion failed: {type(error).__name__} {error}".strip()
            ) from None
        if reply.status_code == 404 and "does not exist" not in reply.text:
            return Proof()  # serves no completions (an embedding model): that it answers is all to know
        if reply.status_code != 200:
            raise ProbeError(f"the warm-up completion got {reply.status_code}: {reply.text[:300]}")
        return Proof() if self._prove is None else await self._prove(self._client)

    async def close(self) -> None:
        await self._client.aclose()


class HealthProbe:
    """A GET of one path that answers 200; nothing to warm up."""

    def __init__(self, url: str, path: str) -> None:
        self._client = client(url)
        self._path = path

    async def healthy(self) -> bool:
        import httpx2

        try:
            return (await self._client.get(self._path)).status_code == 200
        except httpx2.HTTPError:
            return False

    async def warm_up(self) -> Proof:
        return Proof()

    async def close(self) -> None:
        await self._client.aclose()


async def wait_ready(
    child: Child, probe: Probe, *, timeout: float, on_warming: Callable[[], None], sleep: Sleep
) -> Proof:
    """Return once the process is healthy and has done its first work.

    Raises ProbeError where the work fails, TimeoutError after `timeout` seconds, ChildProcessError with the
    exit code where the process ends first.
    """

    async def serve() -> Proof:
        waited = 0.0
        while not await probe.healthy():
            if waited >= timeout:
                raise TimeoutError(f"no answer within {timeout:.0f} s")
            await sleep(HEALTH_EVERY)
            waited += HEALTH_EVERY
        on_warming()
        return await probe.warm_up()

    serving = asyncio.ensure_future(serve())
    ended = asyncio.ensure_future(child.wait())
    try:
        await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            raise ChildProcessError(ended.result())
        return serving.result()
    finally:
        for task in (serving, ended):
            task.cancel()
        await asyncio.gather(serving, ended, return_exceptions=True)
        await probe.close()


async def stop(child: Child, grace: float) -> int:
    """Ask the process to end, kill it after `grace` seconds; returns its exit code."""
    child.terminate()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace):
            return await child.wait()
    child.kill()
    return await child.wait()


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code <= 128:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(code - 128).name
    except ValueError:
        return f"ended with exit code {code}"
    hint = " (out of memory, perhaps: see `dmesg`)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"


# "(EngineCore pid=123) ERROR 11-30 09:35:01 [core.py:1021] " and the like in front of what was said
_PREFIX = re.compile(r"^(?:\([^)]*pid=\d+\)\s*)?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d (?:\[[^\]]*\]\s?)?)?")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt)\b(?::|$)")
_COMPLAINT = re.compile(r"\b[Ee]rror: \S|^cannot run |\bKilled\b|[Oo]ut of memory|No space left on device")
_NOISE = re.compile(
    r"^nanobind: | - leaked | - \.\.\. skipped|refleaks|UserWarning"
)  # at every exit of a vLLM
_CONSEQUENCE = ("Engine core initialization failed", "Engine process failed to start", "leaked")


def strip_prefix(line: str) -> str:
    """A log line without process, level, time and source."""
    return _PREFIX.sub("", line)


def telling_lines(text: str, count: int = 4) -> tuple[str, ...]:
    """Why a process died, from the end of its log: the last exception that is no mere consequence of another.

    Without one: the last complaint, or the last lines that are there.
    """
    lines = [strip_prefix(line.rstrip()) for line in text.splitlines()]
    for pattern in (_EXCEPTION, _COMPLAINT):
        for at in range(len(lines) - 1, -1, -1):
            if pattern.search(lines[at]) and not any(part in lines[at] for part in _CONSEQUENCE):
                return _message(lines[at:], count)
    return tuple(line for line in lines if line.strip() and not _NOISE.search(line))[-count:]


_ENDS = ("Traceback", "During handling", "The above", "[rank", "    For further")


def _message(lines: Sequence[str], count: int) -> tuple[str, ...]:
    """The line and those that go on with it: up to an empty one or the next traceback."""
    kept = [lines[0]]
    for line in lines[1:count]:
        if not line.strip() or line.startswith(_ENDS):
            break
        kept.append(line)
    return tuple(line[:500] for line in kept)


def tail(log: Path, size: int = TAIL) -> str:
    """The end of a log, of its latest start; empty where there is none."""
    try:
        with log.open("rb") as handle:
            handle.seek(0, os.SEEK_END)
            handle.seek(max(0, handle.tell() - size))
            return handle.read().decode("utf-8", "replace").rpartition(AGAIN)[2]
    except OSError:
        return ""
