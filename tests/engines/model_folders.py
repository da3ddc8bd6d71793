"""Small model folders that are whole: configuration, tokenizer, chat template, one safetensors file."""

from __future__ import annotations

import json
import struct
from pathlib import Path

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def make(folder: Path, *, weights: bytes = bytes(64)) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    entry = {"dtype": "BF16", "shape": [len(weights) // 2], "data_offsets": [0, len(weights)]}
    header = json.dumps({"weight": entry}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + weights)
    return folder
