"""Who counts tokens: engines of a kind that knows the endpoint in vLLM's shape, whatever their tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.client import ask
from tests.support.engine import FakeEngine, engines, reply
from tests.support.serving import serving

ASKED = {"model": "smollm2", "prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
PATHS = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")


def vllm(engine: FakeEngine, name: str = "fast-0") -> dict[str, Any]:
    return {"name": name, "tier": "fast", "kind": "external", "url": engine.url, "precision": "awq"}


def gguf(engine: FakeEngine) -> dict[str, Any]:
    kind = {"kind": "llama.cpp", "model": "./x.gguf", "port": engine.port}
    return {"name": "gguf-0", "tier": "fast", "precision": "q4_1", **kind}


def hosted() -> dict[str, Any]:
    kind = {"kind": "hosted", "model": "openai/gpt-5"}
    return {"name": "overflow-0", "tier": "overflow", "precision": "hosted", **kind}


@pytest.mark.parametrize("path", PATHS)
async def test_a_hosted_engine_is_not_asked(tmp_path: Path, path: str) -> None:
    engine = FakeEngine(reply({"count": 1}))
    more: dict[str, Any] = {"tiers": ["overflow", "fast", "exact"]}
    async with (
        engines(engine),
        serving(tmp_path, {}, wait=False, engines=[hosted(), vllm(engine)], **more) as served,
    ):
        for name in ("overflow-0", "fast-0"):
            served.mark(name, "ready")
        answer = await ask(served.port, path, ASKED)
        assert (answer.status, answer.headers["x-dualgauge-engine"]) == (200, "fast-0")
        assert served.clean


@pytest.mark.parametrize("path", PATHS[:2])
async def test_a_llama_server_is_not_asked_what_it_knows_in_another_shape(tmp_path: Path, path: str) -> None:
    other, engine = FakeEngine(reply({"tokens": []})), FakeEngine(reply({"count": 1}))
    async with (
        engines(other, engine),
        serving(tmp_path, {}, engines=[gguf(other), vllm(engine)]) as served,
    ):
        for model in ("smollm2", "smollm2:fast"):
            assert (await ask(served.port, path, {**ASKED, "model": model})).json == {"count": 1}
    assert other.generations == 0


@pytest.mark.parametrize("model", ["smollm2", "smollm2:fast"])
async def test_where_no_engine_counts_it_is_a_404(tmp_path: Path, model: str) -> None:
    other = FakeEngine(reply({"tokens": []}))
    async with engines(other), serving(tmp_path, {}, engines=[gguf(other)]) as served:
        answer = await ask(served.port, "/tokenize", {**ASKED, "model": model})
        assert answer.status == 404
        assert answer.json["error"]["message"] == f"no engine of `{model}` has /tokenize"
