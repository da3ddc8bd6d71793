import pytest

from engines.catalog import (
    CONTEXT,
    MIN_KV_TOKENS,
    PAIRS,
    UTILISATION,
    Choice,
    budget,
    choose,
    find,
)
from engines.hardware import GIB, MIB, Gpu

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


def gpu(size: int, index: int = 0, **changes: object) -> Gpu:
    """An idle card of so many GiB."""
    values: dict[str, object] = {
        "index": index,
        "name": "card",
        "total": size * GIB,
        "free": size * GIB - 480 * MIB,
        "capability": (8, 9),
    }
    return Gpu(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_a_shape_gives_the_published_number_of_parameters(name: str) -> None:
    assert BY_NAME[name].shape.parameters == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize("name", PUBLISHED_AWQ_GB)
def test_a_shape_gives_the_published_size_of_the_awq_checkpoint(name: str) -> None:
    assert BY_NAME[name].shape.awq_bytes / 1e9 == pytest.approx(PUBLISHED_AWQ_GB[name], abs=0.005)


@pytest.mark.parametrize("name", KV_KIB)
def test_a_shape_gives_the_kv_bytes_of_a_token(name: str) -> None:
    assert BY_NAME[name].shape.kv_token_bytes == KV_KIB[name] * 1024


def test_the_table_goes_from_small_to_large() -> None:
    sizes = [round(pair.shape.parameters / 1e9, 1) for pair in PAIRS]
    assert sizes == sorted(sizes)


def test_a_model_is_found_by_either_of_its_names() -> None:
    shape = BY_NAME["qwen2.5-7b"].shape
    assert find("Qwen/Qwen2.5-7B-Instruct") == (shape, shape.exact_bytes)
    assert find("Qwen/Qwen2.5-7B-Instruct-AWQ") == (shape, shape.awq_bytes)
    assert find("nobody/nothing") is None


ONE = {
    8: "qwen2.5-1.5b",
    10: "qwen2.5-1.5b",
    12: "qwen2.5-1.5b",
    16: "qwen3-4b",
    24: "qwen2.5-7b",
    32: "qwen3-8b",
    40: "qwen3-8b",
    48: "qwen3-14b",
    80: "qwen3-14b",
    96: "qwen3-32b",
}
TWO = {
    8: "qwen2.5-1.5b",
    10: "qwen2.5-1.5b",
    12: "qwen3-4b",
    16: "qwen3-4b",
    24: "qwen3-8b",
    32: "qwen3-14b",
    40: "qwen3-14b",
    48: "qwen3-14b",
    80: "qwen3-32b",
    96: "qwen3-32b",
}


def name_of(choice: Choice) -> str:
    assert choice.pair is not None
    return choice.pair.name


@pytest.mark.parametrize("size", ONE)
def test_one_gpu(size: int) -> None:
    choice = choose([gpu(size)])
    assert name_of(choice) == ONE[size]
    assert {slot.gpu for slot in choice.slots} == {0}
    assert_sound(choice, [gpu(size)])


@pytest.mark.parametrize("size", TWO)
def test_two_gpus(size: int) -> None:
    cards = [gpu(size), gpu(size, 1)]
    choice = choose(cards)
    assert name_of(choice) == TWO[size]
    assert {slot.gpu for slot in choice.slots} == {0, 1}
    assert_sound(choice, cards)


def assert_sound(choice: Choice, cards: list[Gpu]) -> None:
    """Shares, weights and caches add up on every card, and a context fits into each cache."""
    pair = choice.pair
    assert pair is not None
    assert [slot.tier for slot in choice.slots] == ["fast", "exact"]
    assert [slot.model for slot in choice.slots] == [pair.awq, pair.exact]
    for card in cards:
        slots = [slot for slot in choice.slots if slot.gpu == card.index]
        assert sum(slot.share for slot in slots) <= UTILISATION
        claimed = sum(slot.share * card.visible for slot in slots)
        assert claimed + len(slots) * CONTEXT <= card.free
    visible = {card.index: card.visible for card in cards}
    for slot in choice.slots:
        assert slot.weights + slot.kv_bytes < slot.share * visible[slot.gpu] + visible[slot.gpu] / 1000
        assert slot.kv_bytes >= choice.context * pair.shape.kv_token_bytes
    assert choice.context >= MIN_KV_TOKENS


def test_the_exact_engine_gets_the_roomier_gpu() -> None:
    choice = choose([gpu(24), gpu(48, 1)])
    assert {slot.tier: slot.gpu for slot in choice.slots} == {"exact": 1, "fast": 0}


def test_a_small_second_gpu_does_not_shrink_the_pair() -> None:
    choice = choose([gpu(80), gpu(8, 1)])
    assert name_of(choice) == name_of(choose([gpu(80)]))


def test_a_third_gpu_changes_nothing() -> None:
    assert choose([gpu(24), gpu(24, 1), gpu(24, 2)]) == choose([gpu(24), gpu(24, 1)])


def test_memory_that_others_hold_is_left_to_them() -> None:
    busy = gpu(24, free=17 * GIB)
    choice = choose([busy])
    assert name_of(choice) == "qwen3-4b"
    assert_sound(choice, [busy])


@pytest.mark.parametrize(
    ("cards", "word"),
    [
        ([], "no GPU"),
        ([gpu(6)], "too small"),
        ([gpu(16, capability=(7, 0))], "too old"),
        ([gpu(8, free=2 * GIB)], "free GPU memory"),
    ],
)
def test_where_nothing_fits_the_demo_pair_runs_on_the_cpu(cards: list[Gpu], word: str) -> None:
    choice = choose(cards)
    assert choice.pair is None
    assert word in choice.reasons[0]
    assert "demo pair" in choice.reasons[0]


def test_a_card_sold_as_8_gb_is_large_enough() -> None:
    assert choose([gpu(8, total=7982 * MIB, free=7800 * MIB)]).pair is not None


def test_gpus_without_bfloat16_serve_float16() -> None:
    choice = choose([gpu(16, capability=(7, 5))])
    assert choice.half
    assert [slot.precision for slot in choice.slots] == ["awq", "fp16"]


def test_no_gated_model_is_picked() -> None:
    for size in range(8, 200, 4):
        for cards in ([gpu(size)], [gpu(size), gpu(size, 1)]):
            pair = choose(cards).pair
            assert pair is not None
            assert not pair.gated


def test_reasons_give_memory_and_the_name() -> None:
    reasons = " ".join(choose([gpu(24)]).reasons)
    assert "23.5 GiB of 24.0 GiB free" in reasons
    assert "qwen2.5-7b" in reasons
    assert "5.2 GiB of weights" in reasons


def test_a_budget_is_never_negative() -> None:
    assert budget(gpu(8, free=100 * MIB), 2) == 0
