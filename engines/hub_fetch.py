"""Downloads one model from the Hugging Face hub into its cache; an engine environment's Python runs it.

`python -I hub_fetch.py MODEL` prints JSON lines: `{"done": bytes, "total": bytes}` while it downloads, at the
end `{"folder": path}`, or `{"error": text}` and exit code 1. A complete copy in the cache is used unasked.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "tokenizer*"]
LEFT_OUT = ["original/*", "*/*.safetensors", "onnx/*"]
NO_CONNECTION = frozenset(
    {"OfflineModeIsEnabled", "ConnectError", "ConnectionError", "ConnectTimeout", "Timeout", "ProxyError"}
)
EVERY = 0.5
RESERVE = 1 << 30


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def wanted(name: str) -> bool:
    """Whether a server needs this file of a repository: weights as safetensors, configuration, tokenizer."""
    return any(fnmatch(name, p) for p in PATTERNS) and not any(fnmatch(name, p) for p in LEFT_OUT)


def complete(folder: Path) -> bool:
    """Whether a snapshot holds its configuration and every shard that its index names."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    shards = set(json.loads(index.read_bytes())["weight_map"].values())
    return all((folder / shard).is_file() for shard in shards)


def cached(model: str) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(
            snapshot_download(model, allow_patterns=PATTERNS, ignore_patterns=LEFT_OUT, local_files_only=True)
        )
    except Exception:  # noqa: BLE001 - whatever is wrong with the cache, downloading tells more
        return None
    return folder if complete(folder) else None


def download(model: str) -> Path:
    """Raises what the hub's client raises, and ValueError where the model is not what can be served."""
    from huggingface_hub import HfApi, constants, snapshot_download

    info = HfApi().model_info(model, files_metadata=True)
    files = {file.rfilename: file.size or 0 for file in info.siblings or () if wanted(file.rfilename)}
    if not any(name.endswith(".safetensors") for name in files):
        raise ValueError(f"{model} has no safetensors files; other formats can carry code: not loaded")
    cache = Path(constants.HF_HUB_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    blobs = cache / f"models--{model.replace('/', '--')}" / "blobs"
    total = sum(files.values())
    missing = total - written(blobs)
    free = shutil.disk_usage(cache).free
    if missing + RESERVE > free:
        raise ValueError(
            f"no disk space for {model}: {missing / 1e9:.1f} GB are missing and 1 GB should stay free, "
            f"{cache} has {free / 1e9:.1f} GB"
        )
    stop = watch(lambda: say(done=min(total, written(blobs)), total=total))
    try:
        return Path(snapshot_download(model, allow_patterns=PATTERNS, ignore_patterns=LEFT_OUT))
    finally:
        stop()


def written(folder: Path) -> int:
    """Bytes on disk below a folder, unfinished files as far as they are."""
    return sum(path.stat().st_blocks * 512 for path in folder.glob("*")) if folder.is_dir() else 0


def watch(report: Callable[[], None]) -> Callable[[], None]:
    """Call `report` every half second in a thread until the returned function is called."""
    ended = threading.Event()

    def loop() -> None:
        while not ended.wait(EVERY):
            report()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()

    def stop() -> None:
        ended.set()
        thread.join()

    return stop


def explain(model: str, error: Exception) -> str:
    """What went wrong in words, by the kind of error that the hub's client raised."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return f"{model} asks for a licence: accept it on the hub, then set HF_TOKEN to your token"
    if "RepositoryNotFoundError" in kinds:
        return f"the hub has no model {model}, or only with a token (HF_TOKEN); is the name right?"
    if kinds & NO_CONNECTION:
        why = f"{model} is not in the cache and the hub cannot be reached ({type(error).__name__})"
        return f"{why}: check network and proxy, or write the folder of a copy as the engine's `model`"
    return f"{model}: {error}" if type(error) is ValueError else f"{model}: {type(error).__name__}: {error}"


def main(model: str) -> int:
    try:
        say(folder=str(cached(model) or download(model)))
    except Exception as error:  # noqa: BLE001 - told to the caller in words
        say(error=explain(model, error))
        return 1
    return 0


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG: ends with whoever asked for it

    os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    sys.exit(main(sys.argv[1]))
