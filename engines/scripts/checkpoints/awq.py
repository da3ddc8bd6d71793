"""Activation-aware 4-bit weights (AWQ, Lin et al. 2023, arXiv 2306.00978) for Llama-shaped models.

Input channels that carry large activations matter most. Scaling such a channel of a weight up by s before
rounding, and the activation down by the same s, keeps the product and shrinks the rounding error there. The
inverse is folded into what makes the activation: the norm before it, or the rows of the linear before it.
`s = mean|x| ** alpha`; alpha is searched on a grid for the least error of the linear's output. Then the range
of each group is clipped where that lowers the error further.

Errors are computed from second moments of the inputs, `X^T X`, all that a squared output error needs:
||X (W - Q)^T||^2 = trace((W - Q) X^T X (W - Q)^T).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from .llama import Layer, Shape, Weights, forward_layer

BITS = 4
TOP = 2**BITS - 1
ALPHAS = (0.0, 0.15, 0.3, 0.45, 0.6, 0.75)
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)
SAMPLE_ROWS = 256


@dataclass(frozen=True, slots=True)
class Quantized:
    """A linear (out, in) in groups of input channels: weight = (codes - zeros) * scales.

    `codes` (out, in) 0..15; `zeros` 0..15 and `scales` (rounded to bf16) are (out, in / group).
    """

    codes: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor

    def weight(self) -> torch.Tensor:
        """The weight that an engine sees, fp32 (out, in)."""
        out, groups = self.scales.shape
        grouped = self.codes.view(out, groups, -1)
        return ((grouped - self.zeros[..., None]) * self.scales[..., None]).view(out, -1)


@dataclass(frozen=True, slots=True)
class _Target:
    """Linears that share an input: `names` are quantised together, `source` absorbs the inverse scale."""

    names: tuple[str, ...]
    source: str


TARGETS = (
    _Target(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "input_layernorm"),
    _Target(("self_attn.o_proj",), "self_attn.v_proj"),
    _Target(("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm"),
    _Target(("mlp.down_proj",), "mlp.up_proj"),
)


def round_to_nearest(weight: torch.Tensor, group: int, keep: torch.Tensor | float = 1.0) -> Quantized:
    """Round a linear (out, in). `keep` (scalar, or (out, in / group)) is the part of each range to keep."""
    out, inner = weight.shape
    grouped = weight.view(out, inner // group, group)
    high = grouped.amax(-1).clamp(min=0) * keep
    low = grouped.amin(-1).clamp(max=0) * keep
    scales = ((high - low) / TOP).clamp(min=1e-6).to(torch.bfloat16).float()
    zeros = (-low / scales).round().clamp(0, TOP)
    codes = (grouped / scales[..., None] + zeros[..., None]).round().clamp(0, TOP)
    return Quantized(codes.view(out, inner), zeros, scales)


def search_scale(
    weight: torch.Tensor, moments: torch.Tensor, magnitude: torch.Tensor, group: int
) -> torch.Tensor:
    """The scale (in,) of the least output error. `moments` is X^T X (in, in), `magnitude` mean |x| (in,)."""
    # Output channels are many and alike: an even sample of them finds the same minimum.
    weight = weight[:: max(1, weight.shape[0] // SAMPLE_ROWS)]
    best, best_error = torch.ones_like(magnitude), float("inf")
    for alpha in ALPHAS:
        scale = magnitude.clamp(min=1e-4) ** alpha
        scale = scale / (scale.max() * scale.min()).sqrt()
        delta = round_to_nearest(weight * scale, group).weight() / scale - weight
        error = ((delta @ moments) * delta).sum().item()
        if error < best_error:
            best, best_error = scale, error
    return best


def search_clip(weight: torch.Tensor, moments: torch.Tensor, group: int) -> torch.Tensor:
    """The part of each range to keep (out, in / group), by the error of that group's share of the output."""
    out, inner = weight.shape
    groups = inner // group
    blocks = torch.stack([moments[at : at + group, at : at + group] for at in range(0, inner, group)])
    best = torch.ones(out, groups)
    best_error = torch.full((out, groups), float("inf"))
    for keep in CLIPS:
        delta = (
            (round_to_nearest(weight, group, keep).weight() - weight).view(out, groups, group).transpose(0, 1)
        )
        error = ((delta @ blocks) * delta).sum(-1).t()
        better = error < best_error
        best[better] = keep
        best_error = torch.minimum(error, best_error)
    return best


def _absorb(layer: Layer, target: _Target, scale: torch.Tensor, shape: Shape) -> None:
    source = layer.w[target.source]
    if source.dim() == 1:
        source.div_(scale)
    elif source.shape[0] == scale.shape[0]:
        source.div_(scale[:, None])
    else:
        # Grouped-query attention: each value row feeds several heads, which share one scale.
        rows = scale.view(shape.kv_heads, -1, shape.head_dim)[:, 0].reshape(-1)
        source.div_(rows[:, None])
    for name in target.names:
        layer.w[name].mul_(scale)


def _shared(magnitude: torch.Tensor, target: _Target, layer: Layer, shape: Shape) -> torch.Tensor:
    if layer.w[target.source].shape[0] == magnitude.shape[0]:
        return magnitude
    per_head = magnitude.view(shape.kv_heads, -1, shape.head_dim)
    return per_head.mean(1, keepdim=True).expand_as(per_head).reshape(-1)


def quantize(
    weights: Weights, shape: Shape, tokens: torch.Tensor, group: int, each_layer: Callable[[int], None]
) -> Iterator[tuple[str, Quantized]]:
    """Quantise every linear of the decoder layers, one layer after the other.

    `weights` are changed in place: scales are folded into norms and linears. `tokens` (batch, length) is the
    calibration text. Yields (name without `.weight`, quantised linear).
    """
    x = weights["model.embed_tokens.weight"][tokens]
    for index in range(shape.layers):
        layer = Layer(weights, index)
        inputs: dict[str, torch.Tensor] = {}
        x = forward_layer(layer, x, shape, inputs)
        for target in TARGETS:
            seen = inputs[target.names[0]].flatten(0, 1)
            moments = seen.t() @ seen
            magnitude = _shared(seen.abs().mean(0), target, layer, shape)
            scale = search_scale(
                torch.cat([layer.w[name] for name in target.names]), moments, magnitude, group
            )
            _absorb(layer, target, scale, shape)
            inputs[target.names[0]] = moments / torch.outer(scale, scale)
        for target in TARGETS:
            moments = inputs[target.names[0]]
            for name in target.names:
                weight = layer.w[name]
                # Errors of queries and keys multiply in their dot product, which this error does not see.
                clip = name not in ("self_attn.q_proj", "self_attn.k_proj")
                keep = search_clip(weight, moments, group) if clip else 1.0
                yield f"{layer.prefix}{name}", round_to_nearest(weight, group, keep)
        each_layer(index)
