"""GGUF files made byte by byte, whole or broken."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(key: str, value: str) -> bytes:
    return text(key) + struct.pack("<I", 8) + text(value)


def tensor(name: str, shape: Sequence[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf(
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (tensor("a", (32, 2), 2, 0), tensor("b", (3,), 0, 64)),
    entry_count: int | None = None,
    tensor_count: int | None = None,
    data: int = 96,
    part: int = 0,
) -> bytes:
    """Two tensors unless told otherwise: `a`, 2 rows of Q4_0 (36 bytes), and `b`, 3 of F32 (12 bytes).

    A later `part` of a split model has no more fields than its number."""
    whole = [
        entry("general.architecture", "llama"),
        entry("tokenizer.chat_template", TEMPLATE),
        text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("x") + text("yz"),
    ]
    entries = [*([text("split.no") + struct.pack("<IH", 2, part)] if part else whole), *entries]
    counts = (
        len(tensors) if tensor_count is None else tensor_count,
        len(entries) if entry_count is None else entry_count,
    )
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


def write(path: Path, **how: object) -> Path:
    path.write_bytes(gguf(**how))  # type: ignore[arg-type]
    return path
