"""What a vLLM takes of its share of a GPU beside weights and KV cache: estimates, fitted to published logs.

An engine measures this when it starts, with one forward pass over as many tokens as it may batch and one
round of sampling for as many requests as it may run; the larger of the two counts. The constants are fitted
to the startup logs in `tests/engines/published.py`, which name their sources; the tests say how near they
come.
"""

from __future__ import annotations

from dataclasses import dataclass

from engines.hardware import GIB, MIB

LOGITS = 7.2
"""Copies of the 32-bit logits that sampling holds at once, in vLLM since 0.26."""
FOUR_BIT = int(0.8 * GIB)
"""What the kernels for 4-bit weights take in a forward pass of prefill size."""
GRAPHS = int(0.33 * GIB)
GRAPH = MIB
"""CUDA graphs: once, and for each size that is captured. Since 0.21 they are part of the share."""
NON_TORCH = int(0.13 * GIB)
"""Libraries' own buffers within the share. The CUDA context is outside of it."""
LARGE = 70 * GIB
HUGE = 160 * GIB


@dataclass(frozen=True, slots=True)
class Work:
    """How much an engine does at a time: `batched` tokens in a pass, `sequences` running requests."""

    batched: int
    sequences: int
    graphs: bool = True


@dataclass(frozen=True, slots=True)
class Width:
    """Elements of one token inside the model. `intermediate` is what one token passes through: for a mixture
    of experts, that of all experts it is sent to."""

    hidden: int
    intermediate: int
    vocabulary: int
    four_bit: bool = False


def defaults(gpu: int, name: str) -> Work:
    """vLLM's own, for a GPU of so many bytes: `EngineArgs.get_batch_defaults` of 0.32, for a server."""
    if gpu >= HUGE:
        return Work(16384, 1024)
    if gpu >= LARGE and "a100" not in name.lower():
        return Work(8192, 1024)
    return Work(2048, 256)


def activations(width: Width, work: Work, logits: float = LOGITS) -> int:
    """Bytes of the larger of a forward pass and a round of sampling.

    The widest moment of a pass is in the MLP: its gate and up projections, their product, and the residual.
    """
    layer = work.batched * 2 * (3 * width.intermediate + width.hidden)
    forward = layer + (FOUR_BIT if width.four_bit else 0)
    return max(forward, int(logits * work.sequences * width.vocabulary * 4))


def graphs(work: Work) -> int:
    """Bytes of CUDA graphs: one of each captured size for mixed batches, and one for pure decoding."""
    if not work.graphs:
        return 0
    mixed, decoding = (_captured(size) for size in (min(2 * work.sequences, 512), work.sequences))
    return GRAPHS + GRAPH * (mixed + decoding)


def _captured(largest: int) -> int:
    """How many batch sizes up to the largest: 1, 2, 4, then in steps of 8 to 256 and of 16 beyond."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    return sum(size <= largest for size in sizes)
