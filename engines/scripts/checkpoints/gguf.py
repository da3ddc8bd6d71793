"""Read a Llama-shaped GGUF file into torch tensors: F32, F16, Q4_1 and Q8_0, as the demo model has.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Everything is little-endian.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GGUFError(Exception):
    """The file is not a GGUF that this reader understands."""


@dataclass(frozen=True, slots=True)
class GGUF:
    """`fields` are the file's metadata; `tensors` map ggml names to fp32 tensors shaped (out, in)."""

    fields: dict[str, Any]
    tensors: dict[str, torch.Tensor]


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 0

    def scalar(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        (value,) = struct.unpack_from("<" + code, self._data, self.at)
        self.at += size
        return value

    def string(self) -> str:
        size = self.scalar("Q")
        text = self._data[self.at : self.at + size].decode("utf-8")
        self.at += size
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.scalar("I"), self.scalar("Q")
            return [self.value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise GGUFError(f"unknown metadata type {kind}")
        return self.scalar(_SCALARS[kind])


def _plain(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda raw: raw.view(dtype).float()


def _q4_1(raw: torch.Tensor) -> torch.Tensor:
    # 32 weights a block: fp16 scale, fp16 minimum, 16 bytes of nibbles (low ones first).
    blocks = raw.view(-1, 20)
    scale_min = blocks[:, :4].contiguous().view(torch.float16).float()
    nibbles = blocks[:, 4:]
    values = torch.cat([nibbles & 15, nibbles >> 4], dim=1).float()
    return values * scale_min[:, :1] + scale_min[:, 1:]


def _q8_0(raw: torch.Tensor) -> torch.Tensor:
    # 32 weights a block: fp16 scale, 32 signed bytes.
    blocks = raw.view(-1, 34)
    scale = blocks[:, :2].contiguous().view(torch.float16).float()
    return blocks[:, 2:].contiguous().view(torch.int8).float() * scale


# ggml type -> (weights a block, bytes a block, decoder of the raw bytes)
_TYPES: dict[int, tuple[int, int, Callable[[torch.Tensor], torch.Tensor]]] = {
    0: (1, 4, _plain(torch.float32)),
    1: (1, 2, _plain(torch.float16)),
    3: (32, 20, _q4_1),
    8: (32, 34, _q8_0),
}


def read(path: Path) -> GGUF:
    """Read the whole file. Raises `GGUFError` where it is not GGUF v3 or holds another tensor type."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data)
        if data[:4] != b"GGUF":
            raise GGUFError(f"{path} is not a GGUF file")
        cursor.at = 4
        version = cursor.scalar("I")
        if version != 3:
            raise GGUFError(f"{path} is GGUF version {version}; version 3 is read")
        tensor_count, field_count = cursor.scalar("Q"), cursor.scalar("Q")
        fields = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(field_count)}
        infos = [_tensor_info(cursor) for _ in range(tensor_count)]
        alignment = fields.get("general.alignment", 32)
        start = -(-cursor.at // alignment) * alignment
        tensors = {name: _tensor(data, start + offset, shape, kind) for name, shape, kind, offset in infos}
    return GGUF(fields, tensors)


def _tensor_info(cursor: _Cursor) -> tuple[str, list[int], int, int]:
    name = cursor.string()
    shape = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
    return name, shape[::-1], cursor.scalar("I"), cursor.scalar("Q")


def _tensor(data: mmap.mmap, offset: int, shape: list[int], kind: int) -> torch.Tensor:
    if kind not in _TYPES:
        raise GGUFError(f"tensor type {kind} is not read here")
    per_block, block_bytes, decode = _TYPES[kind]
    count = 1
    for size in shape:
        count *= size
    size = count // per_block * block_bytes
    raw = torch.frombuffer(bytearray(data[offset : offset + size]), dtype=torch.uint8)
    return decode(raw).reshape(shape)
