"""Well-known open models that come as a 16-bit and an AWQ checkpoint, and which pair fits a machine.

Sizes are computed from each model's shape, as its `config.json` on the Hugging Face hub gives it; the tests
hold them against the parameter counts and file sizes that are published there. AWQ here is AutoAWQ's GEMM
layout with groups of 128: 4 bits a weight, and for each group of an output column one 16-bit scale and one
4-bit zero point; embeddings, `lm_head` and norms stay 16-bit. Which pair fits is arithmetic over those sizes;
what an engine needs beside weights and KV cache is an allowance (`ALLOWANCE`, `activations`), not a
measurement: the engine measures its own when it starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engines.hardware import GIB, Gpu, gib

AWQ_GROUP = 128
DEMO_GROUP = 64
UTILISATION = 0.94
"""The part of a GPU's memory that its engines may claim together; vLLM's own default for one is 0.92."""
CONTEXT = GIB // 2
"""A process's CUDA context, bytes: outside of what vLLM charges to its share, so it must stay free."""
ALLOWANCE = GIB // 2
"""CUDA graphs and what the allocator wastes, bytes an engine."""
MIN_GPU = int(7.5 * GIB)
"""Cards sold as 8 GB report a little less than 8 GiB."""
MIN_CAPABILITY = (7, 5)
"""Turing: the oldest GPUs that vLLM's AWQ kernels run on."""
BF16_CAPABILITY = (8, 0)
MIN_KV_TOKENS = 8192
CONTEXTS = (32768, 16384, 8192)
SEQUENCES = 64
BATCHED_TOKENS = 2048


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

    @property
    def linear(self) -> int:
        """Weights in the layers' projections: what AWQ quantises."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def kept(self) -> int:
        """Weights that stay 16-bit: embeddings, head, norms, biases."""
        layer = 2 * self.hidden
        if self.attention_bias:
            layer += (self.heads + 2 * self.kv_heads) * self.head_dim
        if self.query_key_norm:
            layer += 2 * self.head_dim
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * layer + self.hidden

    @property
    def parameters(self) -> int:
        return self.linear + self.kept

    @property
    def exact_bytes(self) -> int:
        """Weights of the 16-bit checkpoint."""
        return 2 * self.parameters

    @property
    def awq_bytes(self) -> int:
        """Weights of the AWQ checkpoint."""
        return self.grouped_bytes(AWQ_GROUP)

    def grouped_bytes(self, group: int) -> int:
        """Weights in AWQ's layout with groups of so many."""
        return self.linear * (4 * group + 16 + 4) // (8 * group) + 2 * self.kept

    @property
    def kv_token_bytes(self) -> int:
        """16-bit keys and values of one token over all layers. AWQ does not change it."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2

    @property
    def activations(self) -> int:
        """Allowance for one forward pass: the widest layer over a prefill batch, and the sampler's logits."""
        widest = 2 * self.intermediate + 4 * self.hidden
        return BATCHED_TOKENS * widest * 2 + 3 * SEQUENCES * self.vocabulary * 4


