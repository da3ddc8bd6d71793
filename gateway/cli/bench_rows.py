"""What `dualgauge bench` measures: the configurations that are at hand, and why others are not."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from engines import demo, environments, home, llamacpp, plan
from engines.bench import configurations
from engines.bench.configurations import BASELINE, EXACT, FAST, GGUF, Configuration
from engines.bench.results import Measured, Workload
from engines.plan import Placement
from engines.recipes import recipe
from engines.spec import EngineSpec
from gateway.cli.deployment import Prepared, checker
from gateway.cli.failures import Failure
from gateway.cli.preflight import free_ports

if TYPE_CHECKING:
    from gateway.cli.view import View

FIRST_PORT = 19600
_SIXTEEN = ("fp16", "bf16")
_NONE = "dualgauge.yaml has no engine of `kind: vllm` with `precision: {}`"
_GET_LLAMA = "`dualgauge engines install --kind llama.cpp` compiles it, once (minutes)"


@dataclass(frozen=True, slots=True)
class Rows:
    """`found` can be measured; `rows` are all, those that cannot with the reason. `python` has vLLM."""

    found: tuple[Configuration, ...]
    rows: tuple[Measured, ...]
    python: Path


def rows(prepared: Prepared, gguf: Path | None, workload: Workload, view: View) -> Rows:
    """The four configurations of a deployment. Raises Failure where it has no vLLM engine of ours."""
    exact, fast = _first(prepared, *_SIXTEEN), _first(prepared, "awq")
    either = exact or fast
    if either is None:
        raise Failure(
            f"there is nothing to measure: {_NONE.format('bf16`, `fp16` or `awq')} "
            "(those of `kind: external` and `hosted` are not ours to start)"
        )
    for placement in filter(None, (exact, fast)):
        _check_length(placement, workload)
    ports = iter(free_ports(FIRST_PORT, 4))
    name = either.spec.name
    make = partial(_server, tokenizer=prepared.models[name], workload=workload)
    made: list[Configuration | Measured] = []
    if exact is None:
        why = _NONE.format("bf16` or `fp16")
        made.append(_lacking(BASELINE, "16 bits, no paging (transformers)", why))
        made.append(_lacking(EXACT, "16 bits + PagedAttention (vLLM)", why))
    else:
        made.append(_baseline(exact, prepared, workload, next(ports)))
        made.append(make(EXACT, exact, prepared, next(ports)))
    if fast is None:
        made.append(_lacking(FAST, configurations.title_of("awq"), _NONE.format("awq")))
    else:
        made.append(make(FAST, fast, prepared, next(ports)))
    small = _gguf(prepared, gguf, either, view)
    if isinstance(small, str):
        made.append(_lacking(GGUF, "GGUF (llama.cpp)", small))
    else:
        made.append(make(GGUF, *small, next(ports)))
    return Rows(
        tuple(one for one in made if isinstance(one, Configuration)),
        tuple(one.unmeasured() if isinstance(one, Configuration) else one for one in made),
        prepared.programs[name],
    )


def _server(
    key: str, placement: Placement, prepared: Prepared, port: int, *, tokenizer: Path, workload: Workload
) -> Configuration:
    spec = placement.spec
    program, model = prepared.programs[spec.name], prepared.models[spec.name]
    check, flags = checker(spec, prepared).check, prepared.plan.machine.cpu_flags
    return configurations.served(
        key, placement, program, model, tokenizer, workload, port, os.environ, flags, check, _version(spec)
    )


def _version(spec: EngineSpec) -> str:
    """Of the llama-server that is compiled here, which does not know its own."""
    return f"llama.cpp {recipe('llama.cpp').version}" if spec.kind == "llama.cpp" and not spec.binary else ""


def _baseline(exact: Placement, prepared: Prepared, workload: Workload, port: int) -> Configuration:
    name = exact.spec.name
    check = checker(exact.spec, prepared).check
    program, model = prepared.programs[name], prepared.models[name]
    return configurations.baseline(exact, program, model, workload, port, check)


def _first(prepared: Prepared, *precisions: str) -> Placement | None:
    found = (p for p in prepared.plan.placements if p.spec.kind == "vllm" and p.spec.precision in precisions)
    return next(found, None)


def _lacking(key: str, title: str, why: str) -> Measured:
    return Measured(key=key, title=title, problem=why)


def _check_length(placement: Placement, workload: Workload) -> None:
    needed = max(workload.input_tokens + workload.output_tokens, workload.scored + 1)
    if placement.context is not None and needed > placement.context:
        raise Failure(
            f"engine `{placement.spec.name}` takes requests of {placement.context} tokens, not of the "
            f"{needed} that are to be measured: lower --input-tokens and --output-tokens, or raise its "
            "--max-model-len"
        )


def _gguf(
    prepared: Prepared, file: Path | None, beside: Placement, view: View
) -> tuple[Placement, Prepared] | str:
    """The deployment's own llama.cpp engine, else the file named, else the demo's; or why there is none."""
    own = next((p for p in prepared.plan.placements if p.spec.kind == "llama.cpp"), None)
    if own is not None and file is None:
        return own, prepared
    installed = environments.find(recipe("llama.cpp"), home.data_home())
    is_demo = (beside.spec.model or "").startswith(home.DEMO_PREFIX)
    if file is None and not is_demo:
        return "no GGUF file of the model is named: name one with --gguf FILE"
    if installed is None:
        return f"llama-server is not installed: {_GET_LLAMA}"
    if file is None:
        with view.making("the demo model as GGUF") as progress:
            file = demo.make_gguf(home=home.data_home(), progress=progress)
    try:
        file = llamacpp.file_of(file.absolute())
    except llamacpp.ModelError as error:
        raise Failure(f"--gguf: {error}") from None
    spec = EngineSpec(
        name="gguf",
        tier=beside.spec.tier,
        kind="llama.cpp",
        url="http://127.0.0.1:0",
        served_model=beside.spec.served_model,
        precision="gguf",
        model=str(file),
        gpu=beside.gpu,
    )
    machine = replace(prepared.plan.machine, gpus=()) if beside.gpu is None else prepared.plan.machine
    (placed,) = plan.plan([spec], machine, lambda _: plan.facts_of("", file)).placements
    placed = replace(placed, cpus=beside.cpus)
    whole = replace(
        prepared,
        programs={**prepared.programs, "gguf": llamacpp.binary_in(installed.python)},
        models={**prepared.models, "gguf": file},
    )
    return placed, whole
