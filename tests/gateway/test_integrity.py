"""A model's manifest on the way from its folder to replies and spans, and a start that is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines import manifest
from policies.document import ProblemsError
from tests.engines import model_folders
from tests.gateway.test_cli_up import Site
from tests.support.client import ask
from tests.support.engine import FakeEngine, engines, reply, stream
from tests.support.serving import make, serving
from tests.support.shapes import CHAT
from tests.support.spans import Recorder


def of_folder(engine: FakeEngine, folder: Path, **fields: Any) -> list[dict[str, Any]]:
    return [
        {
            "name": "fast-0",
            "tier": "fast",
            "kind": "vllm",
            "port": engine.port,
            "model": str(folder),
            "precision": "awq",
            **fields,
        }
    ]


@pytest.mark.parametrize("streamed", [False, True])
async def test_replies_and_spans_name_the_manifest_of_the_model(tmp_path: Path, streamed: bool) -> None:
    folder = model_folders.make(tmp_path / "model")
    manifest.write(folder)
    recorder = Recorder.make()
    engine = FakeEngine(stream(CHAT.stream) if streamed else reply(CHAT.reply))
    async with engines(engine):
        parts = of_folder(engine, folder)
        async with serving(tmp_path, {}, engines=parts, tracer=recorder.tracer) as served:
            answer = await ask(served.port, CHAT.path, CHAT.ask(stream=streamed))
            assert answer.headers["x-dualgauge-model-manifest"] == manifest.digest(folder)
            assert (recorder.client().attributes or {})["dualgauge.model_manifest"] == manifest.digest(folder)


async def test_a_model_without_a_manifest_is_not_named(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine):
        parts = of_folder(engine, model_folders.make(tmp_path / "model"))
        async with serving(tmp_path, {}, engines=parts) as served:
            answer = await ask(served.port, CHAT.path, CHAT.ask())
            assert "x-dualgauge-model-manifest" not in answer.headers


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"integrity": {"public_key": "missing.pem"}}, r"there is no .*missing\.pem"),
        ({"engine": {"manifest": "sha256:abc"}}, "dualgauge models manifest"),
        ({"engine": {"allow": ["everything"]}}, "everything"),
        ({"engine": {"kind": "external", "url": "http://h:1", "allow": ["code"]}}, "started here can be"),
    ],
)
def test_settings_that_cannot_hold_are_refused(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    engine = {"name": "a", "tier": "fast", "kind": "vllm", "model": "x/y", "precision": "awq"}
    engine |= settings.pop("engine", {})
    with pytest.raises(ProblemsError, match=said):
        make(tmp_path, {}, engines=[engine], **settings)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Engines whose model has a manifest."""
    site = Site(tmp_path)
    model_folders.make(tmp_path / "model")
    manifest.write(tmp_path / "model")
    return site


def test_c32_up_refuses_a_model_with_a_flipped_byte_and_leaves_nothing_running(site: Site) -> None:
    weights = site.folder / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    result = site.run("up")
    assert result.returncode == 1
    assert "fast-0 was not started: its model is not what it should be" in result.stderr
    assert "model.safetensors has other contents than when it was made: sha256 " in result.stderr
    assert not site.paths.log("fast-0").exists()


def test_c32_up_refuses_a_pickle_in_the_folder_by_its_name(site: Site) -> None:
    (site.folder / "model" / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    manifest.write(site.folder / "model")
    result = site.run("up")
    assert result.returncode == 1
    assert "pytorch_model.bin can run code when it is opened" in result.stderr
    assert not site.paths.log("fast-0").exists()


def test_up_refuses_a_model_that_nobody_has_signed(site: Site) -> None:
    (site.folder / "key.pem").write_text("-----BEGIN PUBLIC KEY-----\n")
    site.write(more="integrity: {public_key: key.pem}\n")
    result = site.run("up")
    assert result.returncode == 1
    assert "has no signature (model.sig)" in result.stderr


def test_up_refuses_a_model_without_a_manifest_where_one_is_required(site: Site) -> None:
    (site.folder / "model" / manifest.NAME).unlink()
    site.write(more="integrity: {manifest: required}\n")
    result = site.run("up")
    assert result.returncode == 1
    assert "has no manifest.json" in result.stderr
