"""A Redis server of a test's own, on a unix socket: what the environment names in `REDIS_SERVER`, else
`redis-server` or `valkey-server` from the PATH. Without any, the tests that need one are skipped."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from redis import Redis

SERVER = os.environ.get("REDIS_SERVER") or shutil.which("redis-server") or shutil.which("valkey-server")
needs_redis = pytest.mark.skipif(
    SERVER is None, reason="no redis-server on the PATH (Debian: apt-get install redis-server)"
)

LAST_PORT = 55_535


def free_port() -> int:
    """One that leaves room for a cluster's own, which is 10,000 above."""
    port = LAST_PORT
    while port >= LAST_PORT:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = int(sock.getsockname()[1])
    return port


class Server:
    """`port` 0: on a unix socket only."""

    def __init__(self, folder: Path, *options: str, port: int = 0) -> None:
        self.folder = folder
        self.port = port
        self.path = folder / "redis.sock"
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0" if self.port else f"unix://{self.path}"

    def client(self) -> Redis:
        return Redis.from_url(self.url, socket_timeout=5)

    def start(self) -> None:
        assert SERVER is not None
        where = ["--port", str(self.port), "--dir", str(self.folder), "--unixsocket", str(self.path)]
        quiet = ["--save", "", "--appendonly", "no", "--logfile", str(self.folder / "redis.log")]
        self._process = subprocess.Popen([SERVER, *where, *quiet, *self._options])
        self.await_answer()

    def await_answer(self) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with contextlib.suppress(Exception), contextlib.closing(self.client()) as client:
                if client.ping():
                    return
            time.sleep(0.01)
        raise AssertionError(f"it does not answer: {(self.folder / 'redis.log').read_text()}")

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """SIGSTOP: it is there, and does not answer."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def read_only(self) -> None:
        """A replica of nobody: it answers, and takes no writes."""
        with contextlib.closing(self.client()) as client:
            client.replicaof("127.0.0.1", "1")

    def writable(self) -> None:
        with contextlib.closing(self.client()) as client:
            client.replicaof("NO", "ONE")

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def server(*options: str, port: int = 0) -> Iterator[Server]:
    """One that answers; killed at the end."""
    with servers(1, options, port=port) as (one,):
        yield one


@contextlib.contextmanager
def servers(count: int, options: Sequence[str] = (), *, port: int = 0) -> Iterator[list[Server]]:
    # A unix socket's path has 107 bytes at most, which a test's own folder may exceed.
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dg-redis-")))
            one = Server(folder, *options, port=port)
            stack.callback(one.close)
            one.start()
            made.append(one)
        yield made
