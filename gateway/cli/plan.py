"""`dualgauge plan`: what fits on which GPUs, before anything is installed, fetched or started."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gateway.cli.chosen import HERE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engines.checkpoint import Facts
    from engines.hardware import Gpu, Machine
    from engines.plan import Plan
    from engines.spec import EngineSpec

DOES_NOT_FIT = 3


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asks for, beside models, configuration and GPUs."""

    context: int | None
    sequences: int | None
    cache: str | None


def _sizes(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> tuple[Gpu, ...]:
    from engines.hardware import imagined

    try:
        return tuple(imagined(index, value) for index, value in enumerate(values))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command("plan")
@click.option("--fast", metavar="MODEL", help="A hub's name or a model folder, for the fast engine.")
@click.option("--exact", metavar="MODEL", help="The same, for the exact engine.")
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help=f"Plan the engines of this configuration. [default: ./{HERE}, if it is there]",
)
@click.option(
    "--gpu",
    "gpus",
    metavar="SIZE",
    multiple=True,
    callback=_sizes,
    help="A GPU of this size instead of those of this machine; once for each.",
)
@click.option(
    "--context", metavar="TOKENS", type=click.IntRange(1), help="Requests as long as this must fit."
)
@click.option("--sequences", metavar="N", type=click.IntRange(1), help="So many requests run at a time.")
@click.option("--kv-cache-dtype", "cache", type=click.Choice(["auto", "fp8"]), help="How the cache is kept.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan_command(
    fast: str | None,
    exact: str | None,
    file: Path | None,
    gpus: tuple[Gpu, ...],
    context: int | None,
    sequences: int | None,
    cache: str | None,
    as_json: bool,
) -> None:
    """Show what fits on which GPUs: memory by purpose, vLLM's flags, and how many requests that serves.

    Nothing is installed, downloaded or started: sizes are read from a folder's config.json and the headers of
    its safetensors files, from the hub client's cache, or come from the table of known models. Without models
    and without a configuration it shows what `dualgauge up` would choose for these GPUs.

    \b
    Exit codes: 0 it fits, 1 it cannot be planned, 2 wrong options, 3 it does not fit (and what would).

    \b
    Examples:
      dualgauge plan
      dualgauge plan --gpu 24GiB
      dualgauge plan --gpu 24GiB --gpu 16GiB --exact Qwen/Qwen3-8B --fast Qwen/Qwen3-8B-AWQ
      dualgauge plan --exact ./mine --fast ./mine-awq --context 16384
      dualgauge plan --config dualgauge.yaml --json
    """
    from engines import hardware
    from engines.choice import machine_of
    from gateway.cli.failures import told

    if file is not None and (fast or exact):
        raise click.UsageError("give models or --config, not both")
    if "" in (fast, exact):
        raise click.UsageError("--fast and --exact want a model's name or folder, not an empty text")
    with told():
        real = hardware.look()
        machine = machine_of(gpus, real) if gpus else real
        asked = Asked(context, sequences, cache)
        reasons: tuple[str, ...] = ()
        if fast or exact:
            found = _models(fast, exact, machine, asked)
        elif file is not None or (HERE.exists() and not gpus):
            found = _configured(file, machine, asked)
        else:
            found, reasons = _chosen(machine, asked)
        _show(found, reasons, as_json)


def _models(fast: str | None, exact: str | None, machine: Machine, asked: Asked) -> Plan:
    """One engine or a pair, each on a GPU of its own where there are two, with the limits that suit it."""
    from engines import plan
    from engines.choice import pair_specs, propose
    from gateway.cli.failures import Failure

    if not machine.gpus:
        raise Failure("no NVIDIA GPU is seen here: say what to plan for, as in --gpu 24GiB")
    roomy = sorted(machine.gpus, key=lambda gpu: (-plan.available(gpu, 1), gpu.index))[:2]
    both = pair_specs(exact or "", fast or "", roomy, args=_cache(asked))
    specs = [spec for spec in both if spec.model]
    known = {spec.name: _known(spec) for spec in specs}
    proposal = propose(
        specs,
        machine,
        lambda spec: known[spec.name],
        context=asked.context,
        sequences=asked.sequences,
    )
    return proposal.plan


def _cache(asked: Asked) -> tuple[str, ...]:
    return ("--kv-cache-dtype", asked.cache) if asked.cache else ()


