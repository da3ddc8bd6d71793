"""The `dualgauge.yaml` that `dualgauge up` writes for a machine that has none."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from engines.catalog import DEMO_AWQ, DEMO_EXACT
from engines.choice import Choice
from engines.plan import Placement

DEMO_MODEL = "smollm2"
DEMO_ARGS = (
    *("--max-model-len", "4096", "--max-num-seqs", "16", "--enforce-eager"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)


def starter(choice: Choice, ports: Sequence[int], *, listen: str, admin: str) -> str:
    """The text of the file; `ports` are one for each engine."""
    model = DEMO_MODEL if choice.pair is None else choice.pair.name
    lines = [
        "# Written by `dualgauge up` for this machine; it never changes a file that exists.",
        *_comment(choice.reasons),
        "",
        "version: 1",
        f"listen: {listen:<24} # applications: OPENAI_BASE_URL=http://{listen}/v1",
        f"admin: {admin:<25} # console, /metrics, admin API",
        f"model: {model:<25} # what applications ask for; {model}:fast and {model}:exact pin a tier",
        f"policy: {'default':<24} # what goes where: default, strict, thrifty, or a file: ./policy.yaml",
        "engines:",
    ]
    engines = _demo(ports) if choice.pair is None else _pair(choice, ports)
    return "\n".join([*lines, *engines]) + "\n"


def _comment(reasons: Sequence[str]) -> list[str]:
    return [
        line
        for reason in reasons
        for line in textwrap.wrap(reason, 100, initial_indent="#   ", subsequent_indent="#     ")
    ]


def _demo(ports: Sequence[int]) -> list[str]:
    lines = []
    for port, tier, model, precision in (
        (ports[0], "fast", DEMO_AWQ, "awq"),
        (ports[1], "exact", DEMO_EXACT, "bf16"),
    ):
        lines += _engine(tier, model, precision, port)
        lines.append(f"    args: {_flow(DEMO_ARGS)}")
    return lines


def _pair(choice: Choice, ports: Sequence[int]) -> list[str]:
    lines = []
    for placement, port in zip(choice.placements, ports, strict=True):
        spec = placement.spec
        lines += _engine(spec.tier, spec.model or "", spec.precision, port)
        lines += [f"    gpu: {placement.gpu}", f"    share: {placement.share:<21} # of this GPU's memory"]
        lines.append(f"    args: {_flow(_args(choice, placement))}")
    return lines


def _args(choice: Choice, placement: Placement) -> tuple[str, ...]:
    half = ("--dtype", "float16") if placement.spec.precision == "awq" and choice.half else ()
    many = placement.settings.work.sequences
    limits = ("--max-model-len", str(choice.context), "--max-num-seqs", str(many))
    return (*limits, *half, *(choice.pair.args if choice.pair else ()))


def _engine(tier: str, model: str, precision: str, port: int) -> list[str]:
    return [
        f"  - name: {tier}-0",
        f"    tier: {tier}",
        "    kind: vllm",
        f"    model: {model}",
        f"    precision: {precision}",
        f"    port: {port:<22} # on 127.0.0.1; only the gateway calls it",
    ]


def _flow(args: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{arg}"' if arg.isdigit() else arg for arg in args) + "]"
