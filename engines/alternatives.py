"""The nearest changes with which engines fit that do not: each one is planned before it is offered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from engines import flags, plan
from engines.choice import CONTEXTS, choose
from engines.hardware import GIB, Gpu, Machine, gib
from engines.plan import Plan, PlanError, Sizer
from engines.spec import EngineSpec

FP8_CAPABILITY = (8, 9)
LEAST_CONTEXT = 2048
"""A shorter context than this is not worth offering."""
SIZES = (8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 141, 180, 288)
"""GiB of GPUs that are made."""


@dataclass(frozen=True, slots=True)
class Change:
    """One way out. `kind` is a word for programs, `text` a sentence for people, `plan` what becomes of it."""

    kind: str
    text: str
    plan: Plan


def changes(specs: Sequence[EngineSpec], machine: Machine, facts: Sizer) -> list[Change]:
    """What makes these engines fit, from the smallest change to the largest; empty where nothing does."""
    tries: tuple[Callable[[Sequence[EngineSpec], Machine, Sizer], Iterator[Change]], ...] = (
        _fewer_requests,
        _shorter,
        _fp8_cache,
        _other_split,
        _swap,
        _smaller_model,
        _larger_gpu,
    )
    return [change for attempt in tries for change in attempt(specs, machine, facts)]


def _planned(
    specs: Sequence[EngineSpec], machine: Machine, facts: Sizer, swap: str | None = None
) -> Plan | None:
    """The plan, where it holds."""
    try:
        found = plan.arrange(specs, machine, facts, swap)
    except PlanError:
        return None
    return found if plan.fits(found) else None


def _with(specs: Sequence[EngineSpec], *args: str) -> list[EngineSpec]:
    return [replace(spec, args=(*spec.args, *args)) for spec in specs]


def _fewer_requests(specs: Sequence[EngineSpec], machine: Machine, facts: Sizer) -> Iterator[Change]:
    """With fewer requests at a time, sampling and CUDA graphs take less."""
    for many in (64, 32, 16, 8):
        if all((flags.number(spec.args, "--max-num-seqs") or 256) <= many for spec in specs):
            continue
        found = _planned(_with(specs, "--max-num-seqs", str(many)), machine, facts)
        if found is not None:
            yield Change("sequences", f"run at most {many} requests at a time: --max-num-seqs {many}", found)
            return


def _shorter(specs: Sequence[EngineSpec], machine: Machine, facts: Sizer) -> Iterator[Change]:
    """With the longest context that fits."""
    for context in (size for size in CONTEXTS if size >= LEAST_CONTEXT):
        found = _planned(_with(specs, "--max-model-len", str(context)), machine, facts)
        if found is not None:
            text = f"take requests of {context:,} tokens at most: --max-model-len {context}"
            yield Change("context", text, found)
            return


def _fp8_cache(specs: Sequence[EngineSpec], machine: Machine, facts: Sizer) -> Iterator[Change]:
    """Keys and values of 8 bits; where that is not enough, with the longest context that fits then."""
    if any(gpu.capability is not None and gpu.capability < FP8_CAPABILITY for gpu in machine.gpus):
        return
    if not machine.gpus or all(flags.has_option(spec.args, "--kv-cache-dtype") for spec in specs):
        return
    smaller = _with(specs, "--kv-cache-dtype", "fp8")
    found = _planned(smaller, machine, facts)
    text = "keep keys and values in 8 bits, which costs a little quality: --kv-cache-dtype fp8"
    if found is not None:
        yield Change("fp8-cache", text, found)
        return
    for change in _shorter(smaller, machine, facts):
        flag = change.text.rpartition(": ")[2]
        yield Change("fp8-cache", f"{text}, and {flag}", change.plan)


def _other_split(specs: Sequence[EngineSpec], machine: Machine, facts: Sizer) -> Iterator[Change]:
    """The engines on other GPUs of the machine, without the shares that they had."""
    movable = [spec for spec in specs if spec.launched]
    if len(machine.gpus) < 2 or not movable:
        return
    now = tuple(spec.gpu for spec in movable)
    for places in product([gpu.index for gpu in machine.gpus], repeat=len(movable)):
        if places == now:
            continue
        moved = [replace(spec, gpu=gpu, share=None) for spec, gpu in zip(movable, places, strict=True)]
        found = _planned(moved, machine, facts)
        if found is not None:
            where = ", ".join(f"{spec.name} on gpu {spec.gpu}" for spec in moved)
            yield Change("split", f"split them otherwise: {where}", found)
            return


def _swap(specs: Sequence[EngineSpec], machine: Machine, facts: Sizer) -> Iterator[Change]:
    """One engine of a shared GPU at a time, the other asleep with its weights in the machine's memory."""
    shared = [gpu for gpu in machine.gpus if sum(spec.gpu == gpu.index for spec in specs) > 1]
    if not shared or len(specs) != 2 or len({spec.tier for spec in specs}) != 2:
        return
    sleeping = next((spec for spec in specs if spec.tier == "exact"), specs[-1])
    found = _planned([replace(spec, share=None) for spec in specs], machine, facts, sleeping.tier)
    if found is None:
        return
    kept = gib(sum(p.facts.weights or 0 for p in found.placements if p.spec.name == sleeping.name))
    text = (
        f"swap: {sleeping.name} sleeps until it is needed, its {kept} of weights in the machine's memory, "
        f"and the other one sleeps meanwhile: swap: {{tier: {sleeping.tier}}} in the configuration"
    )
    yield Change("swap", text, found)


def _smaller_model(specs: Sequence[EngineSpec], machine: Machine, _: Sizer) -> Iterator[Change]:
    """The largest pair of the table that fits these GPUs."""
    choice = choose(machine.gpus)
    models = {spec.model for spec in specs}
    if choice.pair is None or {choice.pair.exact, choice.pair.awq} <= models:
        return
    text = (
        f"take {choice.pair.exact} and {choice.pair.awq}, which fit with requests of "
        f"{choice.context:,} tokens"
    )
    yield Change("model", text, Plan(choice.placements, machine))


def _larger_gpu(specs: Sequence[EngineSpec], machine: Machine, facts: Sizer) -> Iterator[Change]:
    """The smallest GPUs on which they fit as they are, as many as they have now."""
    used = sorted({spec.gpu for spec in specs if spec.gpu is not None})
    if not used:
        return
    for size in SIZES:
        gpus = tuple(Gpu(index, f"{size} GiB GPU", size * GIB, size * GIB) for index in used)
        idle = tuple(replace(gpu, free=gpu.visible) for gpu in gpus)
        found = _planned([replace(spec, share=None) for spec in specs], replace(machine, gpus=idle), facts)
        if found is not None:
            many = "a GPU" if len(used) == 1 else f"{len(used)} GPUs"
            yield Change("gpu", f"take {many} of {size} GiB", found)
            return
