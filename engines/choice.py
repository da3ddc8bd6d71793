"""Which models fit which GPUs, with which limits: for `up` on a machine without a configuration, and `plan`.

There is one way to size engines (`plan.py`); here it is tried with one number of requests after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engines import plan
from engines.catalog import PAIRS, Pair
from engines.checkpoint import Facts
from engines.hardware import GIB, Gpu, Machine, gib
from engines.plan import Placement, Plan, Sizer
from engines.spec import EngineSpec

MIN_GPU = int(7.5 * GIB)
"""Cards sold as 8 GB report a little less than 8 GiB."""
MIN_CAPABILITY = (7, 5)
"""Turing: the oldest GPUs that vLLM's AWQ kernels run on."""
BF16_CAPABILITY = (8, 0)
MIN_CONTEXT = 8192
"""A pair that cannot take one request of so many tokens in each engine is not chosen."""
CONTEXTS = (131072, 65536, 32768, 16384, 8192, 4096, 2048, 1024)
SEQUENCES = (256, 128, 64, 32, 16, 8, 4, 2, 1)
SHORT = 512
"""Tokens of a short request: an engine is to run as many as it can keep. More would only be recomputed."""
_DEMO = "the demo pair, SmolLM2-135M-Instruct in AWQ and bf16, runs on the CPU"


@dataclass(frozen=True, slots=True)
class Proposal:
    """A plan with limits; `context` is the longest request, the same for every engine."""

    plan: Plan
    context: int

    @property
    def fits(self) -> bool:
        return plan.fits(self.plan)


@dataclass(frozen=True, slots=True)
class Choice:
    """The pair for this machine, or None for the demo pair on the CPU, and why, one sentence a reason.

    `placements` are the fast and the exact engine; `context` is the longest request in tokens; `half`: these
    GPUs have no bfloat16, all is float16.
    """

    pair: Pair | None
    placements: tuple[Placement, ...]
    context: int
    reasons: tuple[str, ...]
    half: bool = False


def propose(
    specs: Sequence[EngineSpec],
    machine: Machine,
    facts: Sizer,
    *,
    context: int | None = None,
    sequences: int | None = None,
) -> Proposal:
    """The engines with limits on the length and number of requests that suit what is left for KV cache.

    A limit that is given stays, whether it fits or not. Raises PlanError as `plan.arrange`.
    """
    many = {spec.name: sequences or SEQUENCES[0] for spec in specs}
    while True:
        found = plan.arrange([_limited(spec, context, many[spec.name]) for spec in specs], machine, facts)
        greedy = [] if sequences else [p.spec.name for p in found.placements if _greedy(p)]
        if not greedy:
            break
        many |= {name: SEQUENCES[SEQUENCES.index(many[name]) + 1] for name in greedy}
    length = _common_context(found) if context is None else context
    final = plan.arrange([_limited(spec, length, many[spec.name]) for spec in specs], machine, facts)
    return Proposal(final, length)


def _greedy(placement: Placement) -> bool:
    """Whether an engine would run more requests at a time than it can keep, even short ones."""
    many, pool = placement.settings.work.sequences, placement.pool
    return pool is not None and many > SEQUENCES[-1] and pool.requests(SHORT) < many


def _limited(spec: EngineSpec, context: int | None, sequences: int) -> EngineSpec:
    limits = ["--max-num-seqs", str(sequences)]
    if context is not None:
        limits += ["--max-model-len", str(context)]
    return replace(spec, args=(*spec.args, *limits))


def _common_context(found: Plan) -> int:
    """The longest request that every engine can take, as a round number."""
    known = [longest for p in found.placements if (longest := p.longest) is not None]
    made = [p.facts.context for p in found.placements if p.facts.context is not None]
    limit = min([min(known, default=MIN_CONTEXT), *made])
    return next((size for size in CONTEXTS if size <= limit), CONTEXTS[-1])


