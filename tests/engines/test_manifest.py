from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engines import manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "a.safetensors").write_bytes(b"\x00" * 100)
    manifest.write(tmp_path)
    return tmp_path


def test_an_untouched_folder_is_complete(folder: Path) -> None:
    assert manifest.complete(folder)
    assert manifest.problems(folder) == []


def test_sha256_is_that_of_the_bytes(folder: Path) -> None:
    # sha256 of `{}`, from any other implementation.
    digest = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    assert manifest.read(folder)["config.json"] == (2, digest)


def test_nothing_has_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(manifest.ManifestError, match="holds no files"):
        manifest.write(tmp_path)
    assert not list(tmp_path.iterdir())


def _flip(folder: Path) -> None:
    (folder / "weights" / "a.safetensors").write_bytes(b"\x00" * 99 + b"\x01")


def _cut(folder: Path) -> None:
    (folder / "weights" / "a.safetensors").write_bytes(b"\x00" * 99)


def _remove(folder: Path) -> None:
    (folder / "config.json").unlink()


def _link(folder: Path) -> None:
    (folder / "config.json").rename(folder.parent / "elsewhere.json")
    (folder / "config.json").symlink_to(folder.parent / "elsewhere.json")


def _add(folder: Path) -> None:
    (folder / "modeling.py").write_text("import os")


@pytest.mark.parametrize(
    ("change", "said", "seen_at_once"),
    [
        (_flip, "weights/a.safetensors has other contents", False),
        (_cut, "weights/a.safetensors has 99 bytes, not 100", True),
        (_remove, "config.json is missing", True),
        (_link, "config.json is missing", True),
        (_add, "modeling.py is not in the manifest", False),
    ],
)
def test_changes_are_found(
    folder: Path, change: Callable[[Path], None], said: str, seen_at_once: bool
) -> None:
    change(folder)
    assert [problem for problem in manifest.problems(folder) if said in problem]
    assert manifest.complete(folder) is not seen_at_once


@pytest.mark.parametrize("text", ["", "[]", '{"files": 1}', '{"files": {"a": {"size": "x"}}}'])
def test_an_unreadable_manifest_is_an_error_and_not_complete(folder: Path, text: str) -> None:
    (folder / manifest.NAME).write_text(text)
    assert not manifest.complete(folder)
    with pytest.raises(manifest.ManifestError, match=r"manifest\.json"):
        manifest.problems(folder)


def test_writing_again_leaves_the_manifest_itself_out(folder: Path) -> None:
    first = (folder / manifest.NAME).read_bytes()
    manifest.write(folder)
    assert (folder / manifest.NAME).read_bytes() == first


@pytest.mark.parametrize(
    "text",
    ["{}", '{"files": []}', '{"files": {"a": 1}}', '{"files": {"a": {"size": Infinity, "sha256": "b"}}}'],
)
def test_what_is_no_manifest_is_said_to_be_none(folder: Path, text: str) -> None:
    (folder / manifest.NAME).write_text(text)
    with pytest.raises(manifest.ManifestError, match=r"manifest\.json is no manifest: it needs `files`"):
        manifest.problems(folder)


def test_a_manifest_that_cannot_be_written_leaves_nothing(folder: Path) -> None:
    (folder / manifest.NAME).unlink()
    (folder / manifest.NAME).mkdir()
    with pytest.raises(manifest.ManifestError, match=r"manifest\.json cannot be written: "):
        manifest.write(folder)
    assert [path.name for path in folder.glob(".*")] == []
