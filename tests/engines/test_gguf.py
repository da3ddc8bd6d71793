from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.gguf import GGUFError, parts, read
from tests.engines.gguf_files import TEMPLATE, entry, gguf, tensor, text, write


def test_a_whole_file_gives_its_fields_tensors_and_template(tmp_path: Path) -> None:
    header = read(write(tmp_path / "m.gguf", entries=[entry("tokenizer.chat_template.tool_use", "{{ 1 }}")]))
    assert header.version == 3
    assert header.fields["general.architecture"] == "llama"
    assert header.tensors == {"a": 36, "b": 12}
    assert header.templates == {"default": TEMPLATE, "tool_use": "{{ 1 }}"}


def test_the_files_of_a_split_model_belong_together() -> None:
    folder = Path("/models")
    second, whole = folder / "m-00002-of-00003.gguf", folder / "m.gguf"
    assert parts(second) == [folder / f"m-0000{at}-of-00003.gguf" for at in (1, 2, 3)]
    assert parts(whole) == [whole]


@pytest.mark.parametrize(("kind", "weights", "size"), [(40, 64, 36), (41, 128, 18), (42, 64, 18)])
def test_the_latest_types_are_read(tmp_path: Path, kind: int, weights: int, size: int) -> None:
    path = write(tmp_path / "m.gguf", tensors=[tensor("a", (weights, 2), kind, 0)])
    assert read(path).tensors == {"a": 2 * size}


HUGE = 2**62


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"magic": b"GGML"}, "does not begin with `GGUF`"),
        ({"version": 1}, "version 1; 2 and 3 are read"),
        ({"version": 3 << 24}, "big-endian"),
        ({"entry_count": HUGE}, "more than any model has"),
        ({"tensor_count": HUGE}, "more than any model has"),
        ({"entry_count": 90}, "broken"),
        ({"data": 40}, "`b` ends after the file does"),
        ({"tensors": [tensor("a", (32, HUGE), 2, 0)]}, "`a` has a dimension of 4,611,686,018,427,387,904"),
        ({"tensors": [tensor("a", (2**33, 2**33), 0, 0)]}, "`a` ends after the file does"),
        ({"tensors": [tensor("a", (0, 2**63), 0, 0)]}, "`a` has a dimension of 9,223,372,036,854,775,808"),
        ({"entries": [text("general.alignment") + struct.pack("<II", 4, 24)]}, "general.alignment is 24"),
        ({"tensors": [tensor("a", (33,), 2, 0)]}, "no whole blocks of 32"),
        ({"tensors": [tensor("a", (32,), 77, 0)]}, "unknown type 77"),
        ({"tensors": [tensor("a", (1, 1, 1, 1, 1), 0, 0)]}, "5 dimensions"),
        ({"tensors": [tensor("a", (3,), 0, 1)]}, "not aligned"),
        ({"tensors": [tensor("a", (16,), 0, 0), tensor("b", (1,), 0, 32)]}, "`b` overlaps"),
        ({"tensors": [tensor("a", (1,), 0, 0), tensor("a", (1,), 0, 32)]}, "`a` is there twice"),
        ({"entries": [entry("general.architecture", "gpt")]}, "`general.architecture` is there twice"),
        ({"entries": [text("x") + struct.pack("<I", 99)]}, "unknown type 99"),
        ({"entries": [text("x") + struct.pack("<IIQ", 9, 0, HUGE)]}, "items"),
        ({"entries": [text("x") + struct.pack("<IQ", 8, HUGE)]}, "a text of"),
        ({"entries": [text("x") + struct.pack("<IIQ", 9, 9, 1) * 9]}, "broken"),
        ({"entries": [text("general.alignment") + struct.pack("<II", 4, 0)]}, "general.alignment is 0"),
    ],
)
def test_a_broken_file_is_refused_and_says_what_is_wrong(
    tmp_path: Path, how: dict[str, object], said: str
) -> None:
    with pytest.raises(GGUFError, match=said):
        read(write(tmp_path / "m.gguf", **how))


@given(cut=st.integers(0, len(gguf()) - 1 - 20))
def test_a_file_that_is_cut_anywhere_is_refused(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    path.write_bytes(gguf()[:cut])
    with pytest.raises(GGUFError):
        read(path)


@given(at=st.integers(0, len(gguf()) - 97), value=st.integers(0, 255))
def test_a_changed_byte_of_the_header_is_read_or_refused_but_never_a_fault(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int
) -> None:
    data = bytearray(gguf())
    data[at] = value
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    path.write_bytes(data)
    try:
        header = read(path)
    except GGUFError:
        return
    assert sum(header.tensors.values()) <= len(data)
