"""What stops an engine from opening its model, over its first start and restarts."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from engines import manifest
from engines.integrity import Checker, Expected, IntegrityError
from engines.manifest import StoppedError
from tests.engines import gguf_files, model_folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = model_folders.make(tmp_path / "model")
    manifest.write(made)
    return made


def refused(checker: Checker) -> str:
    with pytest.raises(IntegrityError) as caught:
        checker.check_now()
    return "\n".join(caught.value.problems)


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_model_as_it_was_made_is_opened(folder: Path) -> None:
    Checker(folder, Expected()).check_now()


def test_a_flipped_byte_of_the_weights_is_refused_with_both_hashes(folder: Path) -> None:
    before = manifest.sha256(folder / "model.safetensors")[:12]
    flip(folder / "model.safetensors")
    after = manifest.sha256(folder / "model.safetensors")[:12]
    assert f"model.safetensors has other contents than when it was made: sha256 {after}…, not {before}…" in (
        refused(Checker(folder, Expected()))
    )


def test_another_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"b": 0}}}))
    assert "tokenizer.json has other contents" in refused(Checker(folder, Expected()))


def test_another_template_is_refused_with_the_lines_that_differ(folder: Path) -> None:
    changed = model_folders.TEMPLATE.replace("{{ message", "You are evil. {{ message")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": changed}))
    said = refused(Checker(folder, Expected()))
    assert "the chat template `default` is another" in said
    assert """- "{{ message['content'] }}\"""" in said
    assert """+ "You are evil. {{ message['content'] }}\"""" in said


def test_a_template_beside_that_would_win_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ 'other' }}")
    said = refused(Checker(folder, Expected()))
    assert "chat_template.jinja is not in the manifest" in said
    assert "the chat template `default` is another" in said


def test_a_template_inside_a_gguf_file_is_pinned_too(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    file = gguf_files.write(folder / "m.gguf")
    manifest.write(folder)
    Checker(file, Expected()).check_now()
    file.write_bytes(file.read_bytes().replace(b"['content']", b"['CONTENT']"))
    assert "the chat template `default` is another" in refused(Checker(file, Expected()))


def test_a_manifest_that_was_written_anew_is_refused_where_it_is_pinned(folder: Path) -> None:
    pinned = manifest.digest(folder)
    flip(folder / "model.safetensors")
    manifest.write(folder)
    Checker(folder, Expected()).check_now()
    assert f"not {pinned}, which the configuration pins" in refused(Checker(folder, Expected(pinned=pinned)))


def test_a_model_without_a_manifest_is_refused_where_one_is_required(tmp_path: Path) -> None:
    folder = model_folders.make(tmp_path / "model")
    Checker(folder, Expected()).check_now()
    assert "dualgauge models manifest" in refused(Checker(folder, Expected(manifest_required=True)))


def test_manifests_of_the_first_version_still_hold(folder: Path) -> None:
    path = folder / manifest.NAME
    old = json.loads(path.read_bytes())
    path.write_text(json.dumps({"version": 1, "files": old["files"]}))
    Checker(folder, Expected()).check_now()


def _flip_weights(folder: Path) -> None:
    flip(folder / "model.safetensors")


def _flip_and_hide(folder: Path) -> None:
    """A change that keeps size and time of change, as a careful intruder makes it."""
    path = folder / "model.safetensors"
    at = path.stat()
    flip(path)
    os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns))


def _new_manifest(folder: Path) -> None:
    flip(folder / "model.safetensors")
    manifest.write(folder)


def _remove_manifest(folder: Path) -> None:
    (folder / manifest.NAME).unlink()


@pytest.mark.parametrize("change", [_flip_weights, _flip_and_hide, _new_manifest, _remove_manifest])
def test_what_changes_while_an_engine_runs_is_refused_at_its_restart(
    folder: Path, change: Callable[[Path], None]
) -> None:
    checker = Checker(folder, Expected())
    checker.check_now()
    change(folder)
    assert refused(checker)
    assert refused(checker)


