"""A 4-bit AWQ checkpoint by llm-compressor: `python -m checkpoints.compress JSON`.

JSON is an object: `source`, `out` (folders), `calibration` (a text file, or null for the built-in text),
`group` (input channels a scale) and `samples` (pieces of calibration text at most).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import preset_name_to_scheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.core import Event, State
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from transformers import AutoModelForCausalLM, AutoTokenizer

from .files import calibration_text, end_with_parent, say

LENGTH = 512
SCHEME = "W4A16_ASYM"


# Points of the scale search; the library's own 20 take minutes for each billion weights without a GPU.
GRID_ON_CPU = 10


class Telling(AWQModifier):  # type: ignore[misc]
    """AWQ that tells after each decoder layer how far it is."""

    layers: int
    done: int = -1  # the embeddings come first

    def on_sequential_epoch_end(self, state: State, event: Event, **options: Any) -> None:
        super().on_sequential_epoch_end(state, event, **options)
        self.done += 1
        say("quantising to 4 bits", min(self.done, self.layers), self.layers)


def pieces(ids: list[int], samples: int) -> list[list[int]]:
    """At most `samples` pieces of `LENGTH` tokens, spread over the whole text; a short text is one piece."""
    cut = [ids[at : at + LENGTH] for at in range(0, max(1, len(ids) - LENGTH + 1), LENGTH)]
    step = max(1, len(cut) // samples)
    return cut[::step][:samples]


def main(job: dict[str, Any]) -> None:
    on_cpu = not torch.accelerator.is_available()
    if on_cpu:
        # It pins activations for faster copies to a GPU, and a torch without one refuses to.
        IntermediatesCache.pin_memory = lambda *_arguments, **_options: None
    say("reading the model")
    source = job["source"]
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    text = Path(job["calibration"]).read_text(encoding="utf-8") if job["calibration"] else calibration_text()
    ids = pieces(tokenizer(text, add_special_tokens=False)["input_ids"], job["samples"])
    dataset = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(piece) for piece in ids]})
    scheme = preset_name_to_scheme(SCHEME, ["Linear"])
    scheme.weights.group_size = job["group"]
    layers = model.config.get_text_config().num_hidden_layers
    say("quantising to 4 bits", 0, layers)
    oneshot(
        model=model,
        tokenizer=tokenizer,
        dataset=dataset,
        recipe=[
            Telling(layers=layers, n_grid=GRID_ON_CPU) if on_cpu else Telling(layers=layers),
            QuantizationModifier(config_groups={"group_0": scheme}, ignore=["lm_head"]),
        ],
        max_seq_length=LENGTH,
        num_calibration_samples=len(ids),
        output_dir=job["out"],
    )


if __name__ == "__main__":
    end_with_parent()
    main(json.loads(sys.argv[1]))
