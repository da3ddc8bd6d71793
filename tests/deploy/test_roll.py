"""The order of what `deploy/docker/roll` does, and what it leaves and says where it fails: with a Docker that
is a script, so that it can fail. `deploy/docker/check` has the real one."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "deploy" / "docker"
OLD, NEW = ["old-1", "old-2"], ["new-1", "new-2"]
RLIMIT = "runc create failed: container init: error setting rlimit type 7: operation not permitted"
# Both programs. Its state is a file: the containers there are, with their health, and what was asked of it.
DOCKER = """\
import json, pathlib, sys

file = pathlib.Path(__file__).with_name("state.json")
state = json.loads(file.read_text())
words = sys.argv[1:]
gateways = state["gateways"]
said, failed = [], ""
if words[0] == "ps":
    if words[-1] == "front":
        said = state["front"]
    else:
        said = [one for one, health in gateways.items() if "-a" in words or health != "created"]
elif words[0] == "up":
    state["done"].append(" ".join(words[words.index("--scale"):]))
    for one in state["new"]:
        gateways[one] = state["health"]
    failed = state["fails"]
elif words[0] == "exec":
    order = words[-1]
    if order.startswith("show"):
        said = ["1", "# be_id be_name srv_id srv_name srv_addr"]
        said += [f"3 gateways {i} gateway-{i} {one}.address 2" for i, one in enumerate(gateways, 1)]
    else:
        state["done"].append(order)
elif words[0] == "inspect":
    health = [{"Health": {"Status": gateways[one]}} for one in words[1:]]
    addresses = [{"Networks": {"front": {"IPAddress": f"{one}.address"}}} for one in words[1:]]
    said = [json.dumps([{"State": a, "NetworkSettings": b} for a, b in zip(health, addresses)])]
elif words[0] == "logs":
    print("what a gateway wrote", file=sys.stderr)
else:
    state["done"].append(" ".join(words))
    if words[0] == "rm":
        for one in words[1:]:
            del gateways[one]
file.write_text(json.dumps(state))
print(*said, sep="\\n")
sys.exit(failed or 0)
"""


class Docker:
    def __init__(self, folder: Path) -> None:
        for name in ("docker", "docker-compose"):
            (folder / name).write_text(f"#!{sys.executable} -S\n{DOCKER}")
            (folder / name).chmod(0o755)
        self._file = folder / "state.json"
        running = dict.fromkeys(OLD, "healthy")
        self.set(front=["front-1"], gateways=running, new=NEW, health="healthy", fails="", done=[])

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self._file.read_text())
        return state

    def set(self, **some: object) -> None:
        before = self.state if self._file.exists() else {}
        self._file.write_text(json.dumps({**before, **some}))


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left beside the programs."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Docker:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return Docker(tmp_path)


def script(name: str) -> ModuleType:
    """A program of deploy/docker, not run."""
    loader = SourceFileLoader(f"deploy_docker_{name}", str(FOLDER / name))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def roll(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Without its waits."""
    monkeypatch.setattr(sys, "argv", ["roll"])
    module = script("roll")
    for name in ("HEALTHY_SECONDS", "NOTICE_SECONDS", "LATE_SECONDS"):
        monkeypatch.setattr(module, name, 0)
    return module


def refusal(roll: ModuleType) -> str:
    with pytest.raises(SystemExit) as raised:
        roll.main()
    return str(raised.value.code)


def test_old_gateways_go_after_new_ones_are_healthy_and_nothing_more_is_sent_to_them(
    docker: Docker, roll: ModuleType
) -> None:
    roll.main()
    assert docker.state["done"] == [
        "--scale gateway=4 gateway",
        "set server gateways/gateway-1 state drain",
        "set server gateways/gateway-2 state drain",
        "stop old-1 old-2",
        "rm old-1 old-2",
        "set server gateways/gateway-1 state ready",
        "set server gateways/gateway-2 state ready",
    ]
    assert list(docker.state["gateways"]) == NEW


@pytest.mark.parametrize("health", ["starting", "unhealthy"])
def test_new_gateways_that_do_not_become_healthy_are_taken_away(
    docker: Docker, roll: ModuleType, health: str
) -> None:
    docker.set(health=health)
    said = refusal(roll)
    assert "not healthy in 0 s" in said
    assert "what a gateway wrote" in said
    assert list(docker.state["gateways"]) == OLD


def test_containers_that_could_not_start_are_taken_away(docker: Docker, roll: ModuleType) -> None:
    docker.set(health="created", fails="no such image")
    assert "no such image" in refusal(roll)
    assert list(docker.state["gateways"]) == OLD


def test_more_open_files_than_the_daemon_may_give_are_explained(docker: Docker, roll: ModuleType) -> None:
    docker.set(health="created", fails=RLIMIT)
    said = refusal(roll)
    assert RLIMIT in said
    assert "LimitNOFILE=65536" in said


def test_other_failures_have_nothing_to_do_with_open_files(docker: Docker, roll: ModuleType) -> None:
    docker.set(fails="no space left on device")
    assert "LimitNOFILE" not in refusal(roll)


def test_an_interrupted_start_leaves_no_new_gateway(
    docker: Docker, roll: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(containers: list[str]) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(roll, "healthy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        roll.main()
    assert list(docker.state["gateways"]) == OLD


def test_a_gateway_that_was_stopped_before_is_not_taken_for_a_new_one(
    docker: Docker, roll: ModuleType
) -> None:
    docker.set(gateways={**dict.fromkeys(OLD, "healthy"), "stopped": "created"}, fails="no such image")
    refusal(roll)
    assert list(docker.state["gateways"]) == [*OLD, "stopped"]


def test_needs_the_front(docker: Docker, roll: ModuleType) -> None:
    docker.set(front=[])
    assert "add deploy/docker/rolling.yml to COMPOSE_FILE" in refusal(roll)


def test_needs_gateways(docker: Docker, roll: ModuleType) -> None:
    docker.set(gateways={})
    assert "docker compose up -d --wait" in refusal(roll)


@pytest.mark.parametrize("name", ["roll", "check"])
def test_help_shows_how(name: str) -> None:
    done = subprocess.run([FOLDER / name, "--help"], capture_output=True, text=True, check=True)
    assert f"deploy/docker/{name}  " in done.stdout


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_check_says_why_no_docker_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "docker", "exit 1")
    program(tmp_path, "dockerd", "echo no iptables; exit 3")
    program(tmp_path, "unshare", 'shift; exec "$@"')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("DOCKER_HOST", "")  # which it sets
    said = r"dockerd ended with 3:\nno iptables"
    with pytest.raises(SystemExit, match=said), script("check").docker_running(tmp_path):
        pass


class Limited:
    """A stack whose containers have a limit of open files."""

    def __init__(self, files: str) -> None:
        self._files = files

    def inside(self, service: str, *command: str) -> tuple[int, str]:
        return 0, f"Max processes  64  64  processes\nMax open files  {self._files}  {self._files}  files\n"


@pytest.mark.parametrize("files", ["1024", "1048576", "unlimited"])
def test_check_is_content_with_enough_open_files(files: str) -> None:
    script("check").opens_enough(Limited(files), "front")


def test_check_says_what_to_do_about_too_few_open_files() -> None:
    with pytest.raises(SystemExit, match=r"front may open 256 files, .* LimitNOFILE=65536"):
        script("check").opens_enough(Limited("256"), "front")
