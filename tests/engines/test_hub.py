"""The download of a model from a hub: a real client against a hub of our own on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from engines import hub, hub_fetch
from engines.making import MakingError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"w" * 300_000,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"pickle",
    "original/model.safetensors": b"twice",
    "README.md": b"# hi",
}


class Hub(ThreadingHTTPServer):
    """The few routes of the Hugging Face hub that a download uses, for one model, `org/model`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = dict(FILES)
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(f"{self.command} {path}")
        if path.startswith("/api/models/org/model/tree/"):
            self.reply(200, json.dumps([self.entry(name) for name in self.server.files]).encode(), body)
        elif path in ("/api/models/org/model", "/api/models/org/model/revision/main"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in self.server.files.items()]
            info = {"id": "org/model", "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
            self.reply(200, json.dumps(info).encode(), body)
        elif path.startswith(f"/org/model/resolve/{COMMIT}/"):
            data = self.server.files[path.removeprefix(f"/org/model/resolve/{COMMIT}/")]
            etag = hashlib.sha1(data).hexdigest()
            self.reply(200, data, body, etag=f'"{etag}"', x_repo_commit=COMMIT)
        elif path.startswith("/api/models/org/gated"):
            self.reply(403, b"{}", body, x_error_code="GatedRepo")
        else:
            self.reply(404, b"{}", body, x_error_code="RepoNotFound")

    def entry(self, name: str) -> dict[str, object]:
        data = self.server.files[name]
        return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def reply(self, status: int, data: bytes, body: bool, **headers: str) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def env(url: str, cache: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {**kept, "HF_ENDPOINT": url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}


def fetch(model: str, environment: dict[str, str]) -> tuple[Path, list[tuple[str, int | None, int | None]]]:
    told: list[tuple[str, int | None, int | None]] = []

    def progress(message: str, done: int | None = None, total: int | None = None) -> None:
        told.append((message, done, total))

    return hub.fetch(model, Path(sys.executable), progress, environment), told


def test_what_a_server_needs_is_fetched_and_nothing_else(server: Hub, tmp_path: Path) -> None:
    folder, told = fetch("org/model", env(server.url, tmp_path))
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert told[0] == ("looking for org/model", None, None)


def test_the_second_time_nobody_is_asked(server: Hub, tmp_path: Path) -> None:
    first, _ = fetch("org/model", env(server.url, tmp_path))
    server.asked.clear()
    second, _ = fetch("org/model", env(server.url, tmp_path))
    assert second == first
    assert server.asked == []


def test_a_copy_that_lacks_a_shard_is_completed(server: Hub, tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    server.files = {
        "config.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model-1.safetensors": b"one",
        "model-2.safetensors": b"two",
    }
    folder, _ = fetch("org/model", env(server.url, tmp_path))
    (folder / "model-2.safetensors").unlink()
    again, _ = fetch("org/model", env(server.url, tmp_path))
    assert (again / "model-2.safetensors").read_bytes() == b"two"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("org/none", "the hub has no model org/none"),
        ("org/gated", "asks for a licence"),
    ],
)
def test_a_model_that_cannot_be_had(server: Hub, tmp_path: Path, model: str, message: str) -> None:
    with pytest.raises(MakingError, match=message):
        fetch(model, env(server.url, tmp_path))


def test_weights_that_could_carry_code_are_not_loaded(server: Hub, tmp_path: Path) -> None:
    server.files = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    with pytest.raises(MakingError, match="no safetensors"):
        fetch("org/model", env(server.url, tmp_path))
    assert not any("resolve" in asked for asked in server.asked)


def test_offline_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(MakingError, match="not in the cache and the hub cannot be reached"):
        fetch("org/model", env("http://127.0.0.1:9", tmp_path))


def test_a_python_without_the_client_is_a_clear_end(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho No module named x >&2\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(MakingError, match="exit code 3: No module named x"):
        hub.fetch("org/model", python, lambda *_: None)


@pytest.mark.parametrize(
    ("name", "is_wanted"),
    [
        ("model-00001-of-00002.safetensors", True),
        ("config.json", True),
        ("tokenizer.model", True),
        ("merges.txt", True),
        ("original/consolidated.00.pth", False),
        ("onnx/model.onnx", False),
        ("model.gguf", False),
        ("modeling_custom.py", False),
    ],
)
def test_which_files_are_wanted(name: str, is_wanted: bool) -> None:
    assert hub_fetch.wanted(name) is is_wanted
