"""Well-known open models that come as a 16-bit and an AWQ checkpoint.

Sizes are computed from each model's shape, as its `config.json` on the Hugging Face hub gives it; the tests
hold them against the parameter counts and file sizes that are published there. AWQ here is AutoAWQ's GEMM
layout with groups of 128: 4 bits a weight, and for each group of an output column one 16-bit scale and one
4-bit zero point; embeddings, `lm_head` and norms stay 16-bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engines.checkpoint import Facts
from engines.home import DEMO_PREFIX
from engines.kv_cache import Cache, Layer
from engines.overhead import Width

AWQ_GROUP = 128
DEMO_GROUP = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder-only transformer with grouped-query attention and a gated MLP, as `config.json` names it."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    attention_bias: bool = False
    query_key_norm: bool = False

    def tensors(self) -> Iterator[tuple[str, int, bool]]:
        """Name, elements, and whether AWQ quantises it, of every tensor."""
        queries, pairs = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = {"q": queries, "k": pairs, "v": pairs}
        yield "model.embed_tokens.weight", self.vocabulary * self.hidden, False
        for at in range(self.layers):
            layer = f"model.layers.{at}"
            for name, size in attention.items():
                yield f"{layer}.self_attn.{name}_proj.weight", self.hidden * size, True
                if self.attention_bias:
                    yield f"{layer}.self_attn.{name}_proj.bias", size, False
            yield f"{layer}.self_attn.o_proj.weight", queries * self.hidden, True
            if self.query_key_norm:
                yield f"{layer}.self_attn.q_norm.weight", self.head_dim, False
                yield f"{layer}.self_attn.k_norm.weight", self.head_dim, False
            for name in ("gate", "up", "down"):
                yield f"{layer}.mlp.{name}_proj.weight", self.hidden * self.intermediate, True
            yield f"{layer}.input_layernorm.weight", self.hidden, False
            yield f"{layer}.post_attention_layernorm.weight", self.hidden, False
        yield "model.norm.weight", self.hidden, False
        if not self.tied:
            yield "lm_head.weight", self.vocabulary * self.hidden, False

    @property
    def parameters(self) -> int:
        return sum(elements for _, elements, _ in self.tensors())

    def facts(self, group: int | None, context: int) -> Facts:
        """Of the AWQ checkpoint with groups of so many, or of the 16-bit one."""
        sizes = {
            name: elements * (4 * group + 16 + 4) // (8 * group) if group and quantised else 2 * elements
            for name, elements, quantised in self.tensors()
        }
        return Facts(
            weights=sum(sizes.values()),
            width=Width(self.hidden, self.intermediate, self.vocabulary, four_bit=group is not None),
            cache=Cache((Layer(2 * self.kv_heads * self.head_dim),) * self.layers),
            context=context,
            tensors=sizes,
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """One model as two checkpoints of a hub. `max_context` is what both were made for, in tokens; `gated`:
    asks for a licence, so it is never picked unasked."""

    name: str
    exact: str
    awq: str
    shape: Shape
    max_context: int = 32768
    args: tuple[str, ...] = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    gated: bool = False


def _qwen2(*, layers: int, hidden: int, intermediate: int, heads: int, kv: int, tied: bool = False) -> Shape:
    vocabulary = 151936 if tied else 152064
    head_dim = hidden // heads
    return Shape(layers, hidden, intermediate, heads, kv, head_dim, vocabulary, tied, attention_bias=True)


def _qwen3(*, layers: int, hidden: int, intermediate: int, heads: int, tied: bool = False) -> Shape:
    return Shape(layers, hidden, intermediate, heads, 8, 128, 151936, tied, query_key_norm=True)


_LLAMA_ARGS = ("--enable-auto-tool-choice", "--tool-call-parser", "llama3_json")
_QWEN3_ARGS = ("--reasoning-parser", "qwen3", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")

PAIRS = (
    Pair(
        "qwen2.5-0.5b",
        "Qwen/Qwen2.5-0.5B-Instruct",
        "Qwen/Qwen2.5-0.5B-Instruct-AWQ",
        _qwen2(layers=24, hidden=896, intermediate=4864, heads=14, kv=2, tied=True),
    ),
    Pair(
        "qwen2.5-1.5b",
        "Qwen/Qwen2.5-1.5B-Instruct",
        "Qwen/Qwen2.5-1.5B-Instruct-AWQ",
        _qwen2(layers=28, hidden=1536, intermediate=8960, heads=12, kv=2, tied=True),
    ),
    Pair(
        "qwen3-4b",
        "Qwen/Qwen3-4B",
        "Qwen/Qwen3-4B-AWQ",
        _qwen3(layers=36, hidden=2560, intermediate=9728, heads=32, tied=True),
        max_context=40960,
        args=_QWEN3_ARGS,
    ),
    Pair(
        "qwen2.5-7b",
        "Qwen/Qwen2.5-7B-Instruct",
        "Qwen/Qwen2.5-7B-Instruct-AWQ",
        _qwen2(layers=28, hidden=3584, intermediate=18944, heads=28, kv=4),
    ),
    Pair(
        "llama-3.1-8b",
        "meta-llama/Llama-3.1-8B-Instruct",
        "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4",
        Shape(32, 4096, 14336, 32, 8, 128, 128256, tied=False),
        max_context=131072,
        args=_LLAMA_ARGS,
        gated=True,
    ),
    Pair(
        "qwen3-8b",
        "Qwen/Qwen3-8B",
        "Qwen/Qwen3-8B-AWQ",
        _qwen3(layers=36, hidden=4096, intermediate=12288, heads=32),
        max_context=40960,
        args=_QWEN3_ARGS,
    ),
    Pair(
        "qwen2.5-14b",
        "Qwen/Qwen2.5-14B-Instruct",
        "Qwen/Qwen2.5-14B-Instruct-AWQ",
        _qwen2(layers=48, hidden=5120, intermediate=13824, heads=40, kv=8),
    ),
    Pair(
        "qwen3-14b",
        "Qwen/Qwen3-14B",
        "Qwen/Qwen3-14B-AWQ",
        _qwen3(layers=40, hidden=5120, intermediate=17408, heads=40),
        max_context=40960,
        args=_QWEN3_ARGS,
    ),
    Pair(
        "qwen3-32b",
        "Qwen/Qwen3-32B",
        "Qwen/Qwen3-32B-AWQ",
        _qwen3(layers=64, hidden=5120, intermediate=25600, heads=64),
        max_context=40960,
        args=_QWEN3_ARGS,
    ),
    Pair(
        "llama-3.1-70b",
        "meta-llama/Llama-3.1-70B-Instruct",
        "hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4",
        Shape(80, 8192, 28672, 64, 8, 128, 128256, tied=False),
        max_context=131072,
        args=_LLAMA_ARGS,
        gated=True,
    ),
)
"""From the smallest to the largest; of two that are equally large, the preferred one comes last."""

DEMO = Shape(30, 576, 1536, 9, 3, 64, 49152, tied=True)
"""SmolLM2-135M."""
DEMO_EXACT = DEMO_PREFIX + "smollm2-135m-bf16"
DEMO_AWQ = DEMO_PREFIX + "smollm2-135m-awq"
DEMO_CONTEXT = 8192


def find(model: str) -> Facts | None:
    """The facts of a model, where the table knows its name."""
    if model in (DEMO_EXACT, DEMO_AWQ):
        return DEMO.facts(DEMO_GROUP if model == DEMO_AWQ else None, DEMO_CONTEXT)
    for pair in PAIRS:
        if model in (pair.exact, pair.awq):
            return pair.shape.facts(AWQ_GROUP if model == pair.awq else None, pair.max_context)
    return None


def names() -> tuple[str, ...]:
    """Every name of the table."""
    return tuple(name for pair in PAIRS for name in (pair.exact, pair.awq))