def choose(gpus: Sequence[Gpu]) -> Choice:
    """The largest pair of the table that fits: one engine each on two GPUs, or both on the roomiest."""
    usable = [gpu for gpu in gpus if gpu.total >= MIN_GPU and not _older(gpu, MIN_CAPABILITY)]
    if not usable:
        return Choice(None, (), 4096, (_why_cpu(gpus),))
    chosen = sorted(usable, key=lambda gpu: (-plan.available(gpu, 1), gpu.index))[:2]
    layouts = [chosen, chosen[:1]] if len(chosen) > 1 else [chosen]
    for pair in reversed(PAIRS):
        for layout in layouts:
            choice = None if pair.gated else _place(pair, layout)
            if choice is not None:
                return choice
    reason = f"no pair of the table fits into {gib(chosen[0].free)} of free GPU memory"
    return Choice(None, (), 4096, (f"{reason}: {_DEMO}",))


def pair_specs(
    exact: str, fast: str, gpus: Sequence[Gpu], *, half: bool = False, args: Sequence[str] = ()
) -> tuple[EngineSpec, EngineSpec]:
    """The two engines: both on one GPU, or exact on the first of two."""
    names = {"fast": (fast, "awq", gpus[-1]), "exact": (exact, "fp16" if half else "bf16", gpus[0])}
    specs = [
        EngineSpec(
            name=f"{tier}-0",
            tier=tier,
            kind="vllm",
            url="http://127.0.0.1:0",
            served_model=model,
            precision=precision,
            model=model,
            gpu=gpu.index,
            args=tuple(args),
        )
        for tier, (model, precision, gpu) in names.items()
    ]
    return specs[0], specs[1]


def machine_of(gpus: Sequence[Gpu], like: Machine | None = None) -> Machine:
    """A machine with these GPUs, else like another one."""
    return Machine(tuple(gpus), (0,), 0, 0) if like is None else replace(like, gpus=tuple(gpus))


def _older(gpu: Gpu, capability: tuple[int, int]) -> bool:
    return gpu.capability is not None and gpu.capability < capability


def _why_cpu(gpus: Sequence[Gpu]) -> str:
    if not gpus:
        return "no NVIDIA GPU is seen: " + _DEMO
    seen = ", ".join(f"{gpu.name} with {gib(gpu.total)}" for gpu in gpus)
    return f"{seen}: too small or too old for a pair (8 GB and compute capability 7.5 are needed): {_DEMO}"


def _place(pair: Pair, gpus: Sequence[Gpu]) -> Choice | None:
    """The pair on these one or two GPUs, the roomier first; None where a cache would be too small."""
    half = any(_older(gpu, BF16_CAPABILITY) for gpu in gpus)
    specs = pair_specs(pair.exact, pair.awq, gpus, half=half)
    proposal = propose(specs, machine_of(gpus), table)
    found = proposal.plan
    if not proposal.fits or proposal.context < MIN_CONTEXT:
        return None
    reasons = _reasons(pair, gpus, found, proposal)
    return Choice(pair, found.placements, proposal.context, reasons, half)


def table(spec: EngineSpec) -> Facts:
    """The facts of an engine's model by the table of known ones."""
    return plan.facts_of(spec.model or "", None)


def _reasons(pair: Pair, gpus: Sequence[Gpu], found: Plan, proposal: Proposal) -> tuple[str, ...]:
    seen = " and ".join(f"GPU {g.index} ({g.name}, {gib(g.free)} of {gib(g.total)} free)" for g in gpus)
    where = "both engines share it" if len(gpus) == 1 else "one engine on each"
    sizes = ", ".join(
        f"{p.spec.precision} {gib(p.facts.weights or 0)} of weights and {gib(p.kv or 0)} of KV cache "
        f"({p.pool.tokens(proposal.context) if p.pool else 0:,} tokens)"
        for p in found.placements
    )
    return (
        f"{seen}: {where}",
        f"{pair.name} is the largest pair of the table that fits: {sizes}",
        f"requests may be up to {proposal.context:,} tokens long",
    )
