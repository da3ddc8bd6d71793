"""bench/RESULTS.md of what the harness measured. Pure: results in, Markdown out; tested in `tests/bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.figures import Spread, ratios, table

OURS = "dualgauge"
DIRECT = "no gateway"
Result = Mapping[str, Any]

LOADS = {
    "json_us": ("CPU a JSON request, us", 1),
    "token_us": ("CPU a paced token, us", 1),
    "burst_us": ("CPU a token of a burst, us", 2),
    "rate": ("JSON requests/s", 0),
    "p50": ("latency added p50, us", 0),
    "p99": ("latency added p99, us", 0),
    "rss": ("resident, MiB", 1),
    "pss": ("PSS, MiB", 1),
}
STARTS = {
    "models": ("first answer, s", 2),
    "answered": ("first completion, s", 2),
    "cpu": ("CPU until then, s", 2),
    "rss": ("resident then, MiB", 1),
    "pss": ("PSS then, MiB", 1),
}
STREAMS = {
    "tokens": ("tokens/s", 0),
    "gap_p99": ("gap added p99, ms", 1),
    "gap_p999": ("p99.9", 1),
    "gap_max": ("most", 1),
    "delay_p50": ("under way p50, ms", 1),
    "delay_p99": ("p99", 1),
    "token_us": ("CPU a token, us", 1),
    "client": ("client's share of a core", 2),
}
WORKERS = {
    "rate": ("JSON requests/s", 0),
    "json_us": ("CPU a request, us", 1),
    "cores": ("cores of the gateway", 2),
    "engines": ("cores of the engines", 2),
}
FIGURES = {"load": LOADS, "start": STARTS, "streams": STREAMS, "workers": WORKERS}
# Where less is better, and one can be held against the other.
COMPARED = {"load": ("json_us", "token_us", "burst_us", "rss", "pss"), "start": ("models", "cpu", "rss")}
INTRODUCTION = """# Results

Written by `bench/gateways.py --write`: do not edit. Figures are the median of the rounds of one run, with the least
and the most. Ratios are of ours to theirs within each round; they are what to compare, since figures depend on the
machine and on what else it did. Every feature of ours is on: key, policy with the classifier, limits, metrics, 1 % of
the traces sampled. CPU is that of a gateway's whole process tree; a Redis is not in it.
"""
EXPLAINED = {
    "load": "32 connections for JSON requests (140 characters of prompt) and bursts of 64 tokens, 200 streams of 50 "
    "tokens/s for paced tokens, one connection for latency, of which that without a gateway is taken off. LiteLLM gets a tenth of the connections "
    "and streams: with more it ends none in time.",
    "start": "From the start of the program to the first 200 of `/v1/models` and of a completion.",
    "streams": "{streams} streams of 50 tokens/s. A gap is what lies between two tokens of a stream; added is by how "
    "much it was longer when they came than when the engine sent them. Under way is the time from the engine's "
    "`send` to the client's `recv`.",
    "workers": "128 connections, JSON requests. The client (wrk) and the engines take cores too.",
    "size": "An environment without pip into which `pip install .` put this project, on disk.",
}


def render(results: Mapping[str, Result], introduction: str = INTRODUCTION) -> str:
    """The whole file."""
    parts = [introduction, *(_part(name, result) for name, result in results.items())]
    return "\n".join(parts)


def brief(kind: str, result: Result) -> dict[str, Any]:
    """Medians and ratios of one part."""
    if kind == "size":
        return {"MiB": round(result["total"], 1)}
    told: dict[str, Any] = {
        f"{name}.{figure}": round(Spread.of(values).median, 3)
        for name, rounds in result["rounds"].items()
        for figure, values in rounds.items()
    }
    for peer, figure, ratio in _ratios(kind, result):
        told[f"ratio.{peer}.{figure}"] = round(ratio.median, 4)
    return told


def _part(name: str, result: Result) -> str:
    kind = name.split()[0]
    if kind == "soak":
        return _soak(result)
    machine, options = result["machine"], result["options"]
    lines = [f"## {name}", "", EXPLAINED[kind].format(**result)]
    if kind != "size":
        lines[-1] += f" {options['rounds']} rounds"
        lines[-1] += "." if kind == "start" else f" of {options['seconds']:g} s a load."
    lines += ["", _machine(machine), ""]
    if kind == "size":
        rows = [("all of it", f"{result['total']:.1f}")]
        rows += [(part, f"{mib:.1f}") for part, mib in result["largest"].items()]
        return "\n".join([*lines, table(["", "MiB"], rows), ""])
    figures = FIGURES[kind]
    used = [figure for figure in figures if any(figure in rounds for rounds in result["rounds"].values())]
    rows = [
        (_named(who, result), *(_cell(rounds.get(figure), figures[figure][1]) for figure in used))
        for who, rounds in result["rounds"].items()
        if who != DIRECT or kind != "load"
    ]
    lines += [table(["", *(figures[figure][0] for figure in used)], rows), ""]
    if kind == "load":
        direct = result["rounds"][DIRECT]
        lines += [
            f"Without a gateway: p50 {_cell(direct['p50'], 0)} us, p99 {_cell(direct['p99'], 0)} us.",
            "",
        ]
    compared = _ratios(kind, result)
    if compared:
        told = [
            (f"{figures[figure][0].split(',')[0]}, to {peer}", ratio.text(3 if ratio.median > 0.1 else 4))
            for peer, figure, ratio in compared
        ]
        lines += [table(["ratio", "ours / theirs"], told), ""]
    if kind == "workers":
        one, several = list(result["rounds"].values())[:2]
        count = result["workers"]
        each = ratios([count * us for us in one["json_us"]], several["json_us"])
        shown = ratios(several["rate"], one["rate"]).text(2)
        told = f"""\
