"""A checkpoint's size and shape, from its config.json and the headers of its safetensors files.

No tensor is read: a header names each tensor's type, shape and place, and the place is its size.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engines import gguf, kv_cache
from engines.kv_cache import Cache, UnknownCacheError, count
from engines.overhead import Width
from engines.regular import open_regular

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library."""
_FLOAT32 = "F32"
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E5M2FNUZ", "F8_E4M3FNUZ"), 8),
    **dict.fromkeys(("I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Of an element, by type."""
_MOST_SCALED = 1024
_NOT_HELD = ("rotary_emb.inv_freq", "masked_bias")


class CheckpointError(Exception):
    """A checkpoint that cannot be read; the message names the file, and the key where one is wrong."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What planning needs to know of a model. Everything is None where it is not known, `unknown` says why.

    `weights` are bytes as an engine holds them, `tensors` the same by tensor; `context` is the longest
    request that the model was made for, in tokens.
    """

    weights: int | None = None
    width: Width | None = None
    cache: Cache | None = None
    context: int | None = None
    tensors: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    unknown: str = ""

    @property
    def kinds(self) -> Mapping[str, int]:
        """Bytes of weights by what they are for, the largest first."""
        sums: Counter[str] = Counter()
        for name, size in self.tensors.items():
            sums[_kind(name)] += size
        return dict(sums.most_common())


def read(folder: Path) -> Facts:
    """The facts of a model folder, or of a GGUF file.

    Raises CheckpointError, where something is broken rather than unusual.
    """
    if folder.is_file():
        return _of_gguf(folder)
    config = _config(folder / CONFIG)
    text = config.get("text_config") or config.get("llm_config") or config
    if not isinstance(text, Mapping):
        raise CheckpointError(f"{folder / CONFIG}: `text_config` must be an object, not {text!r}")
    tensors = dict(_tensors(folder, config, text))
    return of_config({**text, **_shared(config)}, tensors, folder / CONFIG)


def _of_gguf(file: Path) -> Facts:
    try:
        headers = [gguf.read(part) for part in gguf.parts(file)]
    except gguf.GGUFError as error:
        raise CheckpointError(str(error)) from None
    fields = headers[0].fields
    context = fields.get(f"{fields.get(gguf.ARCHITECTURE)}.context_length")
    tensors = {name: size for header in headers for name, size in header.tensors.items()}
    return Facts(
        weights=sum(tensors.values()) or None,
        context=context if isinstance(context, int) else None,
        tensors=tensors,
        unknown="llama.cpp sizes its KV cache by itself",
    )


def of_config(config: Mapping[str, Any], tensors: Mapping[str, int], file: Path) -> Facts:
    """The facts by a (text) configuration and the bytes of each tensor. Raises CheckpointError."""
    weights = sum(tensors.values()) or None
    unknown = "" if weights else "no safetensors files"
    width = cache = context = None
    try:
        width = _width(config)
        context = _positions(config) if "max_position_embeddings" in config else None
        cache = kv_cache.of_config(config)
    except UnknownCacheError as error:
        unknown = str(error)
    except KeyError as error:
        unknown = f"`{error.args[0]}` is not in {CONFIG}"
    except TypeError as error:
        raise CheckpointError(f"{file}: {error}") from None
    return Facts(weights, width, cache, context, tensors, unknown)


def _config(path: Path) -> dict[str, Any]:
    try:
        return json_object(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} is no model folder: it has no {CONFIG}") from None


def json_object(path: Path) -> dict[str, Any]:
    """A JSON file of a model's folder. Raises CheckpointError, FileNotFoundError."""
    try:
        with open_regular(path) as file:
            found = json.load(file)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must hold an object")
    return found


def _shared(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What stands beside a `text_config` and counts for it."""
    return {key: config[key] for key in ("quantization_config", "is_encoder_decoder") if config.get(key)}


def _width(config: Mapping[str, Any]) -> Width:
    hidden = count(config, "hidden_size", "n_embd", "d_model")
    intermediate = count(config, "intermediate_size", "n_inner", "ffn_dim", "hidden_size", "n_embd")
    chosen = config.get("num_experts_per_tok") or config.get("experts_per_token")
    if chosen:
        expert = count(config, "moe_intermediate_size", "intermediate_size")
        shared = config.get("shared_expert_intermediate_size") or 0
        intermediate = max(intermediate, count({"experts": chosen}, "experts") * expert + shared)
    return Width(hidden, intermediate, count(config, "vocab_size"), _four_bit(config))


def _positions(config: Mapping[str, Any]) -> int:
    """The longest request, as vLLM reckons it: `linear` and `dynamic` scaling come on top of the number,
    that of other kinds is in it already, as is Gemma 3's."""
    made = count(config, "max_position_embeddings")
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, Mapping) or str(config.get("model_type")).startswith("gemma3"):
        return made
    kind, factor = scaling.get("rope_type") or scaling.get("type"), scaling.get("factor")
    if kind not in ("linear", "dynamic") or not isinstance(factor, int | float):
        return made
    return int(made * factor) if 1 <= factor <= _MOST_SCALED else made


def _four_bit(config: Mapping[str, Any]) -> bool:
    """Whether weights are of 4 bits: AWQ and GPTQ say `bits`, compressed-tensors says it of each group."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return False
    groups = quantization.get("config_groups")
    schemes = [quantization, *(groups.values() if isinstance(groups, Mapping) else ())]
    return any(
        (scheme.get("bits") or (scheme.get("weights") or {}).get("num_bits")) == 4
        for scheme in schemes
        if isinstance(scheme, Mapping)
    )


def _tensors(folder: Path, config: Mapping[str, Any], text: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Each tensor that an engine keeps, with its bytes. 32-bit models are served with 16."""
    kind = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    halve = kind in (None, "float32") and not config.get("quantization_config")
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    for path in weight_files(folder):
        for name, (type_, size) in header(path).items():
            if name.endswith(_NOT_HELD) or (tied and name == "lm_head.weight"):
                continue
            yield name, size // 2 if halve and type_ == _FLOAT32 else size


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that an engine opens: where there is an index, those that it names and no others
    (many folders hold the weights a second time, `consolidated.safetensors`). Raises CheckpointError."""
    found = sorted(folder.glob("*.safetensors"))
    try:
        names = set(json_object(folder / INDEX)["weight_map"].values())
    except FileNotFoundError:
        return found
    except (KeyError, AttributeError, TypeError):
        raise CheckpointError(f"{folder / INDEX} has no `weight_map` of tensors and files") from None
    missing = sorted(map(str, names - {path.name for path in found}))
    if missing:
        raise CheckpointError(f"{folder} has no {missing[0]}, which {INDEX} names: fetch it anew")
    return [path for path in found if path.name in names]


def header(path: Path) -> dict[str, tuple[str, int]]:
    """Name -> type and bytes of every tensor in a safetensors file. Raises CheckpointError."""
    try:
        with open_regular(path) as file:
            whole = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER, whole - 8):
                raise CheckpointError(f"{path} is no safetensors file: its header would be {length:,} bytes")
            entries = json.loads(file.read(length))
            entries.pop("__metadata__", None)
            return _tensors_of(path, entries, whole - 8 - length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} has a broken safetensors header: {error!r}") from None


def _tensors_of(path: Path, entries: Mapping[str, Any], size: int) -> dict[str, tuple[str, int]]:
    """Name -> type and bytes, of tensors that fill the `size` bytes behind a header one after the other.

    The rules are those of the format: https://github.com/huggingface/safetensors#format
    """
    found, at = {}, 0
    for name, tensor in sorted(entries.items(), key=lambda entry: entry[1]["data_offsets"]):
        start, end = tensor["data_offsets"]
        type_, shape = str(tensor["dtype"]), tensor["shape"]
        if type_ not in _BITS:
            raise CheckpointError(f"{path}: `{name}` has the type `{type_}`, which safetensors does not know")
        if end > size:
            raise CheckpointError(f"{path} is cut short: `{name}` ends after the file does")
        if start != at or end < start:
            raise CheckpointError(f"{path}: `{name}` does not begin where the tensor before it ends")
        if math.prod(shape) * _BITS[type_] != (end - start) * 8:
            raise CheckpointError(f"{path}: `{name}` of {type_} {shape} does not take {end - start:,} bytes")
        found[name], at = (type_, end - start), end
    if at != size:
        raise CheckpointError(f"{path} has {size - at:,} bytes that belong to no tensor")
    return found


def _kind(name: str) -> str:
    """What a tensor is for, by its name in Hugging Face checkpoints."""
    for kind, parts in (
        ("embeddings", ("embed_tokens", "wte", "word_embeddings")),
        ("head", ("lm_head", "output_layer")),
        ("vision", ("visual", "vision")),
        ("experts", (".experts.",)),
        ("norms", ("norm",)),
        ("attention", ("attn", "attention")),
        ("mlp", ("mlp", "feed_forward", "ffn")),
    ):
        if any(part in name for part in parts):
            return kind
    return "other"
