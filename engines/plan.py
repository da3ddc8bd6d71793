"""Where each engine that we start runs and how much memory it gets: bytes in, bytes out, nothing is asked.

This is the sizing that a start needs. On a GPU each engine without a `share` gets its weights, an allowance
and an equal part of what is left for KV cache; on the CPU the KV cache is a fixed size. A plan that cannot
hold is refused with the figures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines import catalog
from engines.hardware import GIB, Gpu, Machine, gib
from engines.spec import EngineSpec

CPU = "cpu"
CPU_KV = GIB
CPU_OVERHEAD = int(2.4 * GIB)
"""What a vLLM process takes beside weights and KV cache on a CPU: libraries, activations, the API server."""


class PlanError(Exception):
    """Engines that cannot be placed; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Size:
    """A checkpoint: bytes of its weights, bytes of one token's keys and values, allowance for activations.

    None where it is not known.
    """

    weights: int | None = None
    kv_token: int | None = None
    activations: int = GIB // 4


@dataclass(frozen=True, slots=True)
class Placement:
    """One engine on its device. `memory` is all that it may take, `kv` what the cache gets; bytes.

    `device` is `cpu` or `gpu:N`: engines of one device are never started at the same time. `share` is set on
    GPUs, `cpus` on the CPU.
    """

    spec: EngineSpec
    device: str
    memory: int
    weights: int | None
    kv: int | None
    kv_token: int | None = None
    share: float | None = None
    cpus: tuple[int, ...] = ()

    @property
    def gpu(self) -> int | None:
        return None if self.device == CPU else int(self.device.removeprefix("gpu:"))

    def describe(self) -> str:
        """One line with bytes, for people."""
        parts = []
        if self.share is not None:
            parts.append(f"share {self.share:.3f}")
        parts.append(f"{gib(self.memory)} ({self.memory:,} bytes)")
        parts.append("weights unknown" if self.weights is None else f"weights {gib(self.weights)}")
        if self.kv is not None:
            tokens = f", {self.kv // self.kv_token:,} tokens" if self.kv_token else ""
            parts.append(f"KV cache {gib(self.kv)}{tokens}")
        if self.cpus:
            parts.append(f"cores {','.join(map(str, self.cpus))}")
        return f"{self.device}: " + ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Plan:
    """Placements in the order of starting, and what the reader should know beside."""

    placements: tuple[Placement, ...]
    notes: tuple[str, ...] = ()


Sizer = Callable[[EngineSpec], Size]


def size_of(model: str, folder: Path | None) -> Size:
    """The size of a checkpoint: of its folder where there is one, of the catalogue's entry, else unknown."""
    known = catalog.find(model)
    size = Size() if known is None else Size(known[1], known[0].kv_token_bytes, known[0].activations)
    if folder is None:
        return size
    found = size_of_folder(folder)
    return Size(found.weights, found.kv_token or size.kv_token, size.activations)


def size_of_folder(folder: Path) -> Size:
    """Weights by the size of the safetensors files; KV by config.json where attention is the plain kind."""
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors")) or None
    try:
        config = json.loads((folder / "config.json").read_bytes())
        return Size(weights, _kv_token(config))
    except (OSError, ValueError):
        return Size(weights)