def _known(spec: EngineSpec) -> Facts:
    """The facts of a model that must be known. Raises Failure."""
    from engines import catalog
    from gateway.cli.failures import Failure
    from policies.document import nearest

    asked = spec.model or ""
    if _is_gguf(asked):
        raise Failure(f"{asked} is GGUF, for llama.cpp: `plan` knows what vLLM takes, of safetensors")
    facts = local_facts(spec)
    if facts.weights is None and Path(asked).is_dir():
        raise Failure(f"the size of {asked} is not known: {facts.unknown}")
    if facts.weights is None:
        known = catalog.names()
        like = next((name for name in known if asked and name.startswith(asked)), nearest(asked, known))
        names = f"did you mean `{like}`? Else give" if like else f"it is none of {', '.join(known)}; give"
        raise Failure(
            f"the size of {asked} is not known ({facts.unknown}): {names} a folder with a config.json and "
            "safetensors files"
        )
    return facts


def _is_gguf(model: str) -> bool:
    from engines import home

    place = home.made(model) or Path(model).expanduser()
    return model.endswith((".gguf", "-gguf")) or (
        any(place.glob("*.gguf")) and not any(place.glob("*.safetensors"))
    )


def local_facts(spec: EngineSpec) -> Facts:
    """What is known of a model here: its folder, the hub client's cache, the table. Raises PlanError."""
    from engines import home, hub, plan

    model = spec.model or ""
    made = home.made(model)
    if made is not None:
        return plan.facts_of(model, made if made.is_dir() else None)
    if Path(model).is_dir() or model.startswith(("/", "./", "../", "~")):
        return plan.facts_of(model, Path(model).expanduser())
    return plan.facts_of(model, hub.cached(model))


def _configured(file: Path | None, machine: Machine, asked: Asked) -> Plan:
    from engines import plan
    from gateway.cli.prepare import load

    config = load(file)
    engines = config.engines
    specs = _limited([spec for spec in engines if spec.kind == "vllm"], asked)
    swap = None if config.swap is None else config.swap.tier
    found = plan.arrange(specs, machine, local_facts, swap)
    left = [spec.name for spec in engines if spec.kind != "vllm"]
    note = f"not planned, since they are no vLLM engines that are started here: {', '.join(left)}"
    return replace(found, notes=(*found.notes, note)) if left else found


def _limited(specs: Sequence[EngineSpec], asked: Asked) -> list[EngineSpec]:
    """The engines with the limits that are asked for instead of their own."""
    limits = _cache(asked)
    if asked.context:
        limits += ("--max-model-len", str(asked.context))
    if asked.sequences:
        limits += ("--max-num-seqs", str(asked.sequences))
    return [replace(spec, args=(*spec.args, *limits)) for spec in specs]


def _chosen(machine: Machine, asked: Asked) -> tuple[Plan, tuple[str, ...]]:
    """The configuration that `up` would write for these GPUs, and why it is as it is."""
    from engines import plan
    from engines.choice import choose
    from gateway.cli.starter import starter
    from gateway.config import parse

    choice = choose(machine.gpus)
    text = starter(choice, (8101, 8102), listen="127.0.0.1:8080", admin="127.0.0.1:8081")
    specs = _limited(parse(text, HERE, {}).engines, asked)
    return plan.arrange(specs, machine, local_facts), choice.reasons


def _show(found: Plan, reasons: tuple[str, ...], as_json: bool) -> None:
    """Print the plan, and end with the exit code that it has."""
    import msgspec

    from engines import alternatives, plan
    from gateway.cli import planned

    problems = [*plan.no_room(found), *plan.wrong_length(found)]
    specs = [replace(placement.spec, gpu=placement.gpu) for placement in found.placements]
    facts = {placement.spec.name: placement.facts for placement in found.placements}
    changes = []
    if problems:
        changes = alternatives.changes(specs, found.machine, lambda spec: facts[spec.name])
    if as_json:
        text = planned.record(found, problems=problems, notes=[*reasons, *found.notes], changes=changes)
        click.echo(msgspec.json.format(msgspec.json.encode(text), indent=2))
    else:
        from rich.console import Console

        planned.show(
            found,
            Console(),
            problems=problems,
            notes=found.notes,
            changes=changes,
            reasons=reasons,
        )
    if problems:
        sys.exit(DOES_NOT_FIT)
