"""Where each engine that we start runs and how much memory it gets: bytes in, bytes out, nothing is asked.

On a GPU each engine without a `share` gets its weights, what it needs to work, and an equal part of what is
left for KV cache; on the CPU the KV cache is a fixed size. A plan that cannot hold is refused with the
figures. What they rest on: weights and KV cache are exact (`checkpoint.py`, `kv_cache.py`), the rest is an
estimate (`overhead.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from engines import catalog, checkpoint, flags, kv_cache, overhead
from engines.checkpoint import Facts
from engines.hardware import GIB, Gpu, Machine, gib
from engines.home import DEMO_PREFIX
from engines.kv_cache import Pool
from engines.overhead import Work
from engines.spec import EngineSpec

CPU = "cpu"
CPU_KV = GIB
CPU_OVERHEAD = int(2.4 * GIB)
"""What a vLLM process takes beside weights and KV cache on a CPU: libraries, activations, the API server."""
LLAMA_CPP_OVERHEAD = GIB // 4
"""The same of a llama-server, whose small model took 0.3 GiB in all."""
CPU_BLOCK = 32
"""Tokens a block, as we start engines on a CPU."""
CPU_WORK = Work(batched=2048, sequences=128, graphs=False)
UTILISATION = 0.94
"""The part of a GPU's memory that its engines may claim together; vLLM's own default for one is 0.92."""
CONTEXT = GIB // 2
"""A process's CUDA context, bytes: outside of what vLLM charges to its share, so it must stay free."""
SLEEPER = GIB
"""Bytes that an engine keeps on its GPU while it sleeps: its CUDA context and graphs. An estimate."""
UNUSUAL = GIB
"""Activations of a model whose config.json does not tell its widths."""


LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
_SCALED = ("--hf-overrides", "--rope-scaling")
"""Options that may give a model other positions than its config.json has."""
_NUMBERS = ("--max-num-batched-tokens", "--max-num-seqs", "--max-model-len", "--block-size")
_AUTO = ("auto", "-1")
"""With which vLLM finds the longest request itself."""


class PlanError(Exception):
    """Engines that cannot be placed; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What an engine's command line asks for.

    `context` is its longest request in tokens, where it names one; `block` tokens a block; `element` bytes of
    one cached number; `batches` how many are computed at a time.
    """

    work: Work
    context: int | None
    block: int
    element: int
    batches: int

    @property
    def in_flight(self) -> int:
        return self.work.batched * self.batches


@dataclass(frozen=True, slots=True)
class Budget:
    """What an engine takes before its KV cache, bytes."""

    weights: int
    activations: int
    graphs: int
    other: int

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.graphs + self.other


@dataclass(frozen=True, slots=True)
class Placement:
    """One engine on its device. `memory` is all that it may take, `kv` what the cache gets; bytes.

    `device` is `cpu` or `gpu:N`: engines of one device are never started at the same time. `share` is set on
    GPUs, `cpus` on the CPU. `budget` is None where the size of the weights is not known.
    """

    spec: EngineSpec
    device: str
    memory: int
    facts: Facts
    settings: Settings
    budget: Budget | None
    kv: int | None
    share: float | None = None
    cpus: tuple[int, ...] = ()

    @property
    def gpu(self) -> int | None:
        return None if self.device == CPU else int(self.device.removeprefix("gpu:"))

    @property
    def pool(self) -> Pool | None:
        """The blocks of its KV cache, where the model's attention is one that we can count."""
        if self.kv is None or self.facts.cache is None:
            return None
        wanted = self.settings
        return kv_cache.pool(
            self.facts.cache,
            self.kv,
            block=wanted.block,
            element=wanted.element,
            in_flight=wanted.in_flight,
        )

    @property
    def context(self) -> int | None:
        """The longest request it will take: as its command line says, else as its model was made."""
        return self.settings.context or self.facts.context

    @property
    def longest(self) -> int | None:
        """The longest single request that its KV cache can hold, up to what the model was made for."""
        return self.pool.longest(self.context or 1 << 20) if self.pool else None

    def describe(self) -> str:
        """One line with bytes, for people."""
        parts = []
        if self.share is not None:
            parts.append(f"share {self.share:.3f}")
        parts.append(f"{gib(self.memory)} ({self.memory:,} bytes)")
        weights = self.facts.weights
        parts.append("weights unknown" if weights is None else f"weights {gib(weights)}")
        if self.kv is not None:
            context = self.context or 0
            tokens = f", {self.pool.tokens(context):,} tokens" if self.pool and context else ""
            parts.append(f"KV cache {gib(self.kv)}{tokens}")
        if self.cpus:
            parts.append(f"cores {','.join(map(str, self.cpus))}")
        return f"{self.device}: " + ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Plan:
    """Placements in the order of starting, and what the reader should know beside. `swap` is the tier that
    takes turns with the other engines of its GPU; None: all are awake."""

    placements: tuple[Placement, ...]
    machine: Machine
    notes: tuple[str, ...] = ()
    swap: str | None = None

    def on(self, gpu: Gpu) -> tuple[Placement, ...]:
        return tuple(placement for placement in self.placements if placement.gpu == gpu.index)

    def turns(self, gpu: Gpu) -> Iterator[tuple[Placement, ...]]:
        """The engines of a GPU that are awake at the same time."""
        here = self.on(gpu)
        for asleep in (False, True) if self.swap is not None else (None,):
            awake = tuple(p for p in here if asleep is None or (p.spec.tier == self.swap) is asleep)
            if awake:
                yield awake


