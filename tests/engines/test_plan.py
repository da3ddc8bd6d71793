from pathlib import Path

import pytest

from engines import overhead
from engines.checkpoint import Facts
from engines.flags import has_option, number, option
from engines.hardware import GIB, MIB, Gpu, Machine
from engines.launch import Command
from engines.overhead import Work
from engines.plan import (
    CONTEXT,
    CPU_WORK,
    SLEEPER,
    UTILISATION,
    PlanError,
    facts_of,
    no_room,
    plan,
    settings,
    split_cores,
    too_short,
)
from engines.spec import EngineSpec
from engines.vllm import command

QWEN = "Qwen/Qwen2.5-7B-Instruct"


def spec(name: str = "fast-0", **changes: object) -> EngineSpec:
    values: dict[str, object] = {
        "name": name,
        "tier": "fast",
        "kind": "vllm",
        "url": "http://127.0.0.1:8101",
        "served_model": "smollm2",
        "precision": "awq",
        "model": f"{QWEN}-AWQ",
    }
    return EngineSpec(**(values | changes))  # type: ignore[arg-type]


def machine(*gpus: Gpu, cpus: int = 2, available: int = 20 * GIB) -> Machine:
    return Machine(gpus, tuple(range(cpus)), 24 * GIB, available)


def card(size: int, index: int = 0, free: int | None = None) -> Gpu:
    return Gpu(index, "card", size * GIB, size * GIB - 480 * MIB if free is None else free)


def known(engine: EngineSpec) -> Facts:
    return facts_of(engine.model or "", None)


LIMITS = ("--max-model-len", "8192", "--max-num-seqs", "16")
PAIR = (
    spec("fast-0", gpu=0, args=LIMITS),
    spec("exact-0", gpu=0, model=QWEN, precision="bf16", tier="exact", args=LIMITS),
)


