import pytest

from engines import plan
from engines.choice import MIN_CONTEXT, Choice, choose, machine_of, pair_specs, propose, table
from engines.hardware import GIB, MIB, Gpu
from engines.plan import CONTEXT, UTILISATION, available


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


ONE = {
    8: "qwen2.5-1.5b",
    10: "qwen2.5-1.5b",
    12: "qwen2.5-1.5b",
    16: "qwen3-4b",
    24: "qwen3-4b",
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
    assert {p.gpu for p in choice.placements} == {0}
    assert_sound(choice, [gpu(size)])


@pytest.mark.parametrize("size", TWO)
def test_two_gpus(size: int) -> None:
    cards = [gpu(size), gpu(size, 1)]
    choice = choose(cards)
    assert name_of(choice) == TWO[size]
    assert {p.gpu for p in choice.placements} == {0, 1}
    assert_sound(choice, cards)


def assert_sound(choice: Choice, cards: list[Gpu]) -> None:
    """Shares, weights and caches add up on every card, and a context fits into each cache."""
    pair = choice.pair
    assert pair is not None
    assert [p.spec.tier for p in choice.placements] == ["fast", "exact"]
    assert [p.spec.model for p in choice.placements] == [pair.awq, pair.exact]
    for card in cards:
        here = [p for p in choice.placements if p.gpu == card.index]
        assert sum(p.share or 0 for p in here) <= UTILISATION
        assert sum(p.memory for p in here) + len(here) * CONTEXT <= card.free
    for placement in choice.placements:
        assert placement.budget is not None
        assert placement.kv is not None
        assert placement.memory == placement.budget.total + placement.kv
        assert placement.pool is not None
        assert placement.pool.requests(choice.context) >= 1
        assert placement.context == choice.context
    assert choice.context >= MIN_CONTEXT


def test_the_exact_engine_gets_the_roomier_gpu() -> None:
    choice = choose([gpu(24), gpu(48, 1)])
    assert {p.spec.tier: p.gpu for p in choice.placements} == {"exact": 1, "fast": 0}


def test_a_small_second_gpu_does_not_shrink_the_pair() -> None:
    choice = choose([gpu(80), gpu(8, 1)])
    assert name_of(choice) == name_of(choose([gpu(80)]))


def test_a_third_gpu_changes_nothing() -> None:
    assert choose([gpu(24), gpu(24, 1), gpu(24, 2)]) == choose([gpu(24), gpu(24, 1)])


def test_memory_that_others_hold_is_left_to_them() -> None:
    busy = gpu(32, free=17 * GIB)
    choice = choose([busy])
    assert name_of(choice) == "qwen3-4b"
    assert_sound(choice, [busy])


@pytest.mark.parametrize(
    ("cards", "word"),
    [
        ([], "no NVIDIA GPU"),
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
    assert [p.spec.precision for p in choice.placements] == ["awq", "fp16"]


def test_no_gated_model_is_picked() -> None:
    for size in range(8, 200, 4):
        for cards in ([gpu(size)], [gpu(size), gpu(size, 1)]):
            pair = choose(cards).pair
            assert pair is not None
            assert not pair.gated


def test_reasons_give_memory_and_the_name() -> None:
    reasons = " ".join(choose([gpu(24)]).reasons)
    assert "23.5 GiB of 24.0 GiB free" in reasons
    assert "qwen3-4b" in reasons
    assert "2.5 GiB of weights" in reasons


def test_what_is_available_is_never_negative() -> None:
    assert available(gpu(8, free=100 * MIB), 2) == 0


def test_an_engine_runs_as_many_requests_as_it_can_keep() -> None:
    fast, exact = choose([gpu(24), gpu(24, 1)]).placements
    assert fast.settings.work.sequences == 128
    assert exact.settings.work.sequences == 64
    for placement in (fast, exact):
        assert placement.pool is not None
        assert placement.pool.requests(512) >= placement.settings.work.sequences


def test_limits_that_are_asked_for_stay() -> None:
    cards = [gpu(24)]
    specs = pair_specs("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct-AWQ", cards)
    proposal = propose(specs, machine_of(cards), table, context=32768, sequences=4)
    assert not proposal.fits
    assert {p.settings.work.sequences for p in proposal.plan.placements} == {4}
    assert {p.context for p in proposal.plan.placements} == {32768}
    assert len(plan.too_short(proposal.plan)) == 2
