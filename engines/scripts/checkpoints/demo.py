"""From one GGUF file to two checkpoints: `python -m checkpoints.demo GGUF EXACT FAST GROUP`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from . import awq, gguf, llama, pack, tokenizer
from .files import calibration_text, end_with_parent, save, say

SEQUENCES = 4
# What the model's card recommends; at temperature 1 so small a model wanders off.
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
LENGTH = 512


def main(source: Path, exact: Path, fast: Path, group: int) -> None:
    torch.set_grad_enabled(False)
    say("reading the model")
    model = gguf.read(source)
    config = llama.config_from(model)
    shape = llama.shape_of(config)
    weights = llama.weights_from(model, shape)
    say("writing the bf16 checkpoint")
    words = tokenizer.tokenizer_from(model.fields)
    for folder in (exact, fast):
        folder.mkdir()
        tokenizer.write(words, model.fields, folder)
    save(exact, config, SAMPLING, weights)
    # What is quantised is what the bf16 checkpoint holds.
    weights = {name: tensor.to(torch.bfloat16).float() for name, tensor in weights.items()}
    ids = words.encode(calibration_text()).ids[: SEQUENCES * LENGTH]
    quantised: dict[str, torch.Tensor] = {}
    found = awq.quantize(
        weights,
        shape,
        torch.tensor(ids).view(SEQUENCES, LENGTH),
        group,
        lambda index: say("quantising to 4 bits", index + 1, shape.layers),
    )
    for name, linear in found:
        quantised |= pack.packed_linear(name, linear.codes, linear.zeros, linear.scales)
        del weights[f"{name}.weight"]
    say("writing the AWQ checkpoint")
    config["quantization_config"] = pack.config(group)
    save(fast, config, SAMPLING, {**weights, **quantised})


if __name__ == "__main__":
    end_with_parent()
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
