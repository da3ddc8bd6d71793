"""Where a model's own tokenizer file is on this machine: beside its checkpoint, or in the hub's cache."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from engines import home
from engines.spec import EngineSpec

NAME = "tokenizer.json"


def find(specs: Iterable[EngineSpec], env: Mapping[str, str] = os.environ) -> Path | None:
    """The tokenizer.json of the first engine whose model is on this machine: all serve one model, so all have
    the same."""
    for spec in specs:
        place = folder(spec.model or "", env)
        if place is not None and (place / NAME).is_file():
            return place / NAME
    return None


def folder(model: str, env: Mapping[str, str] = os.environ) -> Path | None:
    """Where a model is, or would be, that is given as a folder, of the demo or by its hub name."""
    if Path(model).is_absolute():
        return Path(model)
    made = home.made(model, env)
    if made is not None:
        return made
    if model.count("/") != 1:
        return None
    cached = _hub_cache(env) / f"models--{model.replace('/', '--')}"
    try:
        revision = (cached / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return cached / "snapshots" / revision if revision.isalnum() else None


def _hub_cache(env: Mapping[str, str]) -> Path:
    """As huggingface_hub has it: $HF_HUB_CACHE, else `hub` below $HF_HOME or the user's cache."""
    if env.get("HF_HUB_CACHE"):
        return Path(env["HF_HUB_CACHE"]).expanduser()
    if env.get("HF_HOME"):
        return Path(env["HF_HOME"]).expanduser() / "hub"
    cache = Path(env["XDG_CACHE_HOME"]) if env.get("XDG_CACHE_HOME") else Path("~/.cache").expanduser()
    return cache / "huggingface" / "hub"
