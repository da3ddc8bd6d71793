"""Four-bit weights in the `awq` checkpoint layout (gemm), which vLLM reads.

A linear (out, in) in groups of `group` input channels becomes
`qweight` int32 (in, out/8), `qzeros` int32 (in/group, out/8), `scales` bf16 (in/group, out);
weight = (q - zero) * scale. Eight output channels share an int32, in the order below.
"""

from __future__ import annotations

import torch

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _packed(values: torch.Tensor) -> torch.Tensor:
    rows, out = values.shape
    eights = values.to(torch.int64).view(rows, out // 8, 8)
    word = torch.zeros(rows, out // 8, dtype=torch.int64)
    for place, column in enumerate(_ORDER):
        word |= eights[:, :, column] << (4 * place)
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32).contiguous()


def packed_linear(
    name: str, codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Tensors of one linear. `codes` (out, in) 0..15; `zeros` and `scales` (out, in/group)."""
    return {
        f"{name}.qweight": _packed(codes.t()),
        f"{name}.qzeros": _packed(zeros.t()),
        f"{name}.scales": scales.t().to(torch.bfloat16).contiguous(),
    }


def config(group: int) -> dict[str, object]:
    """The `quantization_config` of a checkpoint in this layout."""
    return {
        "bits": 4,
        "group_size": group,
        "modules_to_not_convert": ["lm_head"],
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
    }


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """The numbers 0..15 of an int32 tensor (rows, out/8), as (rows, out): the inverse of packing."""
    rows, eighth = words.shape
    columns = torch.empty(rows, eighth, 8, dtype=torch.int32)
    for place, column in enumerate(_ORDER):
        columns[:, :, column] = (words >> (4 * place)) & 15
    return columns.view(rows, eighth * 8)


def unpacked_linear(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The fp32 weight (out, in) that an engine computes with."""
    codes, zeros = unpacked(qweight).float(), unpacked(qzeros).float()
    group = codes.shape[0] // zeros.shape[0]
    spread = codes - zeros.repeat_interleave(group, 0)
    return (spread * scales.float().repeat_interleave(group, 0)).t().contiguous()
