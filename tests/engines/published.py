"""What vLLM logged when it started, as others have published it: model, GPU, flags and the figures.

`logits` are the copies of the logits that sampling held in that vLLM: 9.65 where torch sorts them (without
FlashInfer, up to 0.21), 3 where FlashInfer samples, and what `overhead.py` reckons with since 0.26. `graphs`
says whether CUDA graphs were part of the share: since 0.21, with the exceptions that the sources show. Where
a source does not give the memory that CUDA showed, it is reckoned from the card's size in `nvidia-smi`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import catalog, checkpoint
from engines.checkpoint import Facts
from engines.hardware import GIB, MIB, Gpu
from engines.overhead import LOGITS, Width, Work

SORTED = 9.65
FLASHINFER = 3.0

LLM_D = "https://github.com/llm-d/llm-d-benchmark/blob/main/config_explorer/empirical-vllm-memory-results.md"
LEE = "https://github.com/dennislee22/vLLM-benchmarking/blob/main/log"
L4 = (
    "https://github.com/vfarcic/devopstoolkit-live/blob/master/content/ai/"
    "why-your-gpu-fails-at-3-users-llm-inference-isnt-a-compute-problem/_index.md "
    "and https://github.com/vfarcic/inference-demo/blob/main/demo/vllm-16bit.yaml"
)
GPT_OSS: Mapping[str, Any] = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
}
QWEN3_06B: Mapping[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}


def known(model: str) -> Facts:
    facts = catalog.find(model)
    assert facts is not None
    return facts


def shaped(config: Mapping[str, Any]) -> Facts:
    """A model that the table has not: its config.json as it is published, without weights."""
    return checkpoint.of_config(config, {}, Path("config.json"))


@dataclass(frozen=True)
class Log:
    """One start. `kv` and `weights` are GiB, `tokens` those of the KV cache, None where not published."""

    name: str
    source: str
    gpu: Gpu
    share: float
    facts: Facts
    work: Work
    weights: float
    kv: float
    tokens: int | None = None
    context: int = 0
    cuda: float | None = None
    """GiB that CUDA showed, where the source says so."""
    logits: float = LOGITS
    element: int = 2

    @property
    def visible(self) -> int:
        return self.gpu.visible if self.cuda is None else int(self.cuda * GIB)

    @property
    def width(self) -> Width:
        assert self.facts.width is not None
        return self.facts.width


def card(name: str, mib: int) -> Gpu:
    return Gpu(0, name, mib * MIB, mib * MIB)


QWEN = "Qwen/Qwen2.5-7B-Instruct"  # of one shape with Qwen2-7B-Instruct
H100 = card("H100", 81559)
LOGS = (
    Log(
        "RTX 4060 8 GB, Qwen2.5-7B in 4 bits (bitsandbytes), vLLM 0.7.3: no room",
        "https://github.com/vllm-project/vllm/issues/13882",
        card("RTX 4060", 8188),
        0.70,
        known(QWEN),
        Work(4096, 256, graphs=False),
        weights=5.2032,
        kv=-1.05,
        cuda=8.00,
        logits=SORTED,
    ),
    Log(
        "RTX 4080 16 GB, Qwen2.5-7B AWQ, vLLM 0.26.0",
        "https://github.com/akiyax/kvcache-lab/blob/main/docs/phase1-baseline.md",
        card("RTX 4080", 16376),
        0.90,
        known(QWEN + "-AWQ"),
        Work(2048, 256, graphs=False),  # by the source's own sum they were not part of the share
        weights=5.29,
        kv=8.0,
        tokens=149_712,
        context=32768,
        cuda=15.99,
    ),
    Log(
        "RTX 3090 24 GB, Qwen2.5-7B AWQ, vLLM 0.22.1, 8 sequences",
        "https://github.com/javakishore-veleti/LLM-Inference-Serving-Azure-AKS/blob/main/"
        "README_RUNPOD_LOGS_ANALSYS.md",
        card("RTX 3090", 24576),
        0.90,
        known(QWEN + "-AWQ"),
        Work(2048, 8),
        weights=5.29,
        kv=14.43,
        tokens=270_144,
        context=4096,
        logits=FLASHINFER,
    ),
    Log(
        "RTX A5000 24 GB, Qwen3-8B, vLLM 0.21.0, offline",
        "https://github.com/LMCache/LMCache/issues/3430",
        card("RTX A5000", 24564),
        0.9764,
        known("Qwen/Qwen3-8B"),
        Work(8192, 256),
        weights=15.27,
        kv=6.37,
        tokens=46_368,
        context=16384,
        logits=FLASHINFER,
    ),
    Log(
        "L4 24 GB, Qwen3-8B, vLLM 0.27.1",
        L4,
        card("L4", 23034),
        0.90,
        known("Qwen/Qwen3-8B"),
        Work(2048, 256),
        weights=15.27,
        kv=3.14,
        tokens=22_880,
        context=8192,
    ),
    Log(
        "L4 24 GB, Qwen3-8B with weights in fp8, vLLM 0.27.1",
        L4,
        card("L4", 23034),
        0.90,
        known("Qwen/Qwen3-8B"),
        Work(2048, 256),
        weights=9.06,
        kv=9.26,
        tokens=67_424,
        context=8192,
    ),
    Log(
        "L4 24 GB, Qwen3-8B with weights and KV cache in fp8, vLLM 0.27.1",
        L4,
        card("L4", 23034),
        0.90,
        known("Qwen/Qwen3-8B"),
        Work(2048, 256),
        weights=9.06,
        kv=9.26,
        tokens=134_864,
        context=8192,
        element=1,
    ),
    Log(
        "A100 80 GB, a quarter of it, Qwen2-7B, vLLM 0.10.1",
        f"{LEE}/vllm-7B-1gpuA10080GB-0.25GRAM.log",
        card("A100", 81920),
        0.25,
        known(QWEN),
        Work(2048, 256, graphs=False),
        weights=14.2488,
        kv=5.01,
        tokens=93_872,
        context=16384,
        logits=FLASHINFER,
    ),
    Log(
        "A100 80 GB, half of it, Qwen2-7B, vLLM 0.10.1",
        f"{LEE}/vllm-7B-1gpuA10080GB-0.5GRAM.log",
        card("A100", 81920),
        0.50,
        known(QWEN),
        Work(2048, 256, graphs=False),
        weights=14.2488,
        kv=24.83,
        tokens=464_848,
        context=16384,
        logits=FLASHINFER,
    ),
    Log(
        "A100 80 GB, gpt-oss-20b, vLLM 0.19.0",
        "https://myoceane.fr/index.php/ai-vllm-a100-gemma-4/",
        card("A100", 81920),
        0.65,
        shaped(GPT_OSS),
        Work(2048, 256, graphs=False),
        weights=13.72,
        kv=36.56,
        logits=FLASHINFER,
    ),
    Log(
        "H100 80 GB, Llama-3.1-8B",
        LLM_D,
        H100,
        0.90,
        known("meta-llama/Llama-3.1-8B-Instruct"),
        Work(8192, 1024, graphs=False),
        weights=14.99,
        kv=51.38,
        cuda=79.18,
        logits=SORTED,
    ),
    Log(
        "H100 80 GB, Qwen3-0.6B",
        LLM_D,
        H100,
        0.90,
        shaped(QWEN3_06B),
        Work(8192, 1024, graphs=False),
        weights=1.12,
        kv=64.45,
        cuda=79.18,
        logits=SORTED,
    ),
    Log(
        "H100 80 GB, Qwen3-32B",
        LLM_D,
        H100,
        0.90,
        known("Qwen/Qwen3-32B"),
        Work(8192, 1024, graphs=False),
        weights=61.03,
        kv=4.45,
        cuda=79.18,
        logits=SORTED,
    ),
    Log(
        "H100 80 GB, gpt-oss-20b",
        LLM_D,
        H100,
        0.90,
        shaped(GPT_OSS),
        Work(8192, 1024, graphs=False),
        weights=13.47,
        kv=50.28,
        cuda=79.18,
        logits=SORTED,
    ),
)
