from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from engines import quantize
from engines.making import MakingError

LLAMA = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "head_dim": 64}


def a_model(folder: Path, **config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**LLAMA, **config}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_a_model_that_can_be_quantised_passes(tmp_path: Path) -> None:
    quantize.check(a_model(tmp_path / "model"), tmp_path / "out", 64)


def test_a_group_that_does_not_divide_names_the_one_that_does(tmp_path: Path) -> None:
    with pytest.raises(MakingError, match=r"576 input channels, which groups of 128 .* use --group-size 64"):
        quantize.check(a_model(tmp_path / "model"), tmp_path / "out", 128)


def test_widths_of_a_text_config_count(tmp_path: Path) -> None:
    model = a_model(tmp_path / "model", text_config={"hidden_size": 100})
    with pytest.raises(MakingError, match="cannot be quantised in groups"):
        quantize.check(model, tmp_path / "out", 64)


def test_a_quantised_model_is_refused(tmp_path: Path) -> None:
    model = a_model(tmp_path / "model", quantization_config={"quant_method": "awq"})
    with pytest.raises(MakingError, match=r"quantised already \(awq\)"):
        quantize.check(model, tmp_path / "out", 64)


def test_an_existing_folder_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(MakingError, match="is there already"):
        quantize.check(a_model(tmp_path / "model"), tmp_path / "out", 64)


def test_other_formats_are_not_read(tmp_path: Path) -> None:
    model = a_model(tmp_path / "model")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(MakingError, match=r"no \*\.safetensors"):
        quantize.check(model, tmp_path / "out", 64)


def test_a_folder_without_a_model_is_said(tmp_path: Path) -> None:
    with pytest.raises(MakingError, match=r"is not a model folder: config\.json"):
        quantize.check(tmp_path, tmp_path / "out", 64)


def test_a_failed_run_leaves_nothing(tmp_path: Path) -> None:
    false = tmp_path / "python"
    false.write_text("#!/bin/sh\necho 'no memory left'\nexit 3\n")
    false.chmod(0o755)
    model = a_model(tmp_path / "model")
    with pytest.raises(MakingError, match=r"exit code 3:\n    no memory left") as failed:
        quantize.make(model, tmp_path / "out", python=false, home=tmp_path / "home", group=64)
    assert str(tmp_path / "home" / "logs" / "quantize.log") in str(failed.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "model", "python"]


def test_progress_reaches_the_caller_and_the_result_has_a_manifest(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\n"
        "import os\n"
        "print('printed by a library')\n"
        'line = b\'{"message": "quantising", "done": 1, "total": 2}\\n\'\n'
        "os.write(int(os.environ['DUALGAUGE_PROGRESS_FD']), line)\n"
        f"os.mkdir({str(tmp_path / '.out.partial')!r})\n"
        f"open({str(tmp_path / '.out.partial' / 'config.json')!r}, 'w').write('{{}}')\n"
    )
    python.chmod(0o755)
    model = a_model(tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    told: list[tuple[str, int | None, int | None]] = []
    quantize.make(
        model,
        tmp_path / "out",
        python=python,
        home=tmp_path / "home",
        group=64,
        progress=lambda message, done=None, total=None: told.append((message, done, total)),
    )
    assert told == [("quantising", 1, 2), ("writing the manifest", None, None)]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "chat_template.jinja", "manifest.json"}