Sizer = Callable[[EngineSpec], Facts]


def facts_of(model: str, folder: Path | None) -> Facts:
    """Of the folder where there is one, of the catalogue's entry, else nothing. Raises PlanError."""
    if folder is None:
        return catalog.find(model) or Facts(unknown=f"{model} is not on this machine")
    try:
        return checkpoint.read(folder)
    except checkpoint.CheckpointError as error:
        raise PlanError(str(error)) from None


def settings(spec: EngineSpec, gpu: Gpu | None) -> Settings:
    """What the engine's arguments say, filled up with vLLM's own defaults for this GPU, or for the CPU.

    Raises PlanError where one of them is no number.
    """
    args = spec.args
    for name in _NUMBERS:
        given = flags.option(args, name)
        if given is not None and flags.number(args, name) is None and given not in _AUTO:
            raise PlanError(f"engine `{spec.name}`: {name} in its `args` is no number above 0, but `{given}`")
    usual = CPU_WORK if gpu is None else overhead.defaults(gpu.visible, gpu.name)
    cached = flags.option(args, "--kv-cache-dtype") or "auto"
    wide = 4 if flags.option(args, "--dtype") in ("float32", "float") else 2
    return Settings(
        work=Work(
            batched=flags.number(args, "--max-num-batched-tokens") or usual.batched,
            sequences=flags.number(args, "--max-num-seqs") or usual.sequences,
            graphs=usual.graphs and not flags.has_option(args, "--enforce-eager"),
        ),
        context=flags.number(args, "--max-model-len"),
        block=flags.number(args, "--block-size") or (CPU_BLOCK if gpu is None else kv_cache.BLOCK),
        element=1 if cached.startswith("fp8") else wide if cached == "auto" else 2,
        batches=1 if gpu is None else 2,
    )


def share(spec: EngineSpec) -> float | None:
    """The part of the GPU that the operator gave the engine, by `share` or in its arguments.

    Raises PlanError where that is no part of anything.
    """
    try:
        part = float(flags.option(spec.args, "--gpu-memory-utilization") or "")
    except ValueError:
        return None if spec.share is None else float(spec.share)
    if not 0 < part <= 1:  # nor NaN
        raise PlanError(
            f"engine `{spec.name}`: --gpu-memory-utilization {part:g} in its `args` is no share of a GPU: "
            "write 0.4, say"
        )
    return part


def budget(facts: Facts, work: Work) -> Budget | None:
    """What a GPU engine takes before its KV cache; None where the size of its weights is not known."""
    if facts.weights is None:
        return None
    active = UNUSUAL if facts.width is None else overhead.activations(facts.width, work)
    return Budget(facts.weights, active, overhead.graphs(work), overhead.NON_TORCH)


def available(gpu: Gpu, engines: int) -> int:
    """Bytes that engines on this GPU may claim together.

    What others hold already is not charged to a vLLM that starts later, but it must find its share free.
    """
    return max(0, min(int(gpu.visible * UTILISATION), gpu.free - engines * CONTEXT))


def plan(specs: Iterable[EngineSpec], machine: Machine, facts: Sizer, swap: str | None = None) -> Plan:
    """Place the engines that we start. Raises PlanError where one would find no room at all."""
    found = arrange(specs, machine, facts, swap)
    problems = no_room(found)
    if problems:
        raise PlanError("\n".join(problems))
    return replace(found, notes=(*found.notes, *wrong_length(found)))


