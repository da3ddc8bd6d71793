"""`up`, `down` and `status` as an operator runs them: real processes, a real gateway, fake engines."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from engines import runfile

FAKE = Path(__file__).parents[1] / "engines" / "fake_engine.py"
LONG = 120.0


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.05)


class Site:
    """A folder with a configuration of two engines, and the command line in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths = runfile.Paths(folder / runfile.STATE_FOLDER)
        self.listen, self.admin, self.fast, self.exact = free_ports(4)
        self.started: list[subprocess.Popen[str]] = []
        python = folder / "python"
        python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(FAKE))} "$@"\n')
        python.chmod(0o755)
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        hidden = folder / "bin" / "nvidia-smi"
        hidden.parent.mkdir()
        hidden.write_text("#!/bin/sh\nexit 9\n")
        hidden.chmod(0o755)
        self.env = {
            **os.environ,
            "PATH": f"{hidden.parent}{os.pathsep}{os.environ['PATH']}",
            "DUALGAUGE_VLLM_PYTHON": str(python),
            "NO_COLOR": "1",
        }
        self.write()

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.listen}"

    def write(self, *, fast: str = "[]", exact: str = "[]", more: str = "") -> None:
        self.config.write_text(
            f"listen: 127.0.0.1:{self.listen}\nadmin: 127.0.0.1:{self.admin}\nmodel: smollm2\n{more}"
            "engines:\n"
            + self._engine("fast", "awq", self.fast, fast)
            + self._engine("exact", "bf16", self.exact, exact)
        )

    @property
    def config(self) -> Path:
        return self.folder / "dualgauge.yaml"

    def _engine(self, tier: str, precision: str, port: int, args: str) -> str:
        return (
            f"  - {{name: {tier}-0, tier: {tier}, kind: vllm, model: ./model, precision: {precision}, "
            f"port: {port}, gpu: 0, args: {args}}}\n"
        )

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "gateway.cli", *args],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LONG,
            check=False,
        )

    def up(self, *args: str) -> subprocess.Popen[str]:
        """`up` in the foreground, without waiting."""
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway.cli", "up", *args],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def state(self) -> runfile.Run | None:
        return runfile.read(self.paths.state)

    def engine(self, tier: str) -> runfile.UnitState:
        run = self.state()
        assert run is not None
        return next(unit for unit in run.engines if unit.tier == tier)

    def ready(self) -> bool:
        run = self.state()
        return run is not None and run.phase == "ready"

    def status(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.run("status", "--json").stdout)
        return body

    def all_gone(self) -> bool:
        """Whether nothing listens on any of the four ports."""
        for port in (self.listen, self.admin, self.fast, self.exact):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return False
        return True

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self.run("down", "--now")


@dataclass(frozen=True)
class Running:
    """A site that `up -d --listen …` brought up, and what that printed."""

    site: Site
    output: str
    base: str


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    site = Site(tmp_path_factory.mktemp("running"))
    (other,) = free_ports(1)
    site.write(fast='[--slow, "0.7"]')
    done = site.run("up", "-d", "--listen", f"127.0.0.1:{other}")
    assert done.returncode == 0, done.stderr
    yield Running(site, done.stdout, f"http://127.0.0.1:{other}")
    site.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.close()


def test_up_says_its_plan_starts_in_turn_and_ends_cleanly_with_ctrl_c(site: Site) -> None:
    site.write(fast='[--slow, "0.7"]')
    process = site.up()
    eventually(site.ready)
    answer = httpx2.get(f"{site.base}/readyz")
    assert answer.status_code == 200, answer.text
    process.send_signal(signal.SIGINT)
    output = process.communicate()[0]
    assert process.returncode == 0
    assert site.all_gone()
    assert not site.paths.state.exists()
    plan, fast, exact, base = (
        output.index(text)
        for text in ("bytes)", "✓ fast-0 is ready", "exact-0: starting", f"OPENAI_BASE_URL={site.base}/v1")
    )
    assert plan < fast < exact < base
    assert "Draining" in output


def test_nothing_outlives_an_up_that_is_killed_with_9(site: Site) -> None:
    process = site.up()
    eventually(site.ready)
    process.kill()
    process.wait()
    eventually(site.all_gone)
    assert site.status()["left_behind"]
    assert site.run("up", "-d").returncode == 0
    assert site.status()["ready"]


