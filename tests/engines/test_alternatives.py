from collections.abc import Sequence
from dataclasses import replace

import pytest

from engines import alternatives
from engines.alternatives import Change, changes
from engines.choice import machine_of, pair_specs, propose, table
from engines.hardware import Gpu, imagined
from engines.plan import arrange, fits
from engines.spec import EngineSpec

SMALL = ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct-AWQ")


def gpus(*sizes: str, **more: object) -> list[Gpu]:
    return [replace(imagined(at, size), **more) for at, size in enumerate(sizes)]  # type: ignore[arg-type]


def asked(cards: Sequence[Gpu], context: int, models: tuple[str, str] = SMALL) -> list[EngineSpec]:
    """The pair on these GPUs, that must take so long requests."""
    proposal = propose(pair_specs(*models, cards), machine_of(cards), table, context=context)
    assert not proposal.fits
    return [placement.spec for placement in proposal.plan.placements]


def offered(specs: Sequence[EngineSpec], cards: Sequence[Gpu]) -> dict[str, Change]:
    return {change.kind: change for change in changes(specs, machine_of(cards), table)}


def test_every_change_that_is_offered_fits() -> None:
    for cards, context in (
        (gpus("24"), 8192),
        (gpus("16"), 4096),
        (gpus("12", "16"), 8192),
        (gpus("24"), 32768),
    ):
        found = changes(asked(cards, context), machine_of(cards), table)
        assert found
        for change in found:
            assert fits(change.plan), change.text


def test_a_pair_that_is_a_little_too_large_gets_the_small_changes_first() -> None:
    cards = gpus("24")
    found = offered(asked(cards, 8192), cards)
    assert list(found) == ["context", "fp8-cache", "swap", "model", "gpu"]
    assert "--max-model-len 4096" in found["context"].text
    assert "--kv-cache-dtype fp8" in found["fp8-cache"].text
    assert "exact-0 sleeps" in found["swap"].text
    assert "14.2 GiB of weights" in found["swap"].text
    assert "swap: {tier: exact}" in found["swap"].text
    assert "Qwen/Qwen3-4B and Qwen/Qwen3-4B-AWQ" in found["model"].text
    assert found["gpu"].text == "take a GPU of 32 GiB"


def test_fewer_requests_are_offered_where_they_are_enough() -> None:
    cards = gpus("24")
    many = ("--max-num-seqs", "256", "--max-model-len", "4096")
    specs = pair_specs(*SMALL, cards, args=many)
    assert not fits(arrange(specs, machine_of(cards), table))
    assert "--max-num-seqs" in offered(specs, cards)["sequences"].text


def test_half_of_the_bytes_and_a_shorter_context_together() -> None:
    cards = gpus("24")
    change = offered(asked(cards, 16384), cards)["fp8-cache"]
    assert "--kv-cache-dtype fp8, " in change.text
    assert change.text.endswith("--max-model-len 8192")
    assert {p.settings.element for p in change.plan.placements} == {1}


def test_old_gpus_are_not_offered_fp8() -> None:
    cards = gpus("24", capability=(8, 6))
    assert "fp8-cache" not in offered(asked(cards, 8192), cards)


def test_engines_on_the_wrong_gpus_are_offered_the_other_split() -> None:
    cards = gpus("12", "24")
    limits = ("--max-model-len", "8192", "--max-num-seqs", "16")
    fast, exact = pair_specs(*SMALL, [cards[0], cards[1]], args=limits)
    assert (fast.gpu, exact.gpu) == (1, 0)
    assert (
        offered([fast, exact], cards)["split"].text
        == "split them otherwise: fast-0 on gpu 0, exact-0 on gpu 1"
    )


def test_a_model_that_is_too_large_alone_is_offered_no_swap() -> None:
    cards = gpus("16")
    found = offered(asked(cards, 4096), cards)
    assert set(found) == {"model", "gpu"}


def test_a_model_that_no_gpu_holds_is_offered_only_a_smaller_one() -> None:
    cards = gpus("24")
    huge = replace(table(pair_specs(*SMALL, cards)[0]), weights=1 << 50)
    engine = pair_specs("who/knows", "who/knows", cards)[1]
    assert [change.kind for change in changes([engine], machine_of(cards), lambda _: huge)] == ["model"]


@pytest.mark.parametrize("size", alternatives.SIZES)
def test_sizes_of_gpus_are_sizes(size: int) -> None:
    assert imagined(0, str(size)).total == size << 30
