"""How a plan is shown: as a table for people, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engines.alternatives import Change
from engines.hardware import GIB, MIB, gib
from engines.plan import CONTEXT, Placement, Plan, available

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

LENGTHS = {"2k": 2048, "8k": 8192}
KINDS = 4
LATER = "unknown, will be read from the engine"


def record(
    found: Plan, *, problems: Sequence[str], notes: Sequence[str], changes: Iterable[Change]
) -> dict[str, Any]:
    """The plan for programs; sizes are bytes."""
    return {
        "fits": not problems,
        "gpus": [
            {
                "index": gpu.index,
                "name": gpu.name,
                "total": gpu.total,
                "visible": gpu.visible,
                "free": gpu.free,
                "available": available(gpu, len(found.on(gpu))),
            }
            for gpu in found.machine.gpus
        ],
        "engines": [_engine(placement) for placement in found.placements],
        "problems": problems,
        "notes": notes,
        "changes": [
            {"kind": change.kind, "text": change.text, "engines": [_brief(p) for p in change.plan.placements]}
            for change in changes
        ],
    }


def _engine(placement: Placement) -> dict[str, Any]:
    facts, pool, wanted = placement.facts, placement.pool, placement.settings
    budget = placement.budget
    return {
        **_brief(placement),
        "precision": placement.spec.precision,
        "memory": placement.memory,
        "weights": facts.weights,
        "weights_by_kind": facts.kinds,
        "activations": budget.activations if budget else None,
        "cuda_graphs": budget.graphs if budget else None,
        "other": budget.other if budget else None,
        "kv_cache": {
            "bytes": placement.kv,
            "token_bytes": facts.cache.token_bytes(wanted.element) if facts.cache else None,
            "block_size": wanted.block,
            "blocks": pool.blocks if pool else None,
            "tokens": pool.tokens(placement.context) if pool and placement.context else None,
        },
        "longest_request": placement.longest,
        "requests": {name: _at_a_time(placement, size) for name, size in LENGTHS.items()},
        "flags": list(flags(placement)),
        "unknown": facts.unknown or None,
        "weights_by_tensor": facts.tensors,
    }


def _brief(placement: Placement) -> dict[str, Any]:
    return {
        "name": placement.spec.name,
        "tier": placement.spec.tier,
        "model": placement.spec.model,
        "device": placement.device,
        "share": placement.share,
        "kv_cache_bytes": placement.kv,
        "max_model_len": _length(placement),
        "max_num_seqs": placement.settings.work.sequences,
        "max_num_batched_tokens": placement.settings.work.batched,
    }


def _length(placement: Placement) -> int | None:
    """The longest request that it was made or asked for and can hold."""
    known = [size for size in (placement.context, placement.longest) if size is not None]
    return min(known, default=None)


def _at_a_time(placement: Placement, size: int) -> int | None:
    """How many requests of so many tokens its cache holds; None where it takes none, or nobody knows."""
    length, pool = _length(placement), placement.pool
    return None if pool is None or (length or 0) < size else int(pool.requests(size))


def flags(placement: Placement) -> Iterator[str]:
    """The vLLM flags that make the engine what the plan says."""
    if placement.share is not None:
        yield f"--gpu-memory-utilization {placement.share:.3f}"
    if placement.kv is not None and placement.kv > 0:
        yield f"--kv-cache-memory-bytes {placement.kv}"
    length = _length(placement)
    if length:
        yield f"--max-model-len {length}"
    yield f"--max-num-seqs {placement.settings.work.sequences}"
    if placement.settings.element == 1:
        yield "--kv-cache-dtype fp8"


def show(
    found: Plan,
    console: Console,
    *,
    problems: Sequence[str],
    notes: Sequence[str],
    changes: Sequence[Change],
    reasons: Sequence[str] = (),
) -> None:
    """The plan for people."""

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    for reason in reasons:
        say(reason)
    for gpu in found.machine.gpus:
        here = len(found.on(gpu))
        contexts = f", {gib(here * CONTEXT)} stay free for CUDA contexts" if here else ""
        can = gib(available(gpu, here))
        say(f"gpu {gpu.index}: {gpu.name}, CUDA shows {gib(gpu.visible)}, engines may take {can}{contexts}")
    if found.placements:
        console.print(_table(found.placements))
        for placement in () if problems else found.placements:
            say(f"{placement.spec.name}: {' '.join(flags(placement))}")
    for note in notes:
        say(f"note: {note}", style="yellow")
    for problem in problems:
        say(f"does not fit: {problem}", style="red")
    if changes:
        say("\nWhat fits, from the smallest change to the largest:")
        for change in changes:
            say(f"  {change.text}")
            for placement in change.plan.placements:
                say(f"    {placement.spec.name}: {placement.describe()}", style="dim")


def _table(placements: Sequence[Placement]) -> Table:
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False)
    table.add_column("")
    for placement in placements:
        title = f"{placement.spec.name} on {placement.device}"
        table.add_column(title, justify="right", overflow="fold")
    kinds = dict.fromkeys(kind for placement in placements for kind in _kinds(placement))
    columns = [_rows(placement, kinds) for placement in placements]
    for name in dict.fromkeys(name for column in columns for name in column):
        cells = [column.get(name, "") for column in columns]
        if any(cells):
            table.add_row(name, *cells)
    return table


def _kinds(placement: Placement) -> Sequence[str]:
    """What most of its weights are for."""
    return list(placement.facts.kinds)[:KINDS]


def _rows(placement: Placement, kinds: Iterable[str]) -> dict[str, str]:
    facts, pool, budget = placement.facts, placement.pool, placement.budget
    wanted, context = placement.settings, placement.context or 0
    at_a_time = {name: _at_a_time(placement, size) for name, size in LENGTHS.items()}
    return {
        "model": placement.spec.model or "",
        "share of the GPU": "" if placement.share is None else f"{placement.share:.3f}",
        "memory": _size(placement.memory),
        "weights": "unknown" if facts.weights is None else _size(facts.weights),
        **{f"  of them {kind}": _size(facts.kinds[kind]) if kind in facts.kinds else "" for kind in kinds},
        "activations": _size(budget.activations) if budget else "",
        "CUDA graphs": _size(budget.graphs) if budget else "",
        "libraries": _size(budget.other) if budget else "",
        "KV cache": LATER if placement.kv is None else _size(placement.kv),
        "  bytes a token": f"{facts.cache.token_bytes(wanted.element):,}" if facts.cache else LATER,
        "  blocks": f"{pool.blocks:,} of {wanted.block} tokens" if pool else "",
        "  tokens": f"{pool.tokens(context):,}" if pool and context else "",
        "longest request": f"{placement.longest:,}" if placement.longest is not None else "",
        **{
            f"requests of {name} at a time": "too long" if many is None else f"{many:,}"
            for name, many in at_a_time.items()
            if pool
        },
        "requests that may run": f"{wanted.work.sequences:,}",
        "tokens in a pass": f"{wanted.work.batched:,}",
    }


def _size(size: int) -> str:
    return gib(size) if abs(size) >= GIB else f"{size / MIB:.0f} MiB"