Several to one: {shown} times the requests/s on these cores, of which client, engines and Redis took their part.
By CPU a request, {count} workers with a core each do {each.text(2)} times the requests/s of one."""
        lines += [told, ""]
    return "\n".join(lines)


def _soak(result: Result) -> str:
    requests = result["requests"]
    happened = ", ".join(f"{count} of {what}" for what, count in result["happened"].items())
    rows = [
        ("errors that were not injected", "", str(result["errors"])),
        *((what, f"{result[what][0]:.1f}", f"{result[what][1]:.1f}") for what in ("PSS", "RSS")),
        *((what, *map(str, result[what])) for what in ("descriptors", "threads")),
        ("leases left, gateway and Redis", "", " and ".join(f"{left:.0f}" for left in result["leases"])),
    ]
    seen = ", ".join(f"{count} {what}" for what, count in requests.items())
    rise = (
        f"PSS under load rose by {result['MiB an hour']:.2f} MiB an hour (standard error "
        f"{result['standard error']:.2f})."
    )
    lines = [
        "## soak",
        "",
        f"{result['minutes']:g} minutes (`bench/soak.py`): {seen}. Meanwhile: {happened}.",
        "",
        _machine(result["machine"]),
        "",
        table(["at rest", "after a third", "at the end"], rows),
        "",
        rise,
        "",
    ]
    return "\n".join(lines)


def _ratios(kind: str, result: Result) -> list[tuple[str, str, Spread]]:
    rounds = result["rounds"]
    mine = next((name for name in rounds if name.startswith(OURS)), None)
    peers = [name for name in rounds if name not in (mine, DIRECT)]
    return [
        (peer, figure, ratios(rounds[mine][figure], rounds[peer][figure]))
        for peer in peers
        for figure in COMPARED.get(kind, ())
        if mine is not None
    ]


def _cell(values: Sequence[float] | None, digits: int) -> str:
    return Spread.of(values).text(digits) if values else ""


def _named(who: str, result: Result) -> str:
    version = result["versions"].get(who)
    return f"{who} {version}" if version else who


def _machine(machine: Mapping[str, Any]) -> str:
    return (
        f"{machine['date']}: {machine['cores']} cores of {machine['cpu']}, Linux {machine['kernel']}, "
        f"Python {machine['python']}; load before {machine['load before']:.1f}, others took {machine['others']:.2f} cores meanwhile."
    )
