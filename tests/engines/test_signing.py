"""Signatures by the real tool, in its own environment, and the commands that make and check them."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from engines import environments, manifest, signing
from engines.home import data_home
from engines.integrity import Checker, Expected, IntegrityError
from engines.manifest import StoppedError
from engines.signing import SigningError
from gateway.cli import cli
from tests.engines import model_folders


@pytest.fixture(scope="module")
def python() -> Path:
    return environments.install("model-signing", home=data_home()).python


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("keys")

    def make(name: str) -> tuple[Path, Path]:
        private, public = folder / f"{name}.pem", folder / f"{name}.pub"
        curve = ("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(private))
        subprocess.run(curve, check=True)
        subprocess.run(
            ("openssl", "ec", "-in", str(private), "-pubout", "-out", str(public)),
            check=True,
            capture_output=True,
        )
        return private, public

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folders.make(tmp_path / "model")


def _flip(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")


def _new_manifest(folder: Path) -> None:
    _flip(folder)
    manifest.write(folder)


def _add(folder: Path) -> None:
    (folder / "more.json").write_text("{}")


def _remove(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def _unsign(folder: Path) -> None:
    (folder / manifest.SIGNATURE).unlink()


def _garble(folder: Path) -> None:
    (folder / manifest.SIGNATURE).write_text("{}")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_flip, "model.safetensors"),
        (_new_manifest, "Hash mismatch for 'model.safetensors'"),
        (_add, "more.json"),
        (_remove, "tokenizer.json"),
        (_unsign, "no signature"),
        (_garble, "does not hold"),
    ],
)
def test_only_what_was_signed_is_opened(
    folder: Path,
    python: Path,
    keys: Callable[[str], tuple[Path, Path]],
    change: Callable[[Path], None],
    said: str,
) -> None:
    private, public = keys("mine")
    manifest.write(folder)
    signing.sign(folder, private, python=python)
    expected = Expected(public_key=public, python=python)
    Checker(folder, expected).check_now()
    change(folder)
    with pytest.raises(IntegrityError, match=said):
        Checker(folder, expected).check_now()


def test_another_key_is_refused(folder: Path, python: Path, keys: Callable[[str], tuple[Path, Path]]) -> None:
    signing.sign(folder, keys("mine")[0], python=python)
    with pytest.raises(SigningError, match="Key mismatch"):
        signing.verify(folder, keys("other")[1], python=python)


def test_a_key_that_the_format_does_not_know_says_which_it_does(
    folder: Path, python: Path, tmp_path: Path
) -> None:
    key = tmp_path / "ed25519.pem"
    subprocess.run(("openssl", "genpkey", "-algorithm", "ed25519", "-out", str(key)), check=True)
    with pytest.raises(SigningError, match="NIST curve: openssl ecparam"):
        signing.sign(folder, key, python=python)


def test_a_stop_ends_the_check(folder: Path, tmp_path: Path) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    (folder / manifest.SIGNATURE).write_text("{}")
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        signing.verify(folder, tmp_path / "key", python=slow, stop=stop)


def test_the_commands_sign_and_verify(
    folder: Path, python: Path, keys: Callable[[str], tuple[Path, Path]]
) -> None:
    private, public = keys("mine")

    def run(*args: object) -> tuple[int, str]:
        result = CliRunner().invoke(cli, ["models", *map(str, args)])
        return result.exit_code, result.output

    assert run("sign", folder, "--private-key", private)[0] == 0
    code, said = run("verify", folder, "--public-key", public)
    assert code == 0
    assert f"signed by the owner of {public}" in said
    _flip(folder)
    code, said = run("verify", folder)
    assert code == 1
    assert "model.safetensors has other contents than when it was made" in said
    code, said = run("sign", folder, "--private-key", private)
    assert code == 1
    assert "not what its manifest says" in said


def test_the_manifest_command_prints_what_an_engine_can_pin(folder: Path) -> None:
    result = CliRunner().invoke(cli, ["models", "manifest", str(folder)])
    assert result.exit_code == 0
    assert str(manifest.digest(folder)) in result.output
