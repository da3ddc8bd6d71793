"""Perplexity of texts under checkpoints: `python -m checkpoints.perplexity TEXT... -- FOLDER...`.

Reads Llama-shaped bf16 folders, and AWQ folders in the gemm layout. Prints one JSON object, folder -> text ->
perplexity, over the first `SEQUENCES` pieces of `LENGTH` tokens of each text.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from . import llama, pack

SEQUENCES = 4
LENGTH = 512


def weights_of(folder: Path) -> llama.Weights:
    """Every weight in fp32 under its plain name, 4-bit linears unpacked."""
    stored = load_file(folder / "model.safetensors")
    weights = {name: tensor.float() for name, tensor in stored.items() if name.endswith(".weight")}
    for name in [name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")]:
        parts = (stored[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales"))
        weights[f"{name}.weight"] = pack.unpacked_linear(*parts)
    return weights


def perplexity(weights: llama.Weights, shape: llama.Shape, ids: list[int]) -> float:
    count = min(SEQUENCES, len(ids) // LENGTH)
    if count == 0:
        raise ValueError(f"the text has {len(ids)} tokens; at least {LENGTH} are needed")
    tokens = torch.tensor(ids[: count * LENGTH]).view(count, LENGTH)
    return math.exp(llama.mean_loss(weights, shape, tokens))


def main(texts: list[str], folders: list[str]) -> None:
    torch.set_grad_enabled(False)
    found: dict[str, dict[str, float]] = {}
    for folder in map(Path, folders):
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        shape = llama.shape_of(json.loads((folder / "config.json").read_bytes()))
        weights = weights_of(folder)
        found[str(folder)] = {
            text: perplexity(weights, shape, tokenizer.encode(Path(text).read_text(encoding="utf-8")).ids)
            for text in texts
        }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    split = sys.argv.index("--")
    main(sys.argv[1:split], sys.argv[split + 1 :])