def test_a_second_ctrl_c_ends_at_once(site: Site) -> None:
    site.write(more="shutdown_grace: 1h\n", fast="[--stubborn]")
    process = site.up()
    eventually(site.ready)
    process.send_signal(signal.SIGINT)
    eventually(lambda: site.engine("fast").state == "stopping")
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 0
    assert site.all_gone()


def test_ctrl_c_during_a_start_stops_what_was_started(site: Site) -> None:
    site.write(exact='[--slow, "3600"]')
    process = site.up()
    eventually(lambda: site.paths.state.exists() and site.engine("exact").pid is not None)
    process.send_signal(signal.SIGINT)
    output = process.communicate()[0]
    assert process.returncode == 130
    assert "nothing is left running" in output
    assert site.all_gone()


@pytest.mark.parametrize("detach", [(), ("-d",)])
def test_an_engine_that_dies_at_its_start_is_one_clear_message(site: Site, detach: tuple[str, ...]) -> None:
    site.write(exact='[--die, "Traceback (most recent call last):\\nValueError: no such quantization"]')
    done = site.run("up", *detach)
    assert done.returncode == 1
    assert "error: exact-0 ended with exit code 1 before it was ready" in done.stderr
    assert "ValueError: no such quantization" in done.stderr
    assert str(site.paths.log("exact-0")) in done.stderr
    assert done.stderr.count("error: ") == 1
    assert site.all_gone()
    status = site.run("status")
    assert status.returncode == 1
    assert "the last start failed" in status.stdout


@pytest.mark.parametrize("which", ["listen", "admin", "fast", "exact"])
def test_a_port_in_use_is_named_with_its_setting_and_its_owner(site: Site, which: str) -> None:
    port = getattr(site, which)
    with socket.create_server(("127.0.0.1", port)):
        done = site.run("up")
    assert done.returncode == 1
    assert f"127.0.0.1:{port}" in done.stderr
    assert f"in use by {Path('/proc/self/comm').read_text().strip()} (pid {os.getpid()})" in done.stderr
    setting = {"listen": "`listen` in dualgauge.yaml", "admin": "`admin` in dualgauge.yaml"}
    assert setting.get(which, "its `port` in dualgauge.yaml") in done.stderr
    assert ("--listen 127.0.0.1:" in done.stderr) is (which == "listen")
    assert not site.paths.state.exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            "shutdown_gracee: 1s\n",
            "dualgauge.yaml:4:1: error: unknown key `shutdown_gracee`; did you mean `shutdown_grace`?",
        ),
        ("policy: nonsense\n", "unknown policy `nonsense`"),
        ("policy: ./none.yaml\n", "none.yaml"),
    ],
)
def test_a_mistake_in_a_file_is_told_before_anything_starts(site: Site, more: str, message: str) -> None:
    site.write(more=more)
    done = site.run("up")
    assert done.returncode == 1
    assert message in done.stderr
    assert not site.paths.state.exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--config", "nope.yaml"), "there is no nope.yaml"),
        (("--listen", "0.0.0.0:9"), "can be reached by others"),
        (("--listen", "nowhere"), "is not an address"),
    ],
)
def test_what_cannot_be_is_said(site: Site, args: tuple[str, ...], message: str) -> None:
    done = site.run("up", *args)
    assert done.returncode != 0
    assert message in done.stderr


def test_engines_of_one_device_start_in_turn_each_after_health_and_a_completion(running: Running) -> None:
    fast, exact = running.site.engine("fast"), running.site.engine("exact")
    assert fast.keeper is not None
    assert exact.keeper is not None
    assert exact.keeper.started - fast.keeper.started >= 0.7 * os.sysconf("SC_CLK_TCK")
    asked = [line for line in running.site.paths.log("fast-0").read_text().splitlines() if "HTTP/1.1" in line]
    answered = asked.index(next(line for line in asked if '"GET /health HTTP/1.1" 200' in line))
    assert '"POST /v1/completions HTTP/1.1" 200' in asked[answered + 1]


def test_the_plan_is_printed_with_bytes_before_anything_starts(running: Running) -> None:
    plan, first = running.output.index("Plan"), running.output.index("fast-0: starting")
    for name in ("fast-0", "exact-0"):
        line = running.output.index(f"  {name} (")
        assert plan < line < running.output.index(" bytes)", line) < first