def arrange(specs: Iterable[EngineSpec], machine: Machine, facts: Sizer, swap: str | None = None) -> Plan:
    """Every engine that we start on its device, whether that holds or not. Engines of the tier `swap` are
    awake when the others of their GPU sleep: each side has the GPU to itself.

    Raises PlanError for a GPU that is not there, and for shares that add up to more than a GPU.
    """
    launched = [spec for spec in specs if spec.launched]
    present = {gpu.index: gpu for gpu in machine.gpus}
    by_gpu: dict[tuple[int, bool], list[EngineSpec]] = {}
    on_cpu = []
    for spec in launched:
        index = _gpu_for(spec, machine)
        if index is None:
            on_cpu.append(spec)
        else:
            by_gpu.setdefault((index, spec.tier == swap), []).append(spec)
    notes = []
    if any(spec.gpu is not None for spec in on_cpu):
        names = ", ".join(spec.name for spec in on_cpu if spec.gpu is not None)
        notes.append(f"no NVIDIA GPU is seen: {names} will run on the CPU, which is much slower")
    placed = {placement.spec.name: placement for placement in _place_on_cpu(on_cpu, machine, facts)}
    for (index, sleeps), group in by_gpu.items():
        asleep = len(by_gpu.get((index, not sleeps), ()))
        gpu = present[index]
        room = replace(gpu, free=gpu.free - asleep * SLEEPER) if asleep else gpu
        for placement in _place_on_gpu(room, group, facts):
            placed[placement.spec.name] = placement
    return Plan(tuple(placed[spec.name] for spec in launched), machine, tuple(notes), swap)


def no_room(found: Plan) -> list[str]:
    """One message for each device that cannot take its engines."""
    problems = [
        problem
        for gpu in found.machine.gpus
        for awake in found.turns(gpu)
        if (problem := _gpu_problem(gpu, awake))
    ]
    here = [placement for placement in found.placements if placement.gpu is None]
    needed = sum(placement.memory for placement in here)
    if needed > found.machine.available:
        each = ", ".join(f"{p.spec.name} {gib(p.memory)}" for p in here)
        problems.append(
            f"the engines need {gib(needed)} of memory ({each}), {gib(found.machine.available)} are "
            "available: take a smaller model or fewer engines, or stop other programs."
        )
    return problems


def too_short(found: Plan) -> list[str]:
    """One message for each engine whose KV cache cannot hold the longest request that it is to take."""
    problems = []
    for placement in found.placements:
        context, longest = placement.context, placement.longest
        if context is None or longest is None or longest >= context or (placement.kv or 0) <= 0:
            continue
        problems.append(
            f"{placement.spec.name} is to take requests of {context:,} tokens, and its KV cache of "
            f"{gib(placement.kv or 0)} holds one of {longest:,}: lower --max-model-len in its `args`, or "
            "raise its `share`"
        )
    return problems


def too_long(found: Plan) -> list[str]:
    """One message for each vLLM that is to take longer requests than its model was made for: it would not
    start."""
    problems = []
    for placement in found.placements:
        spec, asked, made = placement.spec, placement.settings.context, placement.facts.context
        meant = spec.env.get(LONGER) == "1" or flags.has_option(spec.args, *_SCALED)
        if asked is not None and made is not None and asked > made and not meant:
            problems.append(
                f"{spec.name} is to take requests of {asked:,} tokens, and its model was made for {made:,}: "
                f"vLLM refuses a longer --max-model-len, unless `env` has {LONGER}"
            )
    return problems


def wrong_length(found: Plan) -> list[str]:
    """One message for each engine that cannot take requests as long as it is to take."""
    return too_long(found) or too_short(found)


def fits(found: Plan) -> bool:
    """Whether every device can take its engines, and every engine its longest request."""
    return not no_room(found) and not wrong_length(found)


def _gpu_for(spec: EngineSpec, machine: Machine) -> int | None:
    """The GPU that an engine names, or the first; none where there is none, and for the small demo models."""
    if not machine.gpus or (spec.gpu is None and (spec.model or "").startswith(DEMO_PREFIX)):
        return None
    present = [gpu.index for gpu in machine.gpus]
    if spec.gpu is None:
        return min(present)
    if spec.gpu not in present:
        have = ", ".join(map(str, present))
        raise PlanError(f"engine `{spec.name}` wants gpu {spec.gpu}, but there are only: {have}")
    return spec.gpu


