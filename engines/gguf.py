"""The header of a GGUF file, checked before any engine maps it: magic, version, counts, types and bounds.

No tensor is read. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; block sizes by ggml's
`ggml_type`. Everything is little-endian.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from engines.regular import open_regular

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_FIELDS = 100_000
MAX_TENSORS = 100_000
MAX_STRING = 64 << 20
MAX_ITEMS = 16 << 20
MAX_DEPTH = 4
MAX_DIMENSIONS = 4
MAX_LENGTH = 1 << 48
"""Of one dimension. Engines multiply them in 64 bits."""
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
TEMPLATE = "tokenizer.chat_template"
ARCHITECTURE = "general.architecture"
SPLIT = "split.no"
_SPLIT = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}
_SIZES = {kind: struct.calcsize("<" + code) for kind, code in _SCALARS.items()}

# ggml_type -> (weights a block, bytes a block)
BLOCKS: Mapping[int, tuple[int, int]] = MappingProxyType(
    {
        0: (1, 4),  # F32
        1: (1, 2),  # F16
        2: (32, 18),  # Q4_0
        3: (32, 20),  # Q4_1
        6: (32, 22),  # Q5_0
        7: (32, 24),  # Q5_1
        8: (32, 34),  # Q8_0
        9: (32, 36),  # Q8_1
        10: (256, 84),  # Q2_K
        11: (256, 110),  # Q3_K
        12: (256, 144),  # Q4_K
        13: (256, 176),  # Q5_K
        14: (256, 210),  # Q6_K
        15: (256, 292),  # Q8_K
        16: (256, 66),  # IQ2_XXS
        17: (256, 74),  # IQ2_XS
        18: (256, 98),  # IQ3_XXS
        19: (256, 50),  # IQ1_S
        20: (32, 18),  # IQ4_NL
        21: (256, 110),  # IQ3_S
        22: (256, 82),  # IQ2_S
        23: (256, 136),  # IQ4_XS
        24: (1, 1),  # I8
        25: (1, 2),  # I16
        26: (1, 4),  # I32
        27: (1, 8),  # I64
        28: (1, 8),  # F64
        29: (256, 56),  # IQ1_M
        30: (1, 2),  # BF16
        34: (256, 54),  # TQ1_0
        35: (256, 66),  # TQ2_0
        39: (32, 17),  # MXFP4
        40: (64, 36),  # NVFP4
        41: (128, 18),  # Q1_0
        42: (64, 18),  # Q2_0
    }
)


class GGUFError(Exception):
    """Not a GGUF file that an engine should open; the message names the file and what is wrong in it."""


@dataclass(frozen=True, slots=True)
class Header:
    """`fields` are the scalar and string entries of the metadata (arrays are checked and left out);
    `tensors` maps names to bytes."""

    version: int
    fields: Mapping[str, str | int | float] = field(default_factory=lambda: MappingProxyType({}))
    tensors: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def templates(self) -> dict[str, str]:
        """Chat templates by name; the one without a name is `default`."""
        found = {}
        for key, value in self.fields.items():
            if isinstance(value, str) and (key == TEMPLATE or key.startswith(f"{TEMPLATE}.")):
                found[key.removeprefix(TEMPLATE).removeprefix(".") or "default"] = value
        return found


def parts(path: Path) -> list[Path]:
    """The files of a model that is named by one of them: those of a split model are opened together."""
    split = _SPLIT.fullmatch(path.name)
    if split is None:
        return [path]
    count = int(split[2])
    return [path.with_name(f"{split[1]}-{at:05}-of-{count:05}.gguf") for at in range(1, count + 1)]


def read(path: Path) -> Header:
    """The header of a file. Raises GGUFError."""
    try:
        with open_regular(path) as file:
            if file.read(4) != MAGIC:
                raise GGUFError(f"{path} is no GGUF file: it does not begin with `GGUF`")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(data).header()
    except _Wrong as wrong:
        raise GGUFError(f"{path} is a broken GGUF file: {wrong}") from None
    except OSError as error:
        raise GGUFError(f"{path} cannot be read: {error.strerror}") from None


class _Wrong(Exception):
    pass


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self._at = len(MAGIC)

    def header(self) -> Header:
        version = self._scalar("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            hint = " (big-endian files are not read)" if swapped in VERSIONS else ""
            raise _Wrong(f"version {version}; 2 and 3 are read{hint}")
        tensors, entries = self._scalar("Q"), self._scalar("Q")
        if tensors > MAX_TENSORS or entries > MAX_FIELDS:
            raise _Wrong(f"{tensors:,} tensors and {entries:,} fields are more than any model has")
        fields: dict[str, str | int | float] = {}
        for _ in range(entries):
            key = self._string()
            if key in fields:
                raise _Wrong(f"the field `{key}` is there twice")
            value = self._value(self._scalar("I"), 0)
            if value is not None:
                fields[key] = value
        # Of a split model only the first file says what it is.
        if not isinstance(fields.get(ARCHITECTURE), str) and not fields.get(SPLIT):
            raise _Wrong(f"it has no {ARCHITECTURE}")
        return Header(version, MappingProxyType(fields), MappingProxyType(self._tensors(tensors, fields)))

    def _tensors(self, count: int, fields: Mapping[str, str | int | float]) -> dict[str, int]:
        alignment = fields.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 8 <= alignment <= MAX_ALIGNMENT or alignment.bit_count() > 1:
            raise _Wrong(f"general.alignment is {alignment!r}")
        places = [self._tensor() for _ in range(count)]
        start = -(-self._at // alignment) * alignment
        sizes: dict[str, int] = {}
        end = 0
        for name, size, offset in sorted(places, key=lambda place: place[2]):
            if name in sizes:
                raise _Wrong(f"the tensor `{name}` is there twice")
            if offset % alignment:
                raise _Wrong(f"the tensor `{name}` begins at {offset}, which is not aligned to {alignment}")
            if offset < end:
                raise _Wrong(f"the tensor `{name}` overlaps the one before it")
            end = offset + size
            if start + end > self._size:
                raise _Wrong(f"the tensor `{name}` ends after the file does: it is cut short")
            sizes[name] = size
        return sizes

    def _tensor(self) -> tuple[str, int, int]:
        name = self._string()
        dimensions = self._scalar("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise _Wrong(f"the tensor `{name}` has {dimensions} dimensions")
        shape = [self._scalar("Q") for _ in range(dimensions)]
        if max(shape) > MAX_LENGTH:
            raise _Wrong(f"the tensor `{name}` has a dimension of {max(shape):,}")
        kind, offset = self._scalar("I"), self._scalar("Q")
        if kind not in BLOCKS:
            raise _Wrong(f"the tensor `{name}` has the unknown type {kind}")
        weights, size = BLOCKS[kind]
        if shape[0] % weights:
            raise _Wrong(
                f"the tensor `{name}` has rows of {shape[0]}, which are no whole blocks of {weights}"
            )
        # Python's integers do not overflow, which is how such headers break readers in C.
        return name, math.prod(shape) // weights * size, offset

    def _value(self, kind: int, depth: int) -> str | int | float | None:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            self._array(depth + 1)
            return None
        if kind not in _SCALARS:
            raise _Wrong(f"a field has the unknown type {kind}")
        value: int | float = self._scalar(_SCALARS[kind])
        return value

    def _array(self, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise _Wrong("arrays are nested too deeply")
        inner, count = self._scalar("I"), self._scalar("Q")
        if count > MAX_ITEMS:
            raise _Wrong(f"an array of {count:,} items")
        if inner in _SIZES:
            self._skip(count * _SIZES[inner])
        elif inner == _STRING:
            for _ in range(count):
                self._skip(self._length())
        else:
            for _ in range(count):
                self._value(inner, depth)

    def _length(self) -> int:
        size: int = self._scalar("Q")
        if size > MAX_STRING:
            raise _Wrong(f"a text of {size:,} bytes")
        return size

    def _string(self) -> str:
        size = self._length()
        start = self._at
        self._skip(size)
        try:
            return self._data[start : self._at].decode("utf-8")
        except UnicodeDecodeError:
            raise _Wrong(f"a text at byte {start} is not UTF-8") from None

    def _skip(self, size: int) -> None:
        self._at += size
        if self._at > self._size:
            raise _Wrong("its header ends after the file does: it is cut short")

    def _scalar(self, code: str) -> int:
        at = self._at
        self._skip(struct.calcsize("<" + code))
        value: int = struct.unpack_from("<" + code, self._data, at)[0]
        return value
