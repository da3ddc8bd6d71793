"""What may be in the folder of a model: weights that are only numbers, configuration, a tokenizer.

Weights are safetensors or GGUF, whose headers are checked. Refused, unless the operator allows it by name:

- `pickle`: formats that run code when they are opened (`*.bin`, `*.pt`, `*.pkl` …);
- `code`: Python files, `auto_map` in a configuration, `--trust-remote-code`;
- `template`: chat templates that do more than write messages (`engines.templates`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from engines import checkpoint, gguf, manifest, templates
from engines.allowed import Allowed
from engines.flags import has_option, option

_PICKLES = frozenset(
    {".bin", ".ckpt", ".dill", ".h5", ".joblib", ".keras", ".npy", ".npz", ".pickle", ".pkl", ".pt", ".pth"}
)
_CODE = frozenset({".py", ".pyc", ".so"})
_CODE_FLAG = "--trust-remote-code"
_TEMPLATE_FLAGS = ("--chat-template", "--chat-template-file")  # of vLLM and of llama.cpp
_WEIGHTS = (".safetensors", ".gguf")


def problems(folder: Path, args: Sequence[str] = (), allow: Collection[str] = ()) -> list[str]:
    """Why no engine should open this folder (or GGUF file) with these arguments; empty where it may."""
    refused = list(_refused(folder, args))
    tokenizer = _tokenizer(args)
    if tokenizer is not None:
        refused += [(kind, f"{tokenizer} (of `args`): {said}") for kind, said in _refused(tokenizer, ())]
    found = [f"{said}{_way_out(kind)}" for kind, said in refused if kind not in allow]
    return found + list(_broken(folder))


def named(args: Sequence[str]) -> list[Path]:
    """What an engine opens beside its model, since its arguments name it: a chat template, a tokenizer. The
    weights of a model whose tokenizer is meant are none of it."""
    tokenizer, template = _tokenizer(args), option(args, *_TEMPLATE_FLAGS)
    files = [] if tokenizer is None else _files(tokenizer)
    found = [path for path in files if path.suffix.lower() not in _WEIGHTS]
    return [*found, Path(template)] if template is not None and _is_file(template) else found


def _tokenizer(args: Sequence[str]) -> Path | None:
    given = option(args, "--tokenizer")
    return Path(given) if given and Path(given).is_dir() else None


def _is_file(text: str) -> bool:
    """A template itself may stand where its path may."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def _way_out(kind: str) -> str:
    return f" (allowed by `allow: [{kind}]` of the engine)"


def _refused(folder: Path, args: Sequence[str]) -> Iterator[tuple[Allowed, str]]:
    for path in _files(folder):
        name = path.relative_to(folder).as_posix() if folder.is_dir() else path.name
        if path.suffix.lower() in _PICKLES:
            yield "pickle", f"{name} can run code when it is opened: convert it to safetensors, or remove it"
        elif path.suffix.lower() in _CODE:
            yield "code", f"{name} is code, and a model needs none: remove it"
        elif path.suffix == ".json" and "config" in path.name and _names_code(path):
            yield "code", f"{name} names code to be run (`auto_map`): remove that entry"
    if has_option(args, _CODE_FLAG):
        yield (
            "code",
            f"{_CODE_FLAG} in `args` has the engine run code out of the model's folder: leave it out",
        )
    for name, text in _templates(folder, args):
        for danger in templates.dangers(text):
            yield "template", f"the chat template {name} is refused, {danger}"


def _files(folder: Path) -> list[Path]:
    if folder.is_dir():
        return [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return gguf.parts(folder)


def _names_code(path: Path) -> bool:
    """Whether an `auto_map` is anywhere in a configuration; one that cannot be read is told elsewhere."""
    try:
        return _has_key(json.loads(path.read_bytes()), "auto_map")
    except (OSError, ValueError, RecursionError):
        return False


def _has_key(value: Any, key: str) -> bool:
    if isinstance(value, dict):
        return bool(value.get(key)) or any(_has_key(inner, key) for inner in value.values())
    return isinstance(value, list) and any(_has_key(inner, key) for inner in value)


def _templates(folder: Path, args: Sequence[str]) -> Iterator[tuple[str, str]]:
    given = option(args, *_TEMPLATE_FLAGS)
    if given is not None:
        try:
            yield f"{given} (of `args`)", Path(given).read_text(encoding="utf-8")
        except (OSError, ValueError):
            # Both take the template itself too; llama.cpp also the name of one of its own, which is harmless.
            yield "in `args`", given
    try:
        found = manifest.chat_templates(folder) if folder.is_dir() else gguf.read(folder).templates
    except (gguf.GGUFError, templates.TemplateError):
        return  # told by `_broken`
    for name, text in found.items():
        yield f"`{name}`", text


def _broken(folder: Path) -> Iterator[str]:
    for path in _files(folder):
        suffix = path.suffix.lower()
        if folder.is_dir() and suffix not in _WEIGHTS:
            continue  # a file that is the model itself is a GGUF file, whatever its name
        try:
            (checkpoint.header if suffix == ".safetensors" else gguf.read)(path)
        except (checkpoint.CheckpointError, gguf.GGUFError) as error:
            yield str(error)
    if folder.is_dir():
        try:
            checkpoint.weight_files(folder)
        except checkpoint.CheckpointError as error:
            yield str(error)
        try:
            templates.of_folder(folder)
        except templates.TemplateError as error:
            yield str(error)
