"""`up`, `down` and `status` as an operator runs them: real processes, a real gateway, stand-ins for engines."""

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
from pathlib import Path
from typing import Any

import httpx2
import pytest

from engines import runfile

FAKE = Path(__file__).parents[1] / "engines" / "fake_engine.py"
LONG = 60.0


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
            f"listen: 127.0.0.1:{self.listen}\nadmin: 127.0.0.1:{self.admin}\nmodel: smollm2\n{more}engines:\n"
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
            process.communicate()
        self.run("down", "--now")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.close()


def test_up_says_its_plan_starts_in_turn_and_ends_cleanly_with_ctrl_c(site: Site) -> None:
    site.write(fast='[--slow, "0.7"]')
    process = site.up()
    eventually(site.ready)
    assert httpx2.get(f"{site.base}/readyz").status_code == 200
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


def test_engines_without_shares_start_one_after_the_other_each_after_a_warm_up(site: Site) -> None:
    """Both are on gpu 0; the second starts after the first's health and one completion."""
    site.write(fast='[--slow, "0.7"]')
    assert site.run("up", "-d").returncode == 0
    fast, exact = (site.paths.log(f"{tier}-0") for tier in ("fast", "exact"))
    assert '"POST /v1/completions HTTP/1.1" 200' in fast.read_text()
    warm = fast.stat().st_mtime_ns
    began = exact.stat().st_ctime_ns
    birth = next(unit for unit in [site.engine("exact")]).keeper
    assert birth is not None
    first = site.engine("fast").keeper
    assert first is not None
    assert first.started < birth.started
    assert warm <= began


def test_the_printed_curl_line_asks_the_gateway(site: Site) -> None:
    output = site.run("up", "-d").stdout
    line = next(line.strip() for line in output.splitlines() if line.strip().startswith("curl "))
    done = subprocess.run(shlex.split(line), capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "error" in json.loads(done.stdout)  # the stand-in has no chat: the engine's own 404 comes back
    assert '"POST /v1/chat/completions HTTP/1.1" 404' in site.paths.log("fast-0").read_text()


def test_detached_it_stays_until_down(site: Site) -> None:
    done = site.run("up", "-d")
    assert done.returncode == 0, done.stderr
    assert "`dualgauge down` stops it" in done.stdout
    status = site.status()
    assert status["ready"]
    assert status["phase"] == "ready"
    assert [engine["state"] for engine in status["engines"]] == ["ready", "ready"]
    again = site.run("up")
    assert again.returncode == 1
    assert f"is running already (pid {status['pid']})" in again.stderr
    assert "dualgauge down" in again.stderr
    down = site.run("down")
    assert (down.returncode, down.stderr) == (0, "")
    assert "everything is stopped" in down.stdout
    assert site.all_gone()
    nothing = site.run("down")
    assert nothing.returncode == 0
    assert "nothing runs" in nothing.stdout


def test_status_tells_a_missing_engine_with_exit_code_1(site: Site) -> None:
    assert site.run("up", "-d").returncode == 0
    shown = site.run("status")
    assert shown.returncode == 0
    assert "tier fast: ready" in shown.stdout
    assert site.run("down").returncode == 0
    shown = site.run("status")
    assert shown.returncode == 1
    assert "not running" in shown.stdout
    assert "tier fast: no engine is ready" in shown.stdout


def test_a_crashed_engine_comes_back_while_the_gateway_goes_on(site: Site) -> None:
    assert site.run("up", "-d").returncode == 0
    before = site.engine("fast")
    run = site.state()
    assert run is not None
    assert run.gateway is not None
    assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)
    eventually(lambda: site.engine("fast").restarts == 1 and site.engine("fast").state == "ready")
    assert httpx2.get(f"{site.base}/healthz").status_code == 200
    after = site.state()
    assert after is not None
    assert after.gateway == run.gateway
    assert site.engine("fast").pid != before.pid
    assert site.engine("exact").restarts == 0


def test_a_crashed_gateway_comes_back(site: Site) -> None:
    assert site.run("up", "-d").returncode == 0
    run = site.state()
    assert run is not None
    assert run.gateway is not None
    assert run.gateway.pid is not None
    os.kill(run.gateway.pid, signal.SIGKILL)

    def back() -> bool:
        now = site.state()
        return (
            now is not None
            and now.gateway is not None
            and now.gateway.restarts == 1
            and now.gateway.state == "ready"
        )

    eventually(back)
    assert httpx2.get(f"{site.base}/healthz").status_code == 200


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


def test_listen_replaces_the_files_address(site: Site) -> None:
    (other,) = free_ports(1)
    output = site.run("up", "-d", "--listen", f"127.0.0.1:{other}").stdout
    assert f"OPENAI_BASE_URL=http://127.0.0.1:{other}/v1" in output
    assert httpx2.get(f"http://127.0.0.1:{other}/healthz").status_code == 200
    assert site.status()["base_url"] == f"http://127.0.0.1:{other}/v1"


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


def test_two_configurations_of_one_folder_do_not_mix(site: Site) -> None:
    assert site.run("up", "-d").returncode == 0
    other = site.folder / "other.yaml"
    other.write_text(site.config.read_text())
    done = site.run("up", "--config", "other.yaml")
    assert done.returncode == 1
    assert f"another configuration, {site.config}, runs from this folder" in done.stderr
    done = site.run("down", "--config", "other.yaml")
    assert done.returncode == 1
    assert site.status()["ready"]


def test_logs_of_the_run_before_are_kept(site: Site) -> None:
    log = site.paths.log("fast-0")
    for _ in range(2):
        assert site.run("up", "-d").returncode == 0
        assert site.run("down").returncode == 0
    assert "serving on" in log.read_text()
    assert "serving on" in log.with_name("fast-0.log.1").read_text()
