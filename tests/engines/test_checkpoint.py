import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import gguf
from engines.checkpoint import CheckpointError, Facts, header, json_object, read
from engines.overhead import Width
from engines.plan import PlanError, facts_of

CONFIG: Mapping[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
SIZES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "F8_E4M3": 1}
TENSORS = {
    "model.embed_tokens.weight": ("BF16", 1000 * 64),
    "model.layers.0.self_attn.q_proj.weight": ("BF16", 64 * 64),
    "model.layers.0.self_attn.q_norm.weight": ("BF16", 16),
    "model.layers.0.mlp.up_proj.weight": ("BF16", 64 * 128),
    "lm_head.weight": ("BF16", 1000 * 64),
}


def safetensors(tensors: Mapping[str, tuple[str, int]]) -> bytes:
    """A file with tensors of so many elements."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (kind, elements) in tensors.items():
        end = at + SIZES[kind] * elements
        header[name] = {"dtype": kind, "shape": [elements], "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    def make(tensors: Mapping[str, tuple[str, int]] = TENSORS, **config: object) -> Path:
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **config}))
        (tmp_path / "model.safetensors").write_bytes(safetensors(tensors))
        return tmp_path

    return make


def test_a_folder_tells_weights_by_tensor_and_shape(folder: Callable[..., Path]) -> None:
    facts = read(folder())
    assert facts.tensors == {name: 2 * elements for name, (_, elements) in TENSORS.items()}
    assert facts.weights == sum(facts.tensors.values())
    assert facts.kinds == {
        "embeddings": 128000,
        "head": 128000,
        "mlp": 16384,
        "attention": 8192,
        "norms": 32,
    }
    assert facts.width == Width(hidden=64, intermediate=128, vocabulary=1000)
    assert facts.context == 4096
    assert facts.cache is not None
    assert facts.cache.token_bytes() == 2 * 2 * 2 * 16 * 2
    assert facts.unknown == ""


def indexed(folder: Path, *names: str) -> Path:
    weights = {f"tensor{at}": name for at, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    return folder


def test_only_files_that_the_index_names_are_counted(folder: Callable[..., Path]) -> None:
    path = indexed(folder({"a": ("BF16", 10)}), "model.safetensors")
    (path / "consolidated.safetensors").write_bytes(safetensors({"b": ("BF16", 10)}))
    assert read(path).tensors == {"a": 20}


def test_a_file_that_the_index_names_must_be_there(folder: Callable[..., Path]) -> None:
    path = indexed(folder(), "model.safetensors", "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"has no model-00002-of-00002\.safetensors, which model\."):
        read(path)


@pytest.mark.parametrize("index", ["{}", "[]", '{"weight_map": 1}', '{"weight_map": {"a": {}}}', "{"])
def test_a_broken_index_is_refused(folder: Callable[..., Path], index: str) -> None:
    path = folder()
    (path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        read(path)


@pytest.mark.parametrize(
    ("more", "longest"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 8192),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4}}, 16384),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 4096),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "model_type": "gemma3_text"}, 4096),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, 4096),
        ({"rope_scaling": {"rope_type": "linear", "factor": "x"}}, 4096),
    ],
)
def test_the_longest_request_is_scaled_as_vllm_does(
    folder: Callable[..., Path], more: Mapping[str, Any], longest: int
) -> None:
    assert read(folder(**more)).context == longest


def test_files_of_a_sharded_checkpoint_are_added_up(folder: Callable[..., Path]) -> None:
    path = folder({"a": ("BF16", 10)})
    (path / "model-00002-of-00002.safetensors").write_bytes(safetensors({"b": ("I32", 5)}))
    assert read(path).tensors == {"a": 20, "b": 20}


def test_a_head_that_is_tied_to_the_embeddings_is_held_once(folder: Callable[..., Path]) -> None:
    assert "lm_head.weight" not in read(folder(tie_word_embeddings=True)).tensors


def test_a_32_bit_checkpoint_is_served_with_16(folder: Callable[..., Path]) -> None:
    floats = {"a": ("F32", 100)}
    assert read(folder(floats, torch_dtype="float32")).weights == 200
    assert read(folder(floats, torch_dtype="bfloat16")).weights == 400


@pytest.mark.parametrize(
    ("quantization", "four"),
    [
        ({"quant_method": "awq", "bits": 4}, True),
        ({"quant_method": "gptq", "bits": 8}, False),
        ({"quant_method": "fp8"}, False),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, True),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, False),
        ({"config_groups": {"group_0": None}}, False),
        ("awq", False),
    ],
)
def test_weights_of_four_bits(folder: Callable[..., Path], quantization: object, four: bool) -> None:
    width = read(folder(quantization_config=quantization)).width
    assert width is not None
    assert width.four_bit is four


def test_a_token_passes_through_the_experts_it_is_sent_to(folder: Callable[..., Path]) -> None:
    width = read(folder(num_experts_per_tok=8, moe_intermediate_size=96)).width
    assert width is not None
    assert width.intermediate == 8 * 96


def test_the_text_part_of_a_multimodal_model_counts(folder: Callable[..., Path], tmp_path: Path) -> None:
    path = folder()
    both = {"text_config": dict(CONFIG), "vision_config": {"hidden_size": 1}, "model_type": "x"}
    (path / "config.json").write_text(json.dumps(both))
    width = read(path).width
    assert width is not None
    assert width.hidden == 64


def test_an_unusual_model_has_what_is_known_of_it(folder: Callable[..., Path]) -> None:
    facts = read(folder(mamba_d_state=16))
    assert facts.cache is None
    assert facts.unknown == "recurrent layers (`mamba_d_state`)"
    assert facts.weights
    assert facts.width
    facts = read(folder(vocab_size=None))
    assert (facts.width, facts.cache) == (None, None)
    assert facts.unknown == "`vocab_size` is not in config.json"


def test_a_checkpoint_without_safetensors_has_no_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    facts = read(tmp_path)
    assert facts.weights is None
    assert facts.unknown == "no safetensors files"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "is no model folder: it has no config.json"),
        ("{", "config.json is not JSON"),
        ("[]", "config.json must hold an object"),
        ("[" * 100_000, "config.json is not JSON"),
        ('{"text_config": 3}', "`text_config` must be an object, not 3"),
        (
            json.dumps({**CONFIG, "num_hidden_layers": "many"}),
            "config.json: `num_hidden_layers` must be a whole",
        ),
        (json.dumps({**CONFIG, "vocab_size": 1.5}), "config.json: `vocab_size` must be a whole"),
    ],
)
def test_a_broken_config_is_named_with_its_key(tmp_path: Path, text: str | None, complaint: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path)
    assert complaint in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(PlanError, match=r"config\.json"):
        facts_of("x", tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "x.gguf"])
def test_a_pipe_is_no_file_of_a_model(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    read = {"config.json": json_object, "model.safetensors": header, "x.gguf": gguf.read}[name]
    with pytest.raises((CheckpointError, gguf.GGUFError), match="it is no regular file"):
        read(tmp_path / name)


WHOLE = safetensors({"a": ("BF16", 10)})


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is no safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1", "is no safetensors file"),
        (WHOLE[:-1], "is cut short: `a` ends after the file does"),
        (struct.pack("<Q", 2) + b"[]", "has a broken safetensors header"),
        (struct.pack("<Q", 12) + b'{"a": {"b":1', "has a broken safetensors header"),
        (struct.pack("<Q", 9) + b'{"a": {}}', "has a broken safetensors header"),
    ],
)
def test_a_broken_safetensors_file_is_named(
    folder: Callable[..., Path], content: bytes, complaint: str
) -> None:
    path = folder()
    (path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read(path)
    assert f"{path / 'model.safetensors'} {complaint}" in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({"a": ("Q4", [4], 0, 4)}, "`a` has the type `Q4`"),
        (
            {"a": ("U8", [4], 0, 4), "b": ("U8", [3], 3, 6)},
            "`b` does not begin where the tensor before it ends",
        ),
        ({"a": ("U8", [4], 1, 5)}, "`a` does not begin where"),
        ({"a": ("BF16", [4], 0, 4)}, "`a` of BF16 [4] does not take 4 bytes"),
        ({"a": ("U8", [4], 0, 4)}, "has 4 bytes that belong to no tensor"),
    ],
    ids=["type", "overlap", "hole", "shape", "rest"],
)
def test_tensors_fill_a_safetensors_file_one_after_the_other(
    folder: Callable[..., Path], tensors: Mapping[str, tuple[str, list[int], int, int]], complaint: str
) -> None:
    entries = {
        name: {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
        for name, (kind, shape, start, end) in tensors.items()
    }
    text = json.dumps(entries).encode()
    path = folder()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(CheckpointError) as caught:
        read(path)
    assert complaint in str(caught.value)


@given(content=st.binary(max_size=64))
def test_whatever_a_file_holds_it_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "model.safetensors").write_bytes(content)
    try:
        found = read(path)
    except CheckpointError:
        return
    assert sum(found.tensors.values()) <= len(content)


def test_a_folder_counts_more_than_the_table(folder: Callable[..., Path]) -> None:
    facts = facts_of("Qwen/Qwen2.5-7B-Instruct", folder())
    assert facts.weights == sum(2 * elements for _, elements in TENSORS.values())


def test_a_name_that_nobody_knows_has_no_facts() -> None:
    assert facts_of("who/knows", None) == Facts(unknown="who/knows is not on this machine")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hidden_size": 1, "num_attention_heads": 9}, "too small for 9 attention heads"),
        ({"num_hidden_layers": 10**9}, "`num_hidden_layers` is 1,000,000,000, more than any model has"),
        ({"vocab_size": 2**70}, "more than any model has"),
    ],
)
def test_sizes_that_no_model_has_are_refused(
    folder: Callable[..., Path], config: dict[str, int], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        read(folder(**config))


@given(
    st.dictionaries(
        st.sampled_from(
            [*CONFIG, "head_dim", "layer_types", "sliding_window", "kv_lora_rank", "text_config"]
        ),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.text()),
        max_size=3,
    )
)
def test_any_configuration_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, changed: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps({**CONFIG, **changed}))
    try:
        facts = read(path)
    except CheckpointError:
        return
    assert facts.cache is None or facts.cache.block_bytes(16, 2) > 0
