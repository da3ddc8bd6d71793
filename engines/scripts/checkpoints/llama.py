"""Llama-shaped checkpoints as plain tensors: from GGUF names, and a forward pass for calibration.

Shapes: weights are (out, in), activations (batch, tokens, channels). Everything runs in fp32 on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from .gguf import GGUF

Weights = dict[str, torch.Tensor]

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float


def shape_of(config: dict[str, Any]) -> Shape:
    """The shape that a `config.json` describes."""
    heads = config["num_attention_heads"]
    return Shape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim", config["hidden_size"] // heads),
        eps=config["rms_norm_eps"],
        rope_theta=config["rope_theta"],
    )


def config_from(gguf: GGUF) -> dict[str, Any]:
    """A Hugging Face `config.json` for the file."""
    field = gguf.fields
    heads = field["llama.attention.head_count"]
    hidden = field["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": field["tokenizer.ggml.bos_token_id"],
        "eos_token_id": field["tokenizer.ggml.eos_token_id"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": field["llama.feed_forward_length"],
        "max_position_embeddings": field["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": field["llama.block_count"],
        "num_key_value_heads": field["llama.attention.head_count_kv"],
        "pad_token_id": field["tokenizer.ggml.padding_token_id"],
        "rms_norm_eps": round(field["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": field["llama.rope.freq_base"],
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": field["llama.vocab_size"],
    }


def weights_from(gguf: GGUF, shape: Shape) -> Weights:
    """The file's tensors under their Hugging Face names, fp32."""
    return dict(_renamed(gguf, shape))


def _renamed(gguf: GGUF, shape: Shape) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in gguf.tensors.items():
        parts = name.split(".")
        if parts[0] != "blk":
            yield f"{_OTHER_NAMES[parts[0]]}.weight", tensor
            continue
        heads = {"attn_q": shape.heads, "attn_k": shape.kv_heads}.get(parts[2])
        value = tensor if heads is None else _half_split_rope(tensor, heads)
        yield f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight", value


def _half_split_rope(weight: torch.Tensor, heads: int) -> torch.Tensor:
    # GGUF keeps the two numbers that RoPE rotates side by side, Hugging Face half a head apart.
    out, inner = weight.shape
    return weight.view(heads, out // heads // 2, 2, inner).transpose(1, 2).reshape(out, inner)


class Layer:
    """One decoder layer, its weights seen as attributes of the same tensors."""

    def __init__(self, weights: Weights, index: int) -> None:
        prefix = f"model.layers.{index}."
        self.prefix = prefix
        self.w = {name: weights[f"{prefix}{name}.weight"] for name in _LAYER_NAMES.values()}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    tokens, dim = x.shape[-2:]
    inverse = theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angle = torch.outer(torch.arange(tokens, dtype=torch.float32), inverse)
    cos, sin = angle.cos(), angle.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def forward_layer(
    layer: Layer, x: torch.Tensor, shape: Shape, inputs: dict[str, torch.Tensor]
) -> torch.Tensor:
    """One layer over `x`; what goes into each linear is left in `inputs` under the name of the first one."""
    w = layer.w
    batch, tokens, _ = x.shape
    normed = rms_norm(x, w["input_layernorm"], shape.eps)

    def heads(name: str, count: int) -> torch.Tensor:
        return linear(normed, w[name]).view(batch, tokens, count, shape.head_dim).transpose(1, 2)

    q = _rotate(heads("self_attn.q_proj", shape.heads), shape.rope_theta)
    k = _rotate(heads("self_attn.k_proj", shape.kv_heads), shape.rope_theta)
    v = heads("self_attn.v_proj", shape.kv_heads)
    mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shape.heads != shape.kv_heads)
    mixed = mixed.transpose(1, 2).reshape(batch, tokens, -1)
    x = x + linear(mixed, w["self_attn.o_proj"])
    normed_mlp = rms_norm(x, w["post_attention_layernorm"], shape.eps)
    gated = silu(linear(normed_mlp, w["mlp.gate_proj"])) * linear(normed_mlp, w["mlp.up_proj"])
    inputs.update(
        {
            "self_attn.q_proj": normed,
            "self_attn.o_proj": mixed,
            "mlp.gate_proj": normed_mlp,
            "mlp.down_proj": gated,
        }
    )
    return x + linear(gated, w["mlp.down_proj"])


def mean_loss(weights: Weights, shape: Shape, tokens: torch.Tensor) -> float:
    """Mean negative log-likelihood (nats a token) of `tokens` (batch, length) under the model."""
    x = weights["model.embed_tokens.weight"][tokens]
    for index in range(shape.layers):
        x = forward_layer(Layer(weights, index), x, shape, {})
    x = rms_norm(x, weights["model.norm.weight"], shape.eps)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    total: float = 0.0
    for row, target in zip(x, tokens, strict=True):
        logits = linear(row[:-1], head)
        total += torch.nn.functional.cross_entropy(logits, target[1:], reduction="sum").item()
    return float(total / (tokens.shape[0] * (tokens.shape[1] - 1)))