def test_two_engines_on_one_gpu_without_shares_get_planned_ones() -> None:
    fast, exact = plan(PAIR, machine(card(32)), known).placements
    assert fast.share is not None
    assert exact.share is not None
    assert fast.share + exact.share <= UTILISATION
    assert fast.memory + exact.memory + 2 * CONTEXT <= card(32).free
    assert exact.memory - fast.memory == pytest.approx(8.2 * GIB, abs=GIB)
    assert fast.kv == pytest.approx(exact.kv, abs=32 * GIB // 500)
    assert fast.device == exact.device == "gpu:0"
    assert f"({fast.memory:,} bytes)" in fast.describe()
    assert "weights 5.2 GiB" in fast.describe()


def test_a_given_share_stays_and_the_other_gets_the_rest() -> None:
    first = spec("a", gpu=0, share=0.265, args=LIMITS)
    fast, exact = plan((first, PAIR[1]), machine(card(32)), known).placements
    assert fast.share == 0.265
    assert exact.share == pytest.approx(UTILISATION - 0.265, abs=0.01)


def test_a_share_among_the_arguments_is_a_given_one() -> None:
    first = spec("a", gpu=0, share=0.5, args=(*LIMITS, "--gpu-memory-utilization=0.265"))
    fast, exact = plan((first, PAIR[1]), machine(card(32)), known).placements
    assert fast.share == 0.265
    assert exact.share == pytest.approx(UTILISATION - 0.265, abs=0.01)


def test_a_short_cache_is_noted_and_left_to_the_engine() -> None:
    engine = spec(gpu=0, share=0.3, args=("--max-model-len", "32768", "--max-num-seqs", "16"))
    found = plan((engine,), machine(card(24)), known)
    assert no_room(found) == []
    (note,) = found.notes
    assert note == too_short(found)[0]
    assert "fast-0 is to take requests of 32,768 tokens" in note
    longest = found.placements[0].longest
    assert longest is not None
    assert f"holds one of {longest:,}" in note


def test_settings_are_those_of_the_command_line() -> None:
    args = ("--max-num-seqs=8", "--max_num_batched_tokens", "4K", "--max-model-len", "8k", "--enforce-eager")
    found = settings(spec(args=(*args, "--kv-cache-dtype", "fp8_e4m3", "--block-size", "32")), card(24))
    assert found.work == Work(batched=4096, sequences=8, graphs=False)
    assert (found.context, found.block, found.element, found.in_flight) == (8000, 32, 1, 8192)


def test_settings_without_arguments_are_vllms_own() -> None:
    assert settings(spec(), card(24)).work == overhead.defaults(24 * GIB, "card") == Work(2048, 256)
    assert settings(spec(), card(80)).work == Work(8192, 1024)
    assert settings(spec(), None).work == CPU_WORK
    assert (settings(spec(), card(24)).block, settings(spec(), None).block) == (16, 32)


def test_numbers_keep_in_32_bits_what_the_engine_computes_in_32() -> None:
    assert settings(spec(args=("--dtype", "float32")), card(24)).element == 4


@pytest.mark.parametrize(
    ("args", "amount"),
    [
        (("--n", "12"), 12),
        (("--n=1k",), 1000),
        (("--n", "1.5K"), 1536),
        (("--n", "2M"), 2 << 20),
        (("--n", "-1"), None),
        (("--n", "auto"), None),
        (("--n",), None),
        ((), None),
    ],
)
def test_numbers_are_read_as_vllm_reads_them(args: tuple[str, ...], amount: int | None) -> None:
    assert number(args, "--n") == amount


def test_the_last_of_two_options_counts() -> None:
    assert option(("--n", "1", "--n=2"), "--n") == "2"


def test_models_of_unknown_size_get_equal_parts() -> None:
    engines = (spec("a", gpu=0, model="who/knows"), spec("b", gpu=0))
    first, second = plan(engines, machine(card(24)), known).placements
    assert first.share == second.share == pytest.approx(0.46, abs=0.01)
    assert "weights unknown" in first.describe()


def test_engines_on_two_gpus_have_devices_of_their_own() -> None:
    engines = (spec("a", gpu=0), spec("b", gpu=1))
    found = plan(engines, machine(card(24), card(24, 1)), known).placements
    assert [placement.device for placement in found] == ["gpu:0", "gpu:1"]


def test_without_a_gpu_named_it_is_the_first() -> None:
    assert plan((spec(),), machine(card(24, 3)), known).placements[0].gpu == 3


def test_the_demo_models_run_on_the_cpu_unless_a_gpu_is_named() -> None:
    engines = (spec("a", model="demo/smollm2-135m-awq"), spec("b", model="demo/smollm2-135m-awq", gpu=0))
    found = plan(engines, machine(card(24)), known).placements
    assert [placement.device for placement in found] == ["cpu", "gpu:0"]


@pytest.mark.parametrize(
    ("engines", "gpus", "words"),
    [
        (PAIR, [card(16)], ("gpu 0", "cannot take its engines", "exact-0 needs")),
        ((spec(gpu=2),), [card(24)], ("wants gpu 2", "only: 0")),
        ((spec("a", gpu=0, share=0.6), spec("b", gpu=0, share=0.6)), [card(24)], ("add up to 1.20",)),
        ((spec("a", gpu=0, share=0.5),), [card(24, free=6 * GIB)], ("6.0 GiB free", "nvidia-smi")),
        ((spec("a", gpu=0, share=0.05),), [card(24)], ("a needs",)),
    ],
)
def test_what_does_not_fit_is_refused_with_figures(
    engines: tuple[EngineSpec, ...], gpus: list[Gpu], words: tuple[str, ...]
) -> None:
    with pytest.raises(PlanError) as caught:
        plan(engines, machine(*gpus), known)
    for word in words:
        assert word in str(caught.value)


def test_on_the_cpu_cores_are_split_and_the_cache_is_a_gibibyte() -> None:
    engines = (spec("a", model="demo/smollm2-135m-awq"), spec("b", model="demo/smollm2-135m-bf16"))
    found = plan(engines, machine(cpus=4), known)
    assert [placement.cpus for placement in found.placements] == [(0, 1), (2, 3)]
    assert {placement.device for placement in found.placements} == {"cpu"}
    assert {placement.kv for placement in found.placements} == {GIB}
    assert found.notes == ()


def test_engines_that_name_a_gpu_run_on_the_cpu_where_there_is_none_and_it_is_said() -> None:
    engines = tuple(spec(name, gpu=0, model="demo/smollm2-135m-awq") for name in ("a", "b"))
    found = plan(engines, machine(), known)
    assert {placement.device for placement in found.placements} == {"cpu"}
    assert "no NVIDIA GPU is seen" in found.notes[0]


def test_the_cache_that_the_operator_set_counts() -> None:
    engine = spec(model="demo/smollm2-135m-awq", env={"VLLM_CPU_KVCACHE_SPACE": "4"})
    assert plan((engine,), machine(), known).placements[0].kv == 4 * GIB


def test_more_than_the_memory_of_the_machine_is_refused() -> None:
    with pytest.raises(PlanError, match=r"need .* are available"):
        plan((spec(model=QWEN),), machine(available=8 * GIB), known)


def test_engines_that_others_start_are_not_placed() -> None:
    assert plan((spec(kind="external", model=None),), machine(), known).placements == ()


@pytest.mark.parametrize(
    ("cpus", "parts", "split"),
    [
        ((0, 1), 2, [(0,), (1,)]),
        ((0, 1, 2, 3, 4), 2, [(0, 1, 2), (3, 4)]),
        ((5,), 2, [(5,), (5,)]),
        ((0, 1), 3, [(0,), (1,), (0,)]),
        ((0, 1), 1, [(0, 1)]),
        ((0, 1), 0, []),
    ],
)
def test_cores_are_split(cpus: tuple[int, ...], parts: int, split: list[tuple[int, ...]]) -> None:
    assert split_cores(cpus, parts) == split


def placed(**changes: object) -> tuple[Command, EngineSpec]:
    engine = spec(**({"model": "demo/smollm2-135m-awq"} | changes))
    gpus = [card(24)] if engine.gpu is not None else []
    placement = plan((engine,), machine(*gpus), known).placements[0]
    return command(
        placement, Path("/env/bin/python"), "/models/x", {"HOME": "/h", "PYTHONPATH": "/p"}
    ), engine


def value(done: Command, option: str) -> str:
    return done.argv[done.argv.index(option) + 1]


def test_a_gpu_engines_command_line() -> None:
    done, _ = placed(gpu=0, share=0.4, args=("--max-model-len", "8192"))
    assert value(done, "serve") == "/models/x"
    assert value(done, "--host") == "127.0.0.1"
    assert value(done, "--port") == "8101"
    assert value(done, "--served-model-name") == "smollm2"
    assert value(done, "--gpu-memory-utilization") == "0.400"
    assert done.argv[-2:] == ("--max-model-len", "8192")
    assert "--block-size" not in done.argv
    assert done.env["CUDA_VISIBLE_DEVICES"] == "0"
    assert "VLLM_CPU_KVCACHE_SPACE" not in done.env


def test_a_cache_set_by_its_flag_is_not_overruled_by_the_variable() -> None:
    done, engine = placed(args=("--kv-cache-memory-bytes", "2G"))
    assert "VLLM_CPU_KVCACHE_SPACE" not in done.env
    assert plan((engine,), machine(), known).placements[0].kv == 2 * GIB


def test_a_cpu_engines_command_line() -> None:
    done, _ = placed()
    assert value(done, "--block-size") == "32"
    assert value(done, "--dtype") == "bfloat16"
    assert "--gpu-memory-utilization" not in done.argv
    assert done.env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert done.env["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"


def test_every_engine_keeps_connections_and_calls_nobody() -> None:
    done, _ = placed()
    assert done.env["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] == "75"
    assert done.env["VLLM_NO_USAGE_STATS"] == "1"
    assert done.env["HF_HUB_OFFLINE"] == "1"
    assert done.env["HOME"] == "/h"
    assert "PYTHONPATH" not in done.env


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", "float16"), ("bf16", "bfloat16")])
def test_the_precision_is_the_type_of_the_weights(precision: str, dtype: str) -> None:
    done, _ = placed(gpu=0, precision=precision)
    assert value(done, "--dtype") == dtype


def test_what_the_operator_wrote_wins() -> None:
    done, _ = placed(
        args=("--block-size=16", "--dtype", "float32"), env={"VLLM_NO_USAGE_STATS": "0", "MINE": "1"}
    )
    assert done.argv.count("--dtype") == 1
    assert "--block-size" not in done.argv
    assert done.env["VLLM_NO_USAGE_STATS"] == "0"
    assert done.env["MINE"] == "1"


def test_the_engines_key_is_not_on_the_command_line() -> None:
    done, _ = placed(api_key="sk-secret")
    assert done.env["VLLM_API_KEY"] == "sk-secret"
    assert "sk-secret" not in " ".join(done.argv)


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (("--dtype", "half"), True),
        (("--dtype=half",), True),
        (("--d_type",), False),
        (("dtype",), False),
        ((), False),
    ],
)
def test_an_option_is_seen_in_its_spellings(args: tuple[str, ...], found: bool) -> None:
    assert has_option(args, "--dtype") is found


def test_engines_that_take_turns_have_the_gpu_one_after_the_other() -> None:
    with pytest.raises(PlanError):
        plan(PAIR, machine(card(20)), known)
    found = plan(PAIR, machine(card(20)), known, swap="exact")
    fast, exact = found.placements
    assert [[p.spec.name for p in awake] for awake in found.turns(card(20))] == [["fast-0"], ["exact-0"]]
    for placement in (fast, exact):
        assert placement.memory + CONTEXT + SLEEPER <= card(20).free
        assert placement.kv is not None
        assert placement.kv > 0


def test_replicas_of_a_tier_that_takes_turns_share_its_turn() -> None:
    specs = (*PAIR, spec("fast-1", gpu=0, args=LIMITS))
    found = plan(specs, machine(card(24)), known, swap="exact")
    by_name = {placement.spec.name: placement for placement in found.placements}
    assert by_name["fast-0"].memory + by_name["fast-1"].memory + 2 * CONTEXT + SLEEPER <= card(24).free
    assert by_name["exact-0"].memory > by_name["fast-0"].memory


def test_one_that_is_too_large_for_its_turn_is_refused() -> None:
    with pytest.raises(PlanError, match="exact-0 needs"):
        plan(PAIR, machine(card(12)), known, swap="exact")


def test_replicas_on_two_gpus_have_one_each() -> None:
    specs = (spec("fast-0", gpu=0, args=LIMITS), spec("fast-1", gpu=1, args=LIMITS))
    found = plan(specs, machine(card(16), card(16, 1)), known)
    assert [placement.device for placement in found.placements] == ["gpu:0", "gpu:1"]
