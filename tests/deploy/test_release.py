"""What is released can be made again, byte for byte, and what is in it can be told and audited."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
EPOCH = "1767225600"
PARTS = ("gateway", "engines", "policies", "pyproject.toml", "README.md", "LICENSE")


def wheel(folder: Path, mask: int, mtime: int) -> Path:
    """Built from a copy whose files have other modes and dates than the checkout's."""
    source = folder / "source"
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, source / part)
    for path in source.rglob("*"):
        path.chmod(path.stat().st_mode & ~mask | (0o111 if path.is_dir() else 0))
        os.utime(path, (mtime, mtime))
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": EPOCH}
    subprocess.run(build, cwd=source, env=environment, check=True, capture_output=True)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "two")]
    return [wheel(folders[0], 0o022, 1_700_000_000), wheel(folders[1], 0o002, 1_750_000_000)]


def test_the_wheel_is_the_same_whoever_builds_it(wheels: list[Path]) -> None:
    one, two = (hashlib.sha256(made.read_bytes()).hexdigest() for made in wheels)
    assert one == two
    assert wheels[0].name == wheels[1].name


def test_the_wheel_has_all_and_nothing_else(wheels: list[Path]) -> None:
    with zipfile.ZipFile(wheels[0]) as archive:
        names = archive.namelist()
    files = {
        str(path.relative_to(ROOT))
        for package in ("gateway", "engines", "policies")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert files <= set(names)
    assert {name.split("/")[0] for name in names} - {"gateway", "engines", "policies"} == {
        f"{wheels[0].name.rsplit('-', 3)[0]}.dist-info"
    }


needs_cyclonedx = pytest.mark.skipif(
    shutil.which("cyclonedx-py") is None, reason="no cyclonedx-py on the PATH (.ci/tools.txt has it)"
)


@needs_cyclonedx
def test_the_list_of_what_is_in_it_is_whole_and_the_same_each_time(tmp_path: Path) -> None:
    made = [tmp_path / "one.json", tmp_path / "two.json"]
    for path in made:
        subprocess.run([ROOT / ".ci" / "sbom", path], check=True, capture_output=True)
    assert made[0].read_bytes() == made[1].read_bytes()
    told = json.loads(made[0].read_text())
    assert told["metadata"]["component"]["name"] == "dualgauge"
    lock = (ROOT / "deploy" / "docker" / "requirements.txt").read_text().splitlines()
    locked = {line.partition("==")[0] for line in lock if "==" in line}
    assert {component["name"] for component in told["components"]} == locked
    assert all(component["externalReferences"][0]["hashes"] for component in told["components"])


def audited(folder: Path, said: str, *arguments: str) -> tuple[int, str]:
    """The end and the output of .ci/audit where pip-audit says this."""
    program = folder / "pip-audit"
    (folder / "said").write_text(said)
    program.write_text(f'#!/bin/sh\ncat "{folder}/said"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    command = [sys.executable, ROOT / ".ci" / "audit", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return done.returncode, done.stdout


FINE = {"name": "click", "version": "8.5.1", "vulns": []}
HOLE = {"name": "h11", "version": "0.1", "vulns": [{"id": "CVE-1", "fix_versions": ["0.16.0"]}]}
UNKNOWN = {"name": "click", "skip_reason": "Dependency not found on PyPI"}


def test_an_audit_without_findings(tmp_path: Path) -> None:
    assert audited(tmp_path, json.dumps({"dependencies": [FINE]})) == (0, "1 packages, 0 vulnerabilities\n")


def test_an_audit_names_what_is_vulnerable(tmp_path: Path) -> None:
    code, said = audited(tmp_path, json.dumps({"dependencies": [FINE, HOLE]}))
    assert code == 1
    assert "h11 0.1: CVE-1 (fixed in: 0.16.0)\n" in said


@pytest.mark.parametrize("said", [json.dumps({"dependencies": [FINE, UNKNOWN]}), "", "no JSON"])
def test_an_audit_that_nobody_answered_does_not_pass_for_one(tmp_path: Path, said: str) -> None:
    assert audited(tmp_path, said) == (0, "NOT AUDITED: neither PyPI nor OSV answers from here\n")
    assert audited(tmp_path, said, "--strict")[0] == 1


def test_compose_and_dockerfile_name_the_same_base() -> None:
    stack = (ROOT / "docker-compose.yml").read_text()
    base = (ROOT / "deploy" / "docker" / "Dockerfile").read_text().split("ARG PYTHON=")[1].split("\n")[0]
    builds = [
        service["build"] for service in yaml.safe_load(stack)["services"].values() if "build" in service
    ]
    assert {build["args"]["PYTHON"] for build in builds} == {f"${{PYTHON_IMAGE:-{base}}}"}


needs_hadolint = pytest.mark.skipif(
    shutil.which("hadolint") is None, reason="no hadolint on the PATH (.ci/tools.txt has it)"
)


@needs_hadolint
def test_the_dockerfile_has_no_lint() -> None:
    command = ["hadolint", str(ROOT / "deploy" / "docker" / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
