from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines.contents import named, problems
from tests.engines import gguf_files, model_folders

DANGEROUS = "{{ ''.__class__ }}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folders.make(tmp_path / "model")


def test_numbers_configuration_and_a_tokenizer_are_welcome(folder: Path) -> None:
    assert problems(folder, ["--max-model-len", "8192"]) == []


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "a.pt", "deep/inside/a.PTH", "training_args.pkl", "a.ckpt", "a.npz", "a.h5"]
)
def test_formats_that_can_run_code_are_refused_unless_allowed(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"\x80\x04.")
    (found,) = problems(folder)
    assert name in found
    assert "allow: [pickle]" in found
    assert problems(folder, allow=["pickle"]) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("modeling_mine.py", "import os"),
        ("config.json", json.dumps({"auto_map": {"AutoModel": "modeling_mine.Mine"}})),
        ("config.json", json.dumps({"text_config": {"auto_map": {"AutoModel": "x"}}})),
        ("tokenizer_config.json", json.dumps({"auto_map": {"AutoTokenizer": ["x", None]}})),
    ],
)
def test_code_is_refused_unless_allowed(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (found,) = problems(folder)
    assert name in found
    assert "allow: [code]" in found
    assert problems(folder, allow=["code"]) == []


@pytest.mark.parametrize("name", ["m.gguf", "m.GGUF", "m.html", "m"])
def test_a_file_that_is_the_model_is_gguf_whatever_its_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("<!doctype html>")
    (found,) = problems(path)
    assert f"{path} is no GGUF file" in found


def test_every_file_of_a_split_model_is_looked_at(tmp_path: Path) -> None:
    first, second = (tmp_path / f"m-0000{at}-of-00002.gguf" for at in (1, 2))
    gguf_files.write(first)
    assert problems(first) == [f"{second} cannot be read: No such file or directory"]
    gguf_files.write(second, part=1)
    assert problems(first) == []
    assert problems(tmp_path) == []
    second.write_text("<html>")
    (found,) = problems(first)
    assert f"{second} is no GGUF file" in found


def test_weights_in_capitals_are_weights(folder: Path) -> None:
    (folder / "model.SAFETENSORS").write_bytes(b"no header")
    (found,) = problems(folder)
    assert "model.SAFETENSORS" in found


def test_an_empty_auto_map_names_no_code(folder: Path) -> None:
    (folder / "config.json").write_text('{"auto_map": {}}')
    assert problems(folder) == []


@pytest.mark.parametrize("flag", ["--trust-remote-code", "--trust_remote_code", "--trust-remote-code=true"])
def test_running_a_models_code_by_flag_is_refused_unless_allowed(folder: Path, flag: str) -> None:
    assert [found for found in problems(folder, [flag]) if "--trust-remote-code" in found]
    assert problems(folder, [flag], ["code"]) == []


def test_a_dangerous_template_is_refused_with_its_line_unless_allowed(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(f"\n{DANGEROUS}")
    (found,) = problems(folder)
    assert "`default` is refused, line 2: the attribute `__class__`" in found
    assert problems(folder, allow=["template"]) == []


@pytest.mark.parametrize("as_file", [True, False])
def test_a_dangerous_template_by_flag_is_refused(folder: Path, tmp_path: Path, as_file: bool) -> None:
    given = DANGEROUS
    if as_file:
        (tmp_path / "t.jinja").write_text(DANGEROUS)
        given = str(tmp_path / "t.jinja")
    (found,) = problems(folder, ["--chat-template", given])
    assert "__class__" in found


def test_weights_with_a_broken_header_are_refused_whatever_is_allowed(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    gguf_files.write(folder / "m.gguf", version=9)
    found = problems(folder, allow=["pickle", "code", "template"])
    assert [said for said in found if "no safetensors file" in said]
    assert [said for said in found if "version 9" in said]


def test_a_gguf_file_by_itself_is_checked_with_its_template(tmp_path: Path) -> None:
    (tmp_path / "other.bin").write_bytes(b"")
    assert problems(gguf_files.write(tmp_path / "good.gguf")) == []
    bad = [gguf_files.entry("tokenizer.chat_template.tool", DANGEROUS)]
    (found,) = problems(gguf_files.write(tmp_path / "bad.gguf", entries=bad))
    assert "`tool` is refused" in found


def test_weights_beside_a_tokenizer_are_not_opened_with_it(folder: Path) -> None:
    names = {path.name for path in named(["--tokenizer", str(folder)])}
    assert "tokenizer.json" in names
    assert "model.safetensors" not in names


def test_a_tokenizer_of_another_folder_is_looked_at_too(folder: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    args = ["--tokenizer", str(tokens)]
    (tokens / "tokenizer_config.json").write_text(json.dumps({"chat_template": DANGEROUS}))
    (tokens / "vocab.pkl").write_bytes(b"\x80\x04.")
    found = problems(folder, args)
    assert any(f"{tokens} (of `args`): vocab.pkl can run code" in said for said in found)
    assert any(f"{tokens} (of `args`): the chat template" in said for said in found)
    assert problems(folder, args, ["pickle", "template"]) == []
