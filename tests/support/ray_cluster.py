"""A Ray of a test's own, on ports of its own, with Serve behind its HAProxy; told what to do over the
dashboard's HTTP API."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.serving import free_port

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "ray"
MARK = "DUALGAUGE_TEST_RAY"
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="no Ray is installed: pip install -e '.[ray]'"
)


class Cluster:
    """One node. `port` is where Serve's HAProxy listens."""

    def __init__(self, folder: Path, config: Path, env: Mapping[str, str], cpus: int) -> None:
        self.folder = folder
        self.port = lasting_port()
        self._dashboard = free_port()
        self._config = config
        self._mark = uuid.uuid4().hex
        own = {"PYTHONPATH": f"{FOLDER}:{ROOT}", MARK: self._mark}
        self._env = {**os.environ, **shipped(), **proxy(folder), **own, **env}
        self._process = self._start(cpus)

    def _start(self, cpus: int) -> subprocess.Popen[bytes]:
        options = {
            "port": free_port(),
            "dashboard-port": self._dashboard,
            "dashboard-agent-listen-port": free_port(),
            "dashboard-agent-grpc-port": free_port(),
            "runtime-env-agent-port": free_port(),
            "metrics-export-port": free_port(),
            "ray-client-server-port": free_port(),
            "min-worker-port": 20000,
            "max-worker-port": 20999,
            "node-ip-address": "127.0.0.1",
            "num-cpus": cpus,
            "num-gpus": 0,
            "object-store-memory": 200 << 20,
            "temp-dir": self.folder / "ray",
        }
        ray = Path(sys.executable).parent / "ray"
        command = [str(ray), "start", "--head", "--block", "--disable-usage-stats"]
        command += [f"--{name}={value}" for name, value in options.items()]
        with (self.folder / "ray.log").open("w") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=self._env, start_new_session=True)

    def ask(self, path: str, body: object = None) -> Any:
        """The dashboard's answer; a body is put there."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._dashboard}{path}",
            data,
            {"content-type": "application/json"},
            method="GET" if body is None else "PUT",
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.loads(reply.read() or b"null")

    def deploy(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Put the shipped configuration there, with this change."""
        wanted = yaml.safe_load((FOLDER / "serve.yaml").read_text())
        wanted["http_options"] |= {"host": "127.0.0.1", "port": self.port}
        (app,) = wanted["applications"]
        app["args"]["config"] = str(self._config)
        change({one["name"]: one for one in app["deployments"]})
        self.ask("/api/serve/applications/", wanted)

    def deployments(self) -> dict[str, Any]:
        app = self.ask("/api/serve/applications/")["applications"].get("dualgauge", {})
        if app.get("status") == "DEPLOY_FAILED":
            raise AssertionError(f"{app['message']}\n{self.logs()}")
        return dict(app.get("deployments", {}))

    def replicas(self, deployment: str, state: str = "RUNNING") -> dict[str, int]:
        """Replica id -> pid of those in this state."""
        found = self.deployments().get(deployment, {}).get("replicas", [])
        return {one["replica_id"]: one["pid"] for one in found if one["state"] == state}

    def running(self, **wanted: int) -> bool:
        """Whether so many replicas run of each deployment, and no other ones are there."""
        found = self.deployments()
        return all(
            [one["state"] for one in found.get(name, {}).get("replicas", [])] == ["RUNNING"] * count
            for name, count in wanted.items()
        )

    def logs(self) -> str:
        """The ends of what Serve and its replicas have logged."""
        files = [self.folder / "ray.log", *(self.folder / "ray/session_latest/logs/serve").glob("*.log")]
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files)

    def stop(self) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()

    def left(self) -> list[int]:
        """Processes that it started, and that they started."""
        mark, found = f"{MARK}={self._mark}".encode(), []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found


def lasting_port() -> int:
    """A free port that no outgoing connection takes in the half minute before Serve does."""
    for port in random.sample(range(22000, 30000), 1000):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise OSError("no port from 22000 to 29999 is free")


def shipped() -> dict[str, str]:
    """What deploy/ray/serve.env sets."""
    lines = shlex.split((FOLDER / "serve.env").read_text(), comments=True)
    return dict(line.split("=", 1) for line in lines)


def proxy(folder: Path) -> dict[str, str]:
    """Ports and files of its own for Serve's HAProxy, which puts the files into a folder for the node."""
    ports = ["HAPROXY_METRICS", "HAPROXY_STATS", "FALLBACK_PROXY_HTTP", "FALLBACK_PROXY_GRPC"]
    files = {
        "CONFIG_FILE_LOC": "haproxy.cfg",
        "SOCKET_PATH": "admin.sock",
        "METRICS_SOCKET_PATH": "metrics.sock",
        "SERVER_STATE_BASE": ".",
        "SERVER_STATE_FILE": "state",
    }
    return {
        **{f"RAY_SERVE_{name}_PORT": str(lasting_port()) for name in ports},
        **{f"RAY_SERVE_HAPROXY_{name}": str(folder / file) for name, file in files.items()},
    }


def wait(what: str, condition: Callable[[], bool], seconds: float = 120) -> None:
    """Until it holds; a dashboard that does not answer yet is waited for."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            if condition():
                return
        time.sleep(0.2)
    raise AssertionError(f"within {seconds:g} s it did not happen that {what}")


@contextlib.contextmanager
def cluster(config: Path, env: Mapping[str, str], *, cpus: int) -> Iterator[Cluster]:
    """A Ray that answers; ended with all that it started."""
    # Its sockets' paths have 107 bytes at most, which a test's own folder may exceed.
    with tempfile.TemporaryDirectory(prefix="dg-ray-", ignore_cleanup_errors=True) as made:
        one = Cluster(Path(made), config, env, cpus)
        try:
            wait("the dashboard answers", lambda: one.ask("/api/serve/applications/") is not None)
            yield one
        finally:
            one.stop()
            if kept := os.environ.get("DUALGAUGE_TEST_RAY_LOGS"):
                shutil.copytree(Path(made) / "ray/session_latest/logs", kept, dirs_exist_ok=True)
