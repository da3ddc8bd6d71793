"""4-bit AWQ checkpoints of any supported model, made by llm-compressor in an environment of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engines import checkpoint_tools, manifest
from engines import home as places
from engines.making import MakingError, Progress, check_room, locked, silent

GROUPS = (128, 64, 32)


def check(source: Path, out: Path, group: int) -> None:
    """Raise MakingError where it can be seen before any work that `make` would fail."""
    config = _config(source)
    if out.exists():
        raise MakingError(f"{out} is there already: name a folder that does not exist")
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "unknown")
        raise MakingError(f"{source} is quantised already ({method}): start from the 16-bit checkpoint")
    if not any(source.glob("*.safetensors")):
        raise MakingError(f"{source} has no *.safetensors: only weights in that format are read")
    uneven = sorted(set(_input_channels(config, group)))
    if uneven:
        fitting = [str(size) for size in GROUPS if not any(_input_channels(config, size))]
        advice = f"use --group-size {fitting[0]}" if fitting else "it cannot be quantised in groups"
        raise MakingError(
            f"{source} has linears of {uneven[0]} input channels, which groups of {group} do not divide: "
            f"{advice}"
        )


def make(
    source: Path,
    out: Path,
    *,
    python: Path,
    home: Path,
    calibration: Path | None = None,
    group: int = 128,
    samples: int = 128,
    progress: Progress = silent,
) -> Path:
    """Quantise the model in folder `source` into folder `out`, which appears when it is complete.

    `python` is that of the `llm-compressor` environment; `calibration` is a UTF-8 text, None for the short
    mix that is built in; `group` is the number of input channels that share a scale; `samples` is how many
    pieces of 512 tokens are used at most. Raises MakingError.
    """
    check(source, out, group)
    unfinished = out.absolute().with_name(f".{out.name}.partial")
    try:
        # One at a time: each takes the whole machine.
        with locked(places.models(home) / ".quantize.lock", progress) as lock:
            try:
                check(source, out, group)  # another process may have made it while we waited
                check_room(out.absolute().parent, _weights_size(source), f"quantising {source.name}")
                shutil.rmtree(unfinished, ignore_errors=True)
                job = {
                    "source": str(source.absolute()),
                    "out": str(unfinished),
                    "calibration": str(calibration.absolute()) if calibration else None,
                    "group": group,
                    "samples": samples,
                }
                log = places.logs(home) / "quantize.log"
                checkpoint_tools.run(
                    python, "compress", [json.dumps(job)], log=log, progress=progress, hold=lock
                )
                _copy_missing(source, unfinished)
                for path in unfinished.rglob("*"):
                    path.chmod(0o755 if path.is_dir() else 0o644)  # weights are written for their owner alone
                progress("writing the manifest")
                manifest.write(unfinished)
                unfinished.rename(out)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise MakingError(f"{source} cannot be quantised into {out}: {error}") from error
    return out


def _config(source: Path) -> dict[str, Any]:
    try:
        config = json.loads((source / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise MakingError(f"{source} is not a model folder: config.json: {error}") from error
    if not isinstance(config, dict):
        raise MakingError(f"{source} is not a model folder: config.json is not an object")
    return config


def _input_channels(config: dict[str, Any], group: int) -> Iterator[int]:
    """Widths of the decoder's linears that `group` does not divide, as far as config.json tells them."""
    text = config.get("text_config", config)
    widths = [text.get("hidden_size"), text.get("intermediate_size"), text.get("moe_intermediate_size")]
    if text.get("head_dim") and text.get("num_attention_heads"):
        widths.append(text["head_dim"] * text["num_attention_heads"])
    return (width for width in widths if isinstance(width, int) and width % group)


def _weights_size(source: Path) -> int:
    return sum(path.stat().st_size for path in source.glob("*.safetensors"))


def _copy_missing(source: Path, out: Path) -> None:
    """Small files that a server reads and the library does not write (a chat template of its own, say)."""
    for path in source.iterdir():
        wanted = path.suffix in (".json", ".jinja", ".txt", ".model") and path.name != manifest.NAME
        if wanted and "index" not in path.name and not (out / path.name).exists():
            shutil.copyfile(path, out / path.name)