@dataclass(frozen=True, slots=True)
class Pair:
    """One model as two checkpoints of a hub. `gated`: asks for a licence, so it is never picked unasked."""

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
        args=_QWEN3_ARGS,
    ),
    Pair(
        "qwen3-32b",
        "Qwen/Qwen3-32B",
        "Qwen/Qwen3-32B-AWQ",
        _qwen3(layers=64, hidden=5120, intermediate=25600, heads=64),
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
DEMO_PREFIX = "demo/"
DEMO_EXACT = DEMO_PREFIX + "smollm2-135m-bf16"
DEMO_AWQ = DEMO_PREFIX + "smollm2-135m-awq"
_DEMO = "the demo pair, SmolLM2-135M-Instruct in AWQ and bf16, runs on the CPU"


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one checkpoint goes: `share` of the GPU's memory, `kv_bytes` of it for the KV cache."""

    tier: str
    model: str
    precision: str
    gpu: int
    share: float
    weights: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The pair for this machine, or None for the demo pair on the CPU, and why, one sentence a reason.

    `context` is the longest request in tokens; `half`: these GPUs have no bfloat16, all is float16.
    """

    pair: Pair | None
    slots: tuple[Slot, ...]
    context: int
    reasons: tuple[str, ...]
    half: bool = False


def find(model: str) -> tuple[Shape, int] | None:
    """A model's shape and the bytes of its weights, where the table knows its name."""
    if model == DEMO_EXACT:
        return DEMO, DEMO.exact_bytes
    if model == DEMO_AWQ:
        return DEMO, DEMO.grouped_bytes(DEMO_GROUP)
    for pair in PAIRS:
        if model == pair.exact:
            return pair.shape, pair.shape.exact_bytes
        if model == pair.awq:
            return pair.shape, pair.shape.awq_bytes
    return None


def budget(gpu: Gpu, engines: int) -> int:
    """Bytes that engines on this GPU may claim together.

    What others hold already is not charged to a vLLM that starts later, but it must find its share free.
    """
    return max(0, min(int(gpu.visible * UTILISATION), gpu.free - engines * CONTEXT))


def choose(gpus: Sequence[Gpu]) -> Choice:
    """The largest pair of the table that fits: one engine each on two GPUs, or both on the roomiest."""
    usable = [gpu for gpu in gpus if gpu.total >= MIN_GPU and not _older(gpu, MIN_CAPABILITY)]
    if not usable:
        return Choice(None, (), 4096, (_why_cpu(gpus),))
    chosen = sorted(usable, key=lambda gpu: (-budget(gpu, 1), gpu.index))[:2]
    layouts = [chosen, chosen[:1]] if len(chosen) > 1 else [chosen]
    for pair in reversed(PAIRS):
        for layout in layouts:
            choice = None if pair.gated else _place(pair, layout)
            if choice is not None:
                return choice
    reason = f"no pair of the table fits into {gib(chosen[0].free)} of free GPU memory"
    return Choice(None, (), 4096, (f"{reason}: {_DEMO}",))


def _older(gpu: Gpu, capability: tuple[int, int]) -> bool:
    return gpu.capability is not None and gpu.capability < capability


def _why_cpu(gpus: Sequence[Gpu]) -> str:
    if not gpus:
        return "nvidia-smi found no GPU: " + _DEMO
    seen = ", ".join(f"{gpu.name} with {gib(gpu.total)}" for gpu in gpus)
    return f"{seen}: too small or too old for a pair (8 GB and compute capability 7.5 are needed): {_DEMO}"


def _place(pair: Pair, gpus: Sequence[Gpu]) -> Choice | None:
    """Put the pair on these one or two GPUs (the roomier first), the rest of the memory to the KV caches."""
    shape = pair.shape
    exact = shape.exact_bytes + ALLOWANCE + shape.activations
    awq = shape.awq_bytes + ALLOWANCE + shape.activations
    if len(gpus) == 1:
        spare = (budget(gpus[0], 2) - exact - awq) // 2
        needs = ((gpus[0], exact + spare), (gpus[0], awq + spare))
        caches = (spare, spare)
    else:
        roomy, other = gpus
        needs = ((roomy, budget(roomy, 1)), (other, budget(other, 1)))
        caches = (needs[0][1] - exact, needs[1][1] - awq)
    tokens = min(caches) // shape.kv_token_bytes
    if tokens < MIN_KV_TOKENS:
        return None
    context = next(size for size in CONTEXTS if size <= min(tokens, pair.max_context))
    old = any(_older(gpu, BF16_CAPABILITY) for gpu in gpus)
    weights = (shape.exact_bytes, shape.awq_bytes)
    names = (("exact", pair.exact, "fp16" if old else "bf16"), ("fast", pair.awq, "awq"))
    slots = [
        Slot(*name, gpu.index, int(need / gpu.visible * 1000) / 1000, weight, cache)
        for name, (gpu, need), weight, cache in zip(names, needs, weights, caches, strict=True)
    ]
    slots.reverse()
    return Choice(pair, tuple(slots), context, _reasons(pair, gpus, slots, context), half=old)


def _reasons(pair: Pair, gpus: Sequence[Gpu], slots: Sequence[Slot], context: int) -> tuple[str, ...]:
    seen = " and ".join(f"GPU {g.index} ({g.name}, {gib(g.free)} of {gib(g.total)} free)" for g in gpus)
    where = "both engines share it" if len(gpus) == 1 else "one engine on each"
    sizes = ", ".join(
        f"{slot.precision} {gib(slot.weights)} of weights and {gib(slot.kv_bytes)} of KV cache "
        f"({slot.kv_bytes // pair.shape.kv_token_bytes:,} tokens)"
        for slot in slots
    )
    return (
        f"{seen}: {where}",
        f"{pair.name} is the largest pair of the table that fits: {sizes}",
        f"requests may be up to {context:,} tokens long",
    )
