"""What the harness runs on and starts: facts of the machine, processes with all they start, C programs."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.figures import Load, load_of, memory_of, stat_of
from engines.bench.results import Spent
from engines.bench.spent import now
from engines.hardware import parse_processor

ROOT = Path(__file__).parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dualgauge-bench"
KEY = "sk-bench"
TICK = os.sysconf("SC_CLK_TCK")
GRACE_SECONDS = 10
# Also where the harness itself is killed.
DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")

WRK = """
wrk.method = "POST"
wrk.headers["content-type"] = "application/json"
wrk.headers["authorization"] = "Bearer {key}"
wrk.body = '{body}'
done = function(seen, latency)
  local e = seen.errors
  io.write(string.format('LOADED {{"requests":%d,"us":%d,"p50":%d,"p99":%d,"errors":{{"connect":%d,"read":%d,"write":%d,"timeout":%d,"status":%d}}}}\\n',
    seen.requests, seen.duration, latency:percentile(50), latency:percentile(99), e.connect, e.read, e.write, e.timeout, e.status))
end
"""


class HarnessError(Exception):
    """Something that whoever runs the harness can mend; the message says how."""


def facts() -> dict[str, Any]:
    """Of this machine, now: nothing that names it."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": parse_processor(Path("/proc/cpuinfo").read_text()) or "?",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load before": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def others(before: Spent) -> float:
    """Cores that others took since then, once all that was started here has ended."""
    spent = now().since(before)
    return spent.others / spent.seconds


def needs(*programs: str) -> None:
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        names = " and ".join(missing)
        packages = " ".join(
            {"redis-server": "redis-server", "gcc": "gcc libc6-dev"}.get(name, name) for name in missing
        )
        raise HarnessError(f"{names} not found on the PATH (Debian: apt-get install {packages})")


def native(name: str) -> Path:
    """A C program of `bench/native`, compiled where it is newer than what was compiled before."""
    needs("gcc")
    source, program = ROOT / "bench" / "native" / f"{name}.c", CACHE / name
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        CACHE.mkdir(parents=True, exist_ok=True)
        fresh = CACHE / f"{name}.{os.getpid()}"
        done = subprocess.run(
            ["gcc", "-O2", "-o", fresh, source], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise HarnessError(f"{source} does not compile: {done.stderr}")
        fresh.replace(program)
    return program


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Process:
    """A program in a session of its own, so that all it starts can be counted and ended with it."""

    def __init__(
        self, command: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = Path(command[0]).name
        self.log = log
        self.started = time.monotonic()
        with log.open("ab") as output:
            self._child = subprocess.Popen(
                [*DIE_WITH_PARENT, *map(str, command)],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **(env or {})},
                cwd=ROOT,
            )
        self.pid = self._child.pid

    def pids(self) -> Iterator[int]:
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    if stat_of((folder / "stat").read_text()).session == self.pid:
                        yield int(folder.name)

    def cpu(self) -> float:
        """Seconds of CPU of the whole tree since its start."""
        ticks = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                ticks += stat_of(Path(f"/proc/{pid}/stat").read_text()).ticks
        return ticks / TICK

    def memory(self) -> tuple[float, float]:
        """(RSS, PSS) of the whole tree in MiB."""
        rss = pss = 0.0
        for pid in self.pids():
            with contextlib.suppress(OSError, ValueError):
                one = memory_of(Path(f"/proc/{pid}/smaps_rollup").read_text())
                rss, pss = rss + one[0], pss + one[1]
        return rss, pss

    def count(self, kind: str) -> int:
        """`fd`s or `task`s of the whole tree."""
        total = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                total += sum(1 for _ in Path(f"/proc/{pid}/{kind}").iterdir())
        return total

    def check(self) -> None:
        """Raises HarnessError where it has ended."""
        if self._child.poll() is not None:
            raise HarnessError(f"{self.name} ended with {self._child.returncode}: {self.told()}")

    def told(self) -> str:
        return self.log.read_text(errors="replace").strip()[-1500:] or "it printed nothing"

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._child.send_signal(number)

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(GRACE_SECONDS)
        for pid in list(self.pids()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._child.wait()


@contextlib.contextmanager
def running(
    command: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None
) -> Iterator[Process]:
    process = Process(command, log, env)
    try:
        yield process
    finally:
        process.stop()


def ask(port: int, path: str, body: bytes | None = None, seconds: float = 30) -> tuple[int, bytes]:
    """(status, body). Raises OSError or http.client.HTTPException."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    try:
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        connection.request("GET" if body is None else "POST", path, body, headers)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def until_answered(
    process: Process, port: int, path: str, body: bytes | None = None, seconds: float = 120
) -> float:
    """Seconds from the process's start to its first 200. Raises HarnessError where there is none."""
    last = "nothing answered"
    while time.monotonic() < process.started + seconds:
        process.check()
        try:
            status, reply = ask(port, path, body)
        except (OSError, http.client.HTTPException) as exc:
            last = repr(exc)
        else:
            if status == 200:
                return time.monotonic() - process.started
            last = f"{status} {reply[:200]!r}"
        time.sleep(0.002)
    raise HarnessError(f"no 200 for {path} in {seconds:.0f} s ({last}): {process.told()}")


class Engines:
    """A fast and an exact one, both `bench/native/engine.c`."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, *options: str) -> None:
        program = native("engine")
        self._options = options
        self._folder = folder
        self._program = program
        self.ports = (free_port(), free_port())
        self._stack = stack
        self._processes = [self._start(port) for port in self.ports]

    def _start(self, port: int) -> Process:
        command = [self._program, str(port), *self._options]
        process = self._stack.enter_context(running(command, self._folder / "engines.log"))
        until_answered(process, port, "/health", seconds=10)
        return process

    def restart(self, which: int, away: float) -> None:
        """Kill one, and start it anew on its port `away` seconds later."""
        self._processes[which].stop()
        time.sleep(away)
        self._processes[which] = self._start(self.ports[which])

    def stats(self) -> dict[str, int]:
        """Of both together; since the last restart."""
        total: dict[str, int] = {}
        for port in self.ports:
            for name, value in json.loads(ask(port, "/stats")[1]).items():
                total[name] = total.get(name, 0) + value
        return total


def wrk(port: int, body: str, connections: int, seconds: float, folder: Path) -> Load:
    """Raises HarnessError where it fails."""
    needs("wrk")
    script = folder / "load.lua"
    script.write_text(WRK.format(key=KEY, body=body))
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    options = [
        "-t1",
        f"-c{connections}",
        f"-d{max(1, round(seconds))}s",
        "--timeout",
        "60s",
        "-s",
        str(script),
        url,
    ]
    done = subprocess.run(["wrk", *options], capture_output=True, text=True, check=False)
    try:
        return load_of(done.stdout)
    except ValueError as exc:
        raise HarnessError(f"{exc} {done.stderr.strip()}") from None


def streams(port: int, count: int, seconds: float, tokens: int, warm: float) -> subprocess.Popen[str]:
    """`bench/native/streams.c`, started; `streamed` awaits what it saw."""
    command = [
        *DIE_WITH_PARENT,
        str(native("streams")),
        str(port),
        str(count),
        str(seconds),
        "--tokens",
        str(tokens),
    ]
    return subprocess.Popen(
        [*command, "--warm", str(warm), "--key", KEY],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def streamed(client: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = client.communicate()
    if client.returncode:
        raise HarnessError(f"streams ended with {client.returncode}: {err.strip()}")
    seen: dict[str, Any] = json.loads(out)
    return seen