def _place_on_gpu(gpu: Gpu, specs: Sequence[EngineSpec], sizer: Sizer) -> list[Placement]:
    shares = {spec.name: part for spec in specs if (part := share(spec)) is not None}
    given = sum(shares.values())
    if given > UTILISATION + 0.03:
        listed = ", ".join(f"{name} {part}" for name, part in shares.items())
        total = f"the shares on gpu {gpu.index} add up to {given:.2f} ({listed})"
        raise PlanError(f"{total}: keep them within {UTILISATION}")
    facts = {spec.name: sizer(spec) for spec in specs}
    asked = {spec.name: settings(spec, gpu) for spec in specs}
    needs = {spec.name: budget(facts[spec.name], asked[spec.name].work) for spec in specs}
    left = available(gpu, len(specs)) - int(given * gpu.visible)
    claims = _claims({name: needs[name] for name in needs if name not in shares}, left)
    shares |= {name: max(0, claim * 1000 // gpu.visible) / 1000 for name, claim in claims.items()}
    placements = []
    for spec in specs:
        memory = int(shares[spec.name] * gpu.visible)
        need = needs[spec.name]
        placements.append(
            Placement(
                spec,
                f"gpu:{gpu.index}",
                memory,
                facts[spec.name],
                asked[spec.name],
                need,
                kv=None if need is None else memory - need.total,
                share=shares[spec.name],
            )
        )
    return placements


def _claims(needs: Mapping[str, Budget | None], left: int) -> dict[str, int]:
    """Bytes for each engine: its need and an equal part of the rest.

    Where the need of one is not known, all get equal parts.
    """
    known = {name: need.total for name, need in needs.items() if need is not None}
    if len(known) < len(needs):
        return dict.fromkeys(needs, left // len(needs))
    spare = (left - sum(known.values())) // max(1, len(needs))
    return {name: need + spare for name, need in known.items()}


def _gpu_problem(gpu: Gpu, placements: Sequence[Placement]) -> str | None:
    seen = f"gpu {gpu.index} ({gpu.name}, {gib(gpu.total)}, {gib(gpu.free)} free)"
    if any(p.memory <= 0 or (p.kv is not None and p.kv <= 0) for p in placements):
        needs = "; ".join(
            f"{p.spec.name} needs {gib(p.memory - (p.kv or 0))} before any KV cache, gets {gib(p.memory)}"
            for p in placements
        )
        return (
            f"{seen} cannot take its engines: {needs}. "
            "Take a smaller model, move one engine to another GPU, or free memory on this one."
        )
    claimed = sum(p.memory for p in placements)
    if claimed > gpu.free:
        return (
            f"{seen}: the engines on it claim {gib(claimed)}: "
            "stop what else runs there (see nvidia-smi), or lower `share`."
        )
    return None


def _place_on_cpu(specs: Sequence[EngineSpec], machine: Machine, sizer: Sizer) -> list[Placement]:
    placements = []
    for spec, cpus in zip(specs, split_cores(machine.cpus, len(specs)), strict=True):
        facts, kv = sizer(spec), _cpu_kv(spec)
        process = LLAMA_CPP_OVERHEAD if spec.kind == "llama.cpp" else CPU_OVERHEAD
        memory = (facts.weights or 0) + kv + process
        placements.append(
            Placement(spec, CPU, memory, facts, settings(spec, None), budget=None, kv=kv, cpus=cpus)
        )
    return placements


def _cpu_kv(spec: EngineSpec) -> int:
    """Bytes, as the operator set them: by the flag, or in whole GiB by vLLM's variable."""
    given = flags.number(spec.args, "--kv-cache-memory-bytes")
    try:
        return given or ceil(float(spec.env["VLLM_CPU_KVCACHE_SPACE"])) * GIB
    except (KeyError, ValueError):
        return CPU_KV


def split_cores(cpus: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """Cores in equal, contiguous, disjoint parts; where there are fewer cores than parts they are shared."""
    if len(cpus) < parts:
        return [(cpus[part % len(cpus)],) for part in range(parts)]
    size, extra = divmod(len(cpus), parts) if parts else (0, 0)
    starts = [part * size + min(part, extra) for part in range(parts + 1)]
    return [tuple(cpus[starts[part] : starts[part + 1]]) for part in range(parts)]
