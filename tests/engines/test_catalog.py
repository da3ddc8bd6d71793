import pytest

from engines import catalog
from engines.catalog import PAIRS, find

# What the model cards on the Hugging Face hub give: parameters in all.
PUBLISHED_PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen3-4b": 4_022_468_096,
    "qwen2.5-7b": 7_615_616_512,
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-8b": 8_190_735_360,
    "qwen2.5-14b": 14_770_033_664,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "llama-3.1-70b": 70_553_706_496,
}
# Sizes of the safetensors files of the AWQ repositories on the hub, GB.
PUBLISHED_AWQ_GB = {"qwen3-4b": 2.67, "qwen3-8b": 6.10, "qwen3-14b": 9.98}
# KiB a token with a 16-bit KV cache, by each model's config.json.
KV_KIB = {
    "qwen2.5-7b": 56,
    "llama-3.1-8b": 128,
    "qwen3-8b": 144,
    "qwen3-14b": 160,
    "qwen3-32b": 256,
    "llama-3.1-70b": 320,
}
BY_NAME = {pair.name: pair for pair in PAIRS}


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_a_shape_gives_the_published_number_of_parameters(name: str) -> None:
    assert BY_NAME[name].shape.parameters == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize("name", PUBLISHED_AWQ_GB)
def test_a_shape_gives_the_published_size_of_the_awq_checkpoint(name: str) -> None:
    facts = find(BY_NAME[name].awq)
    assert facts is not None
    assert facts.weights is not None
    assert facts.weights / 1e9 == pytest.approx(PUBLISHED_AWQ_GB[name], abs=0.005)


@pytest.mark.parametrize("name", KV_KIB)
@pytest.mark.parametrize("checkpoint", ["exact", "awq"])
def test_a_shape_gives_the_kv_bytes_of_a_token(name: str, checkpoint: str) -> None:
    facts = find(getattr(BY_NAME[name], checkpoint))
    assert facts is not None
    assert facts.cache is not None
    assert facts.cache.token_bytes() == KV_KIB[name] * 1024


def test_weights_are_those_of_the_tensors() -> None:
    for name in catalog.names():
        facts = find(name)
        assert facts is not None
        assert sum(facts.tensors.values()) == facts.weights == sum(facts.kinds.values())


def test_only_the_projections_get_smaller_in_awq() -> None:
    exact, awq = find("Qwen/Qwen3-8B"), find("Qwen/Qwen3-8B-AWQ")
    assert exact is not None
    assert awq is not None
    assert {kind for kind in exact.kinds if awq.kinds[kind] < exact.kinds[kind]} == {"mlp", "attention"}


def test_the_table_goes_from_small_to_large() -> None:
    sizes = [round(pair.shape.parameters / 1e9, 1) for pair in PAIRS]
    assert sizes == sorted(sizes)


def test_a_name_that_is_not_in_the_table_is_not_found() -> None:
    assert find("nobody/nothing") is None
    assert find(catalog.DEMO_AWQ) is not None
