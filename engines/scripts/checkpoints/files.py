"""Writing and reading checkpoint folders, and telling whoever started us how far we are."""

from __future__ import annotations

import ctypes
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def end_with_parent() -> None:
    """Have the kernel end this process when its parent dies, however that dies (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)


def say(message: str, done: int | None = None, total: int | None = None) -> None:
    """One line of progress for the parent process, on the descriptor that it has named."""
    line = json.dumps({"message": message, "done": done, "total": total})
    os.write(int(os.environ["DUALGAUGE_PROGRESS_FD"]), f"{line}\n".encode())


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def save(
    folder: Path, config: dict[str, Any], sampling: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    """Write `config.json`, `generation_config.json` and one safetensors file; floats become bf16.

    `sampling` is what a server falls back to where a request says nothing.
    """
    write_json(folder / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", {**ids, **sampling})
    stored = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in tensors.items()
    }
    path = folder / "model.safetensors"
    save_file(stored, path, metadata={"format": "pt"})
    path.chmod(0o644)  # the library makes it readable for its owner alone


def calibration_text() -> str:
    return Path(__file__).with_name("calibration.txt").read_text(encoding="utf-8")