def _kv_token(config: dict[str, object]) -> int | None:
    if config.keys() & {"kv_lora_rank", "layer_types", "sliding_window_pattern"}:
        return None
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        return None
    layers, heads, hidden = (
        config.get(key) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    if not (isinstance(layers, int) and isinstance(heads, int) and isinstance(hidden, int)):
        return None
    kv_heads, head_dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
    if not (isinstance(kv_heads, int) and isinstance(head_dim, int)):
        return None
    return 2 * layers * kv_heads * head_dim * 2


def plan(specs: Iterable[EngineSpec], machine: Machine, size: Sizer) -> Plan:
    """Place the engines that we start. Raises PlanError."""
    launched = [spec for spec in specs if spec.launched]
    present = {gpu.index: gpu for gpu in machine.gpus}
    by_gpu: dict[int, list[EngineSpec]] = {}
    on_cpu = []
    for spec in launched:
        index = _gpu_for(spec, machine)
        if index is None:
            on_cpu.append(spec)
        else:
            by_gpu.setdefault(index, []).append(spec)
    notes = []
    if any(spec.gpu is not None for spec in on_cpu):
        names = ", ".join(spec.name for spec in on_cpu if spec.gpu is not None)
        notes.append(f"no NVIDIA GPU is seen (nvidia-smi): {names} will run on the CPU, which is much slower")
    placed = {placement.spec.name: placement for placement in _place_on_cpu(on_cpu, machine, size)}
    for index, group in by_gpu.items():
        for placement in _place_on_gpu(present[index], group, size):
            placed[placement.spec.name] = placement
    return Plan(tuple(placed[spec.name] for spec in launched), tuple(notes))


def _gpu_for(spec: EngineSpec, machine: Machine) -> int | None:
    """The GPU that an engine names, or the first; none where there is none, and for the small demo models."""
    if not machine.gpus or (spec.gpu is None and (spec.model or "").startswith(catalog.DEMO_PREFIX)):
        return None
    present = [gpu.index for gpu in machine.gpus]
    if spec.gpu is None:
        return min(present)
    if spec.gpu not in present:
        have = ", ".join(map(str, present))
        raise PlanError(f"engine `{spec.name}` wants gpu {spec.gpu}, but nvidia-smi lists only: {have}")
    return spec.gpu


def _place_on_gpu(gpu: Gpu, specs: Sequence[EngineSpec], size: Sizer) -> list[Placement]:
    sizes = {spec.name: size(spec) for spec in specs}
    given = sum(spec.share for spec in specs if spec.share is not None)
    if given > catalog.UTILISATION + 0.03:
        listed = ", ".join(f"{spec.name} {spec.share}" for spec in specs if spec.share is not None)
        total = f"the shares on gpu {gpu.index} add up to {given:.2f} ({listed})"
        raise PlanError(f"{total}: keep them within {catalog.UTILISATION}")
    unplanned = [spec for spec in specs if spec.share is None]
    left = catalog.budget(gpu, len(specs)) - int(given * gpu.visible)
    fixed = {spec.name: _fixed(sizes[spec.name]) for spec in unplanned}
    known = [need for need in fixed.values() if need is not None]
    if len(known) < len(unplanned):  # no way to know what the others need: equal parts
        claims = {spec.name: left // len(unplanned) for spec in unplanned}
    else:
        spare = (left - sum(known)) // max(1, len(unplanned))
        claims = {name: (need or 0) + spare for name, need in fixed.items()}
    placements = []
    for spec in specs:
        of = sizes[spec.name]
        share = (
            spec.share if spec.share is not None else max(0, claims[spec.name] * 1000 // gpu.visible) / 1000
        )
        memory = int(share * gpu.visible)
        need = _fixed(of)
        kv = None if need is None else memory - need
        placements.append(Placement(spec, f"gpu:{gpu.index}", memory, of.weights, kv, of.kv_token, share))
    _check_gpu(gpu, placements)
    return placements


def _fixed(size: Size) -> int | None:
    """What an engine takes before its KV cache."""
    return None if size.weights is None else size.weights + catalog.ALLOWANCE + size.activations


def _check_gpu(gpu: Gpu, placements: Sequence[Placement]) -> None:
    short = [p for p in placements if p.memory <= 0 or (p.kv is not None and p.kv <= 0)]
    if short:
        needs = "; ".join(
            f"{p.spec.name} needs {gib(p.memory - (p.kv or 0))} before any KV cache, gets {gib(p.memory)}"
            for p in placements
        )
        raise PlanError(
            f"gpu {gpu.index} ({gpu.name}, {gib(gpu.total)}, {gib(gpu.free)} free) cannot take its engines: "
            f"{needs}. Take a smaller model, move one engine to another GPU, or free memory on this one."
        )
    claimed = sum(p.memory for p in placements)
    if claimed > gpu.free:
        raise PlanError(
            f"gpu {gpu.index} ({gpu.name}) has {gib(gpu.free)} free, the engines on it claim {gib(claimed)}: "
            "stop what else runs there (see nvidia-smi), or lower `share`."
        )


def _place_on_cpu(specs: Sequence[EngineSpec], machine: Machine, size: Sizer) -> list[Placement]:
    placements = []
    for spec, cpus in zip(specs, split_cores(machine.cpus, len(specs)), strict=True):
        of = size(spec)
        kv = _cpu_kv(spec)
        memory = (of.weights or 0) + kv + CPU_OVERHEAD
        placements.append(Placement(spec, CPU, memory, of.weights, kv, of.kv_token, cpus=cpus))
    needed = sum(placement.memory for placement in placements)
    if needed > machine.available:
        each = ", ".join(f"{p.spec.name} {gib(p.memory)}" for p in placements)
        raise PlanError(
            f"the engines need {gib(needed)} of memory ({each}), {gib(machine.available)} are available: "
            "take a smaller model or fewer engines, or stop other programs."
        )
    return placements


def _cpu_kv(spec: EngineSpec) -> int:
    try:
        return int(float(spec.env["VLLM_CPU_KVCACHE_SPACE"]) * GIB)
    except (KeyError, ValueError):
        return CPU_KV


def split_cores(cpus: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """Cores in equal, contiguous, disjoint parts; where there are fewer cores than parts they are shared."""
    if len(cpus) < parts:
        return [(cpus[part % len(cpus)],) for part in range(parts)]
    size, extra = divmod(len(cpus), parts) if parts else (0, 0)
    starts = [part * size + min(part, extra) for part in range(parts + 1)]
    return [tuple(cpus[starts[part] : starts[part + 1]]) for part in range(parts)]
