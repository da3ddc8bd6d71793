"""The demo pair on the CPU, brought up by `dualgauge up` once for a whole test run.

The first use on a machine installs the engines' environment and makes the checkpoints, in the data folder of
whoever runs the tests; later ones find both there.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from engines import launch_child, runfile

MODEL = "smollm2"
KEY = pytest.StashKey["Pair | PairError"]()
UP_TIMEOUT = 1800.0
DOWN_TIMEOUT = 150.0
POLL = 0.1


class PairError(Exception):
    """The pair could not be had; the message holds what `dualgauge up` said."""


@dataclass(frozen=True)
class Pair:
    """Two real engines and the gateway in front of them. `engines` are their own URLs by tier."""

    base: str
    admin: str
    engines: Mapping[str, str]
    paths: runfile.Paths

    def client(self, **headers: str) -> httpx2.Client:
        return httpx2.Client(base_url=self.base, headers=headers, timeout=120, trust_env=False)

    def state(self, tier: str) -> runfile.UnitState:
        """What `up` says of the engine of a tier now."""
        run = runfile.read(self.paths.state)
        assert run is not None
        return next(unit for unit in run.engines if unit.tier == tier)

    def metrics(self, tier: str, *names: str) -> tuple[float, ...]:
        """The sums of an engine's own samples of these names."""
        found = samples(self.engines[tier])
        return tuple(sum(s.value for s in found if s.name == name) for name in names)

    def counted(self, tier: str, kind: str) -> float:
        """Tokens of a tier, `prompt` or `completion`, by the gateway's count."""
        labels = {"tier": tier, "kind": kind}
        return sum(
            sample.value
            for sample in samples(self.admin)
            if sample.name == "dualgauge_tokens_total" and sample.labels == labels
        )

    def ready(self) -> Mapping[str, str]:
        """What the gateway says of each tier."""
        with self.client() as client:
            tiers: Mapping[str, str] = client.get("/readyz").json()["tiers"]
            return tiers


def samples(base: str) -> list[Sample]:
    """What a server tells Prometheus."""
    reply = httpx2.get(f"{base}/metrics", timeout=10, trust_env=False).raise_for_status()
    return [s for family in text_string_to_metric_families(reply.text) for s in family.samples]


def until(what: str, holds: Callable[[], bool], seconds: float) -> None:
    """Wait for something that happens by itself; fails where it does not."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() >= end:
            pytest.fail(f"waited {seconds:g} s in vain: {what}")
        time.sleep(POLL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def the_pair(config: pytest.Config, folders: pytest.TempPathFactory) -> Pair:
    """The pair of this test run, brought up by whoever asks first. Fails the test where it cannot be had."""
    if KEY not in config.stash:
        stack = ExitStack()
        config.add_cleanup(stack.close)
        try:
            config.stash[KEY] = stack.enter_context(bring_up(folders.mktemp("up")))
        except PairError as error:
            config.stash[KEY] = error
    pair = config.stash[KEY]
    if isinstance(pair, PairError):
        pytest.fail(str(pair), pytrace=False)
    return pair


@contextmanager
def bring_up(folder: Path, deployment: str | None = None) -> Iterator[Pair]:
    """`dualgauge up` in an empty folder, or in one that has this `dualgauge.yaml`; ended with SIGTERM. Raises
    PairError."""
    if deployment is not None:
        (folder / "dualgauge.yaml").write_text(deployment, encoding="utf-8")
    output = folder / "up.out"
    paths = runfile.Paths(folder / runfile.STATE_FOLDER)
    with output.open("wb") as sink, _kept(_command(), folder, sink) as process:
        run = _wait(process, paths, output)
        engines = {unit.tier or unit.name: unit.url for unit in run.engines}
        yield Pair(run.base_url.removesuffix("/v1"), run.admin_url, engines, paths)


def _command() -> list[str]:
    return [sys.executable, "-m", "gateway.cli", "up", "--listen", f"127.0.0.1:{free_port()}"]


@contextmanager
def _kept(command: list[str], folder: Path, sink: object) -> Iterator[subprocess.Popen[bytes]]:
    """A process under the product's own keeper: it ends with this one, however this one ends."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            keeper = [sys.executable, "-I", "-S", launch_child.__file__, str(theirs.fileno())]
            process = subprocess.Popen(
                [*keeper, *command],
                cwd=folder,
                env=_environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=sink,  # type: ignore[call-overload]
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(DOWN_TIMEOUT)
            except subprocess.TimeoutExpired:
                ours.send(b"K")
                process.wait()


def _environment(folder: Path) -> dict[str, str]:
    """A machine without a GPU, whatever this one has; engines that keep their replies."""
    hide = folder / "bin" / "nvidia-smi"
    hide.parent.mkdir()
    hide.write_text("#!/bin/sh\nexit 9\n", encoding="ascii")
    hide.chmod(0o755)
    path = f"{hide.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    hidden = {"PATH": path, "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **hidden, "VLLM_ENABLE_RESPONSES_API_STORE": "1", "NO_COLOR": "1"}


def _wait(process: subprocess.Popen[bytes], paths: runfile.Paths, output: Path) -> runfile.Run:
    end = time.monotonic() + UP_TIMEOUT
    while time.monotonic() < end and process.poll() is None:
        run = runfile.read(paths.state)
        if run is not None and run.phase == "ready":
            return run
        time.sleep(POLL)
    said = output.read_text("utf-8", "replace")[-4000:]
    how = f"ended with {process.returncode}" if process.poll() is not None else f"took over {UP_TIMEOUT:g} s"
    raise PairError(f"these tests need the two real engines, and `dualgauge up` {how}:\n{said}")
