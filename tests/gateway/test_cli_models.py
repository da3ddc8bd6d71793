from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from engines import demo, manifest
from gateway.cli import cli


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_a_manifest_is_written_and_holds(folder: Path) -> None:
    assert run("models", "manifest", str(folder)).exit_code == 0
    result = run("models", "verify", str(folder))
    assert (result.exit_code, result.output) == (0, f"{folder}: every file is as it was made\n")


def test_a_changed_file_is_named_and_fails(folder: Path) -> None:
    manifest.write(folder)
    (folder / "config.json").write_text("[]")
    result = run("models", "verify", str(folder))
    assert result.exit_code == 1
    assert "config.json has other contents than when it was made" in result.output


def test_a_folder_without_a_manifest_says_how_to_get_one(folder: Path) -> None:
    result = run("models", "verify", str(folder))
    assert result.exit_code == 1
    assert f"`dualgauge models manifest {folder}` writes one" in result.output


def test_quantise_fails_before_it_installs_anything(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALGAUGE_HOME", str(folder / "home"))
    result = run("models", "quantize", str(folder), str(folder / "out"))
    assert result.exit_code == 1
    assert "has no *.safetensors" in result.output
    assert not (folder / "home").exists()


def test_a_model_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    assert run("models", "quantize", str(tmp_path / "no"), str(tmp_path / "out")).exit_code == 2


def test_no_environments_is_not_an_error(tmp_path: Path) -> None:
    result = run("engines", "list", "--home", str(tmp_path))
    assert result.exit_code == 0
    assert "`dualgauge engines install` makes one" in result.output


def test_an_unknown_kind_is_a_usage_error() -> None:
    assert run("engines", "install", "--kind", "vllm-tpu").exit_code == 2


def test_the_names_of_the_demo_pair_are_those_of_the_catalogue() -> None:
    from engines import catalog

    assert {catalog.DEMO_EXACT, catalog.DEMO_AWQ} == {f"demo/{demo.EXACT}", f"demo/{demo.FAST}"}
    assert demo.GROUP == catalog.DEMO_GROUP


@pytest.mark.parametrize(
    "command",
    ["engines install", "engines list", "models demo", "models quantize", "models verify", "models manifest"],
)
def test_every_command_shows_an_example(command: str) -> None:
    result = run(*command.split(), "--help")
    assert result.exit_code == 0
    assert "Example" in result.output
    assert f"dualgauge {command}" in result.output
