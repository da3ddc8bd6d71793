from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.hardware import GIB
from engines.kv_cache import Cache, Group, Layer, UnknownCacheError, of_config, pool

GQA: Mapping[str, Any] = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
}
GEMMA3 = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "hidden_size": 5376,
    "head_dim": 128,
    "sliding_window": 1024,
}
MLA = {
    "model_type": "deepseek_v2",
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_size": 2048,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}


def windows(**config: object) -> list[int | None]:
    return [layer.window for layer in of_config({**GQA, "num_hidden_layers": 4, **config}).layers]


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (GQA, 128 * 1024),
        ({**GQA, "head_dim": 64}, 64 * 1024),
        ({key: value for key, value in GQA.items() if key != "num_key_value_heads"}, 512 * 1024),
        ({"n_layer": 48, "n_head": 64, "n_embd": 8192, "multi_query": True}, 48 * 128 * 4),
        (MLA, 27 * 576 * 2),
    ],
)
def test_bytes_of_a_token(config: Mapping[str, Any], size: int) -> None:
    cache = of_config(config)
    assert cache.token_bytes() == size
    assert cache.token_bytes(element=1) == size // 2


def test_what_mla_keeps_is_what_vllm_asked_for() -> None:
    """Logged for DeepSeek-V2-Lite: 0.95 GiB for 32,768 tokens, https://github.com/vllm-project/vllm/issues/15871."""
    assert round(of_config(MLA).token_bytes() * 32768 / GIB, 2) == 0.95


def test_a_model_of_one_kind_of_layer_has_one_group() -> None:
    cache = of_config(GQA)
    assert cache.groups == (Group(32, None),)
    assert cache.block_bytes(16) == 16 * cache.token_bytes()
    assert pool(cache, GIB, in_flight=4096).blocks == 512
    assert pool(cache, GIB, in_flight=4096).tokens(8192) == 8192


def test_windows_and_full_attention_share_one_pool() -> None:
    """As vLLM groups Gemma-3-27B and logs it: 8 of 60 places stay empty, 50.05 requests of 4,096 tokens."""
    cache = of_config(GEMMA3)
    assert sorted(group.window or 0 for group in cache.groups) == [0, *[1024] * 6]
    assert {group.layers for group in cache.groups} == {10}
    found = pool(cache, int(109.86 * GIB), in_flight=8192)
    assert found.blocks == pytest.approx(89_994, abs=5)
    assert found.requests(4096) == pytest.approx(50.05, abs=0.01)


def test_a_window_bounds_what_a_long_request_keeps() -> None:
    group = Group(10, 1024)
    assert group.blocks(512, 16, in_flight=2048) == 33
    assert group.blocks(100_000, 16, in_flight=2048) == group.blocks(200_000, 16, in_flight=2048) == 193


def test_nearly_as_many_layers_of_each_kind_are_filled_up_to_the_same_number() -> None:
    cache = Cache((Layer(64),) * 13 + (Layer(64, 128),) * 12)
    assert {group.layers for group in cache.groups} == {13}
    assert len(cache.groups) == 2


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [None] * 4),
        ({"sliding_window": None}, [None] * 4),
        ({"sliding_window": 4096}, [4096] * 4),
        ({"sliding_window": 4096, "use_sliding_window": False}, [None] * 4),
        ({"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"] * 2}, [None, 64] * 2),
        ({"sliding_window": 64, "sliding_window_pattern": 4}, [64, 64, 64, None]),
        ({"sliding_window": 64, "model_type": "gemma2"}, [64, None] * 2),
        (
            {"sliding_window": 64, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3},
            [None, None, None, 64],
        ),
    ],
)
def test_which_layers_have_a_window(config: dict[str, object], expected: list[int | None]) -> None:
    assert windows(**config) == expected


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"layer_types": ["linear_attention", "full_attention"] * 16}, "linear_attention"),
        ({"mamba_d_state": 128}, "recurrent layers (`mamba_d_state`)"),
        ({"linear_num_value_heads": 32}, "recurrent"),
        ({"is_encoder_decoder": True}, "encoder"),
        ({"model_type": "gemma4_text"}, "the attention of `gemma4_text`"),
        ({"index_topk": 2048}, "attention"),
    ],
)
def test_attention_that_only_the_engine_can_size(config: dict[str, object], why: str) -> None:
    with pytest.raises(UnknownCacheError) as caught:
        of_config({**GQA, **config})
    assert why in str(caught.value)


def test_layers_of_unlike_size_and_window_are_left_to_the_engine() -> None:
    assert Cache((Layer(64), Layer(128))).block_bytes(16) == 16 * 192 * 2
    with pytest.raises(UnknownCacheError):
        Cache((Layer(64), Layer(128, 512)))


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        (
            {"num_hidden_layers": "32"},
            TypeError,
            "`num_hidden_layers` must be a whole number above 0, not '32'",
        ),
        ({"num_hidden_layers": True}, TypeError, "not True"),
        ({"num_key_value_heads": 0}, TypeError, "not 0"),
        ({"num_hidden_layers": None}, KeyError, "num_hidden_layers"),
        ({"layer_types": ["full_attention"]}, TypeError, "`layer_types` has 1 entries for 32 layers"),
    ],
)
def test_dimensions_that_are_none(config: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        of_config({**GQA, **config})
    assert text in str(caught.value)


caches = st.one_of(
    st.builds(lambda layers: Cache((Layer(512),) * layers), st.integers(1, 60)),
    st.builds(
        lambda full, part: Cache((Layer(512),) * full + (Layer(512, 1024),) * part),
        st.integers(1, 30),
        st.integers(1, 60),
    ),
)


@given(cache=caches, size=st.integers(0, 40 * GIB), limit=st.integers(1, 200_000))
def test_the_longest_request_fits_and_one_longer_does_not(cache: Cache, size: int, limit: int) -> None:
    found = pool(cache, size, in_flight=4096)
    longest = found.longest(limit)
    assert longest <= limit
    if longest > 0:
        assert found.requests(longest) >= 1
        assert cache.request_blocks(longest, 16, 4096) <= found.blocks - 1
    if longest < limit:
        assert cache.request_blocks(longest + 1, 16, 4096) > found.blocks - 1


@given(cache=caches, size=st.integers(0, 40 * GIB))
def test_blocks_never_take_more_than_the_memory(cache: Cache, size: int) -> None:
    found = pool(cache, size, in_flight=4096)
    assert 0 <= size - found.blocks * cache.block_bytes() < cache.block_bytes()