def test_a_restart_of_an_unchanged_model_reads_nothing_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker = Checker(folder, Expected())
    checker.check_now()
    monkeypatch.setattr(manifest, "sha256", lambda *_: pytest.fail("a file was read again"))
    checker.check_now()


def test_a_model_that_was_mended_is_opened(folder: Path) -> None:
    checker = Checker(folder, Expected())
    flip(folder / "model.safetensors")
    refused(checker)
    flip(folder / "model.safetensors")
    checker.check_now()


@pytest.mark.parametrize("large", [True, False])
def test_the_hubs_cache_is_checked_by_the_names_of_its_files(tmp_path: Path, large: bool) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    made = model_folders.make(tmp_path / "made")
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in made.iterdir():
        data = path.read_bytes()
        name = (hashlib.sha256(data) if large else hashlib.sha1(b"blob %d\0" % len(data) + data)).hexdigest()
        (blobs / name).write_bytes(data)
        (snapshot / path.name).symlink_to(Path("../../blobs") / name)
    Checker(snapshot, Expected()).check_now()
    flip((snapshot / "model.safetensors").resolve())
    assert "model.safetensors is not what was downloaded" in refused(Checker(snapshot, Expected()))


def test_a_link_out_of_a_model_is_refused(tmp_path: Path) -> None:
    folder = model_folders.make(tmp_path / "model")
    (folder / "config.json").rename(tmp_path / "config.json")
    (folder / "config.json").symlink_to(tmp_path / "config.json")
    assert "config.json is a link that leads out" in refused(Checker(folder, Expected()))
    with pytest.raises(manifest.ManifestError, match="is a link"):
        manifest.write(folder)


def test_a_model_that_is_gone_is_refused(folder: Path) -> None:
    checker = Checker(folder, Expected())
    folder.rename(folder.with_name("moved"))
    assert refused(checker)


def test_a_stop_ends_the_reading(folder: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        Checker(folder, Expected()).check_now(stop)


def test_a_cancelled_check_stops_its_reading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, stopped = threading.Event(), threading.Event()

    def slow(_folder: Path, stop: threading.Event) -> list[str]:
        began.set()
        if stop.wait(30):
            stopped.set()
        raise StoppedError

    monkeypatch.setattr(manifest, "problems", slow)

    async def run() -> None:
        task = asyncio.create_task(Checker(folder, Expected()).check())
        await asyncio.to_thread(began.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert stopped.is_set()


@pytest.fixture
def beside_others(tmp_path: Path) -> Path:
    """A GGUF file in a folder of many."""
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "other.gguf").symlink_to("/dev/null")
    (tmp_path / "other.bin").write_bytes(b"\x80\x04.")
    return gguf_files.write(tmp_path / "m.gguf")


def test_what_lies_beside_a_gguf_file_is_not_its_matter(beside_others: Path) -> None:
    Checker(beside_others, Expected()).check_now()


def test_a_gguf_file_that_changed_is_read_again(beside_others: Path) -> None:
    checker = Checker(beside_others, Expected())
    checker.check_now()
    beside_others.write_text("<html>")
    assert "is no GGUF file" in refused(checker)


@pytest.mark.parametrize("flag", ["--chat-template", "--tokenizer"])
def test_what_arguments_name_stays_as_it_was(folder: Path, tmp_path: Path, flag: str) -> None:
    """No manifest tells of it, and a restart must not open what nobody has looked at."""
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    template = tokens / "chat_template.jinja"
    template.write_text("{{ messages }}")
    named = template if flag == "--chat-template" else tokens
    checker = Checker(folder, Expected(args=(flag, str(named))))
    checker.check_now()
    checker.check_now()
    template.write_text("{{ messages[0] }}")
    assert f"{template} (of `args`) is not what it was when the engine was started first" in refused(checker)
    template.write_text("{{ ''.__class__ }}")
    assert "is refused" in refused(checker)
    template.write_text("{{ messages }}")
    checker.check_now()