def test_the_printed_curl_line_reaches_an_engine(running: Running) -> None:
    line = next(line for line in running.output.splitlines() if line.strip().startswith("curl "))
    done = subprocess.run(shlex.split(line), capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert json.loads(done.stdout)["choices"]
    assert '"POST /v1/chat/completions HTTP/1.1" 200' in running.site.paths.log("fast-0").read_text()


def test_listen_replaces_the_files_address(running: Running) -> None:
    assert f"OPENAI_BASE_URL={running.base}/v1" in running.output
    assert httpx2.get(f"{running.base}/readyz").status_code == 200
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{running.site.base}/healthz")


def test_status_of_a_whole_deployment(running: Running) -> None:
    shown = running.site.run("status")
    assert shown.returncode == 0
    assert "tier fast: ready" in shown.stdout
    body = running.site.status()
    assert body["phase"] == "ready"
    assert body["base_url"] == f"{running.base}/v1"
    assert [engine["state"] for engine in body["engines"]] == ["ready", "ready"]


def test_up_does_not_start_twice(running: Running) -> None:
    run = running.site.state()
    assert run is not None
    again = running.site.run("up")
    assert again.returncode == 1
    assert f"is running already (pid {run.owner.pid})" in again.stderr
    assert "dualgauge down" in again.stderr


@pytest.mark.parametrize("command", ["up", "down"])
def test_two_configurations_of_one_folder_do_not_mix(running: Running, command: str) -> None:
    other = running.site.folder / "other.yaml"
    other.write_text(running.site.config.read_text())
    done = running.site.run(command, "--config", "other.yaml")
    assert done.returncode == 1
    assert str(running.site.config) in done.stderr
    assert running.site.ready()


def test_a_crashed_engine_comes_back_while_the_gateway_goes_on(running: Running) -> None:
    site = running.site
    before, run = site.engine("exact"), site.state()
    assert run is not None
    assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)
    eventually(lambda: site.engine("exact").restarts == 1 and site.engine("exact").state == "ready")
    after = site.state()
    assert after is not None
    assert after.gateway == run.gateway
    assert site.engine("exact").pid != before.pid
    assert site.engine("fast").restarts == 0


def test_a_crashed_gateway_comes_back(running: Running) -> None:
    def gateway() -> runfile.UnitState:
        run = running.site.state()
        assert run is not None
        assert run.gateway is not None
        return run.gateway

    pid = gateway().pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: gateway().restarts == 1 and gateway().state == "ready")
    assert httpx2.get(f"{running.base}/healthz").status_code == 200


def test_a_restart_replaces_the_gateway_under_its_supervisor(running: Running) -> None:
    before = running.site.state()
    done = running.site.run("restart")
    assert done.returncode == 0, done.stderr
    assert httpx2.get(f"{running.base}/readyz").status_code == 200
    workers = httpx2.get(f"http://127.0.0.1:{running.site.admin}/admin/status").json()["workers"]
    serving = [worker["pid"] for worker in workers if worker["state"] == "serving"]
    assert before is not None
    assert before.gateway is not None
    assert serving not in ([], [before.gateway.pid])
    assert running.site.state() == before, "for `up` nothing has happened"
    assert running.site.run("engine", "restart", "fast-0").returncode == 0
    assert httpx2.get(f"{running.base}/readyz").status_code == 200


def test_down_stops_what_was_left_running(site: Site) -> None:
    assert site.run("up", "-d").returncode == 0
    down = site.run("down")
    assert (down.returncode, down.stderr) == (0, "")
    assert "everything is stopped" in down.stdout
    assert site.all_gone()
    assert "serving on" in site.paths.log("fast-0").read_text()


def test_where_nothing_runs_down_says_so_and_status_fails(site: Site) -> None:
    down = site.run("down")
    assert down.returncode == 0
    assert "nothing runs" in down.stdout
    status = site.run("status")
    assert status.returncode == 1
    assert "not running" in status.stdout
    assert "tier fast: no engine is ready" in status.stdout


def test_an_interpreter_that_is_none_is_said(site: Site) -> None:
    site.env["DUALGAUGE_VLLM_PYTHON"] = "/no/such/python"
    done = site.run("up")
    assert done.returncode == 1
    assert "DUALGAUGE_VLLM_PYTHON=/no/such/python is no program" in done.stderr


def test_a_data_folder_without_room_is_said_before_anything_is_downloaded(site: Site) -> None:
    del site.env["DUALGAUGE_VLLM_PYTHON"]
    site.env["DUALGAUGE_HOME"] = "/proc/none"  # a file system that has no free byte
    done = site.run("up")
    assert done.returncode == 1
    assert "no disk space" in done.stderr
    assert "the environment vllm-cpu" in done.stderr
    assert "DUALGAUGE_HOME" in done.stderr
