"""`up` with an engine of kind `llama.cpp`: real processes, and a stand-in for llama-server."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.engines import gguf_files
from tests.gateway.test_cli_up import FAKE, LONG, Site


class GgufSite(Site):
    def write(self, **_: object) -> None:
        model = gguf_files.write(self.folder / "model" / "m.gguf")
        binary = self.folder / "llama-server"
        start = f"exec {shlex.quote(sys.executable)} {shlex.quote(str(FAKE))} --served-model-name smollm2"
        binary.write_text(f'#!/bin/sh\necho "$@" > {shlex.quote(str(self.folder / "argv"))}\n{start} "$@"\n')
        binary.chmod(0o755)
        engine = {"name": "fast-0", "tier": "fast", "kind": "llama.cpp", "precision": "q4_1"}
        engine |= {"model": f"./model/{model.name}", "port": str(self.fast), "binary": "./llama-server"}
        fields = ", ".join(f"{key}: {value}" for key, value in engine.items())
        self.config.write_text(
            f"listen: 127.0.0.1:{self.listen}\nadmin: 127.0.0.1:{self.admin}\nmodel: smollm2\n"
            f"tiers: [fast]\npolicy: policy.yaml\nengines:\n  - {{{fields}}}\n"
        )
        (self.folder / "policy.yaml").write_text(
            "version: 1\nrules:\n  - {name: all, send: fast, if_unavailable: fail}\n"
        )


@pytest.fixture
def site(tmp_path: Path) -> Iterator[GgufSite]:
    site = GgufSite(tmp_path)
    yield site
    site.close()


def test_up_starts_llama_server_and_asks_it(site: GgufSite) -> None:
    result = site.run("up", "-d")
    assert result.returncode == 0, result.stderr
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "hello"}]}
    answer = httpx2.post(f"{site.base}/v1/chat/completions", json=body, timeout=LONG)
    assert answer.status_code == 200
    assert answer.headers["x-dualgauge-engine"] == "fast-0"
    argv = (site.folder / "argv").read_text()
    assert f"--model {site.folder / 'model' / 'm.gguf'}" in argv
    assert "--no-slots" in argv
    assert site.status()["engines"][0]["state"] == "ready"


def test_c32_a_page_saved_as_a_gguf_file_is_refused_before_anything_starts(site: GgufSite) -> None:
    (site.folder / "model" / "m.gguf").write_text("<!doctype html>")
    result = site.run("up")
    assert result.returncode == 1
    assert "model/m.gguf is no GGUF file: it does not begin with `GGUF`" in result.stderr
    assert not (site.folder / "argv").exists()


def test_a_dangerous_template_in_a_gguf_file_is_refused(site: GgufSite) -> None:
    danger = gguf_files.entry("tokenizer.chat_template.tool_use", "{{ ''.__class__ }}")
    gguf_files.write(site.folder / "model" / "m.gguf", entries=[danger])
    result = site.run("up")
    assert result.returncode == 1
    assert "the chat template `tool_use` is refused" in result.stderr
    assert not (site.folder / "argv").exists()


@pytest.mark.parametrize("folder", [False, True])
def test_a_server_that_may_not_be_run_is_told_by_its_path(site: GgufSite, folder: bool) -> None:
    server = site.folder / "llama-server"
    server.chmod(0o644)
    if folder:
        server.unlink()
        server.mkdir()
    result = site.run("up")
    assert result.returncode == 1
    assert f"`binary` {server} is no program" in result.stderr
