"""Copies of the demo pair's folders that were changed: `up` refuses them before it starts an engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines import demo, home
from tests.engines_real.pair import Pair, free_port

pytestmark = pytest.mark.engines

Change = Callable[[dict[str, Any]], None]


@pytest.fixture
def refuse(pair: Pair, tmp_path: Path) -> Callable[[str, Change], str]:
    """What `up` says of the pair whose exact engine has one file changed."""
    made = demo.find(home.models(home.data_home()))  # `pair` has had them made
    assert made is not None

    def refused(name: str, change: Change) -> str:
        folder = tmp_path / "exact"
        folder.mkdir()
        for file in made.exact.iterdir():
            if file.name == "manifest.json":
                continue  # it would say first that a file was changed
            if file.suffix == ".safetensors":
                (folder / file.name).symlink_to(file)
            else:
                shutil.copy(file, folder)
        document = json.loads((folder / name).read_text("utf-8"))
        change(document)
        (folder / name).write_text(json.dumps(document), "utf-8")
        ports = [free_port() for _ in range(4)]
        (tmp_path / "dualgauge.yaml").write_text(
            f"listen: 127.0.0.1:{ports[0]}\nadmin: 127.0.0.1:{ports[1]}\nmodel: smollm2\nengines:\n"
            f"  - {{name: fast-0, tier: fast, kind: vllm, model: '{made.fast}', precision: awq, "
            f"port: {ports[2]}}}\n"
            f"  - {{name: exact-0, tier: exact, kind: vllm, model: '{folder}', precision: bf16, "
            f"port: {ports[3]}}}\n"
        )
        done = subprocess.run(
            [sys.executable, "-m", "gateway.cli", "up"],
            cwd=tmp_path,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 1, done.stdout
        assert not (tmp_path / ".dualgauge" / "logs").exists()
        return done.stderr

    return refused


def test_another_template_is_refused(refuse: Callable[[str, Change], str]) -> None:
    def change(document: dict[str, Any]) -> None:
        document["chat_template"] = document["chat_template"].replace("helpful", "curious")

    said = refuse("tokenizer_config.json", change)
    assert "chat_template: fast-0 and exact-0 differ" in said
    assert "helpful" in said
    assert "curious" in said
    assert "parity: {allow: [chat_template]}" in said


def test_another_tokenizer_is_refused(refuse: Callable[[str, Change], str]) -> None:
    def change(document: dict[str, Any]) -> None:
        vocabulary = document["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    said = refuse("tokenizer.json", change)
    assert "tokenizer: fast-0 and exact-0 differ" in said
    assert "tokenizer.json.model.vocab.a: " in said


def test_another_end_is_refused(refuse: Callable[[str, Change], str]) -> None:
    said = refuse("generation_config.json", lambda document: document.update(eos_token_id=[2, 0]))
    assert "eos: fast-0 and exact-0 differ" in said
