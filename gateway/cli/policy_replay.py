"""`dualgauge policy replay`: what a policy would have done with the decisions of a log."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec

from gateway.cli.bar import progress_bar
from gateway.cli.chosen import compiled, deployed, log_of, tiers_of, tiers_option
from gateway.telemetry.decision_files import Placed, lines, whole
from policies import units
from policies.logged import decode
from policies.replay import Load, Replay

SHOWN = 40
TOLD = 20


def _share(_context: click.Context, _parameter: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    try:
        return units.share(value if "%" in value else float(value))
    except ValueError:
        raise click.BadParameter(f"`{value}` is not a share: write 5% or 0.05") from None


@click.command("replay")
@click.option("--log", "logs", multiple=True, metavar="FILE", help="A decision log, with its older files.")
@click.option("--policy", required=True, metavar="POLICY", help="A path or a shipped name.")
@tiers_option
@click.option(
    "--max-moved",
    callback=_share,
    metavar="SHARE",
    help="End with exit code 1 where more of the requests would move, or cannot be told: 5%.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def replay_command(
    logs: tuple[str, ...],
    policy: str,
    tiers: tuple[str, ...] | None,
    max_moved: float | None,
    as_json: bool,
) -> None:
    """Decide the requests of a decision log again: what would move between tiers, by rule and by class.

    Files that were rotated, compressed or not, are read too. Without --log, the log of ./dualgauge.yaml.

    \b
    Examples:
      dualgauge policy replay --policy new.yaml
      dualgauge policy replay --log decisions.jsonl --policy new.yaml --max-moved 5%
    """
    deployment = deployed() if not logs or tiers is None else None
    chosen = compiled(policy, tiers or tiers_of(deployment))
    files = _files(logs or (str(log_of(deployment, "--log")),))
    replay, bad = Replay(chosen), Counter[str]()
    total = sum(file.stat().st_size for file in files)
    with progress_bar("deciding again", total) as progress:
        for placed in lines(files, progress):
            _feed(replay, placed, bad)
    problem = _problem(replay, max_moved)
    if as_json:
        body = {**_body(replay, files, bad), "max_moved": max_moved, "problem": problem}
        click.echo(msgspec.json.format(msgspec.json.encode(body), indent=2))
    else:
        click.echo("\n".join(_text(replay, files, bad)))
    if problem is not None:
        click.echo(f"error: {problem}", err=True)
        sys.exit(1)


def _files(logs: Iterable[str]) -> list[Path]:
    found: list[Path] = []
    for log in logs:
        files = whole(Path(log))
        if not files:
            raise click.ClickException(f"there is no decision log {log}")
        found += files
    return found


def _feed(replay: Replay, placed: Placed, bad: Counter[str]) -> None:
    try:
        if placed.data is None:
            raise ValueError(placed.why)
        replay.feed(decode(placed.data))
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        bad[str(placed.file)] += 1
        if bad.total() <= TOLD:
            click.echo(f"{placed.file}:{placed.number}: not a line of a decision log: {error}", err=True)
        elif bad.total() == TOLD + 1:
            click.echo("further bad lines are only counted", err=True)


def _problem(replay: Replay, max_moved: float | None) -> str | None:
    if not replay.decisions:
        return "the log holds no decision"
    if max_moved is None or replay.moved_share <= max_moved:
        return None
    undecided = replay.undecided.requests
    also = f", {undecided:,} of them since the log cannot tell" if undecided else ""
    return f"{_percent(replay.moved_share)} of the requests would move, more than {_percent(max_moved)}{also}"


# as JSON


def _body(replay: Replay, files: list[Path], bad: Counter[str]) -> dict[str, Any]:
    ways = sorted(replay.ways.items())
    return {
        "policy": {"file": replay.policy.file, "hash": replay.policy.hash},
        "log": {
            "files": [str(file) for file in files],
            "bad_lines": bad,
            "decisions": replay.decisions,
            "from": replay.first if replay.decisions else None,
            "to": replay.last if replay.decisions else None,
            "policies": replay.policies,
        },
        "compared": replay.compared,
        "moved": replay.moved,
        "moved_share": replay.moved_share,
        "pinned": replay.pinned,
        "undecided": replay.undecided,
        "lacking": replay.lacking,
        "tiers": [
            {"from": old, "to": new, "requests": load.requests, "tokens": load.tokens}
            for (old, new), load in _by_tiers(replay)
        ],
        "rules": [
            {
                "rule": way.rule,
                "tier": way.tier,
                "new_rule": way.new_rule,
                "new_tier": way.new_tier,
                "requests": load.requests,
                "tokens": load.tokens,
            }
            for way, load in ways
        ],
        "classes": [
            {
                "class": inside.name,
                "from": inside.tier,
                "to": inside.new_tier,
                "requests": load.requests,
                "tokens": load.tokens,
            }
            for inside, load in sorted(replay.classes.items())
        ],
        "classes_unknown": replay.unknown,
    }


def _by_tiers(replay: Replay) -> list[tuple[tuple[str, str], Load]]:
    found: dict[tuple[str, str], Load] = {}
    for way, load in replay.ways.items():
        tiers = (way.tier, way.new_tier)
        found[tiers] = found.get(tiers, Load()) + load
    return sorted(found.items(), key=lambda pair: (pair[0][0] == pair[0][1], pair[0]))


# as text


def _text(replay: Replay, files: list[Path], bad: Counter[str]) -> Iterator[str]:
    moved, name = replay.moved, Path(replay.policy.file).name
    count = f"{len(files)} file{'s' if len(files) != 1 else ''}"
    when = f" from {_time(replay.first)} to {_time(replay.last)}" if replay.decisions else ""
    yield f"{replay.decisions:,} decisions{when}, in {count}"
    under = ", ".join(f"{hash_} ({count:,})" for hash_, count in replay.policies.most_common(5))
    yield f"made by {under}" if under else "no decision"
    share = _percent(moved.requests / replay.decisions) if replay.decisions else "0 %"
    yield f"{name} ({replay.policy.hash}) moves {moved.requests:,} ({share}) to another tier"
    yield ""
    yield from _table(("tiers", "requests", "", "tokens", ""), _tier_rows(replay))
    yield ""
    rows = list(_rule_rows(replay))
    yield from _table(("rule", "tier", f"rule of {name}", "tier", "requests", "tokens"), rows[:SHOWN], left=4)
    if len(rows) > SHOWN:
        yield f"and {len(rows) - SHOWN} more: --json has all"
    if replay.classes:
        yield ""
        yield from _table(
            (f"class of {name}", "requests", "tokens", "moved", "tokens moved", "to"), _class_rows(replay)
        )
    yield from _notes(replay, bad)


def _tier_rows(replay: Replay) -> Iterator[tuple[str, ...]]:
    whole = replay.compared
    for (old, new), load in _by_tiers(replay):
        tiers = f"{old} -> {new}" if old != new else f"{old}, as before"
        requests, tokens = load.requests / whole.requests, load.tokens / max(1, whole.tokens)
        yield tiers, f"{load.requests:,}", _percent(requests), f"{load.tokens:,}", _percent(tokens)


def _rule_rows(replay: Replay) -> Iterator[tuple[str, ...]]:
    def order(pair: tuple[Any, Load]) -> tuple[bool, bool, int]:
        way, load = pair
        return way.tier == way.new_tier, way.rule == way.new_rule, -load.requests

    for way, load in sorted(replay.ways.items(), key=order):
        tier = way.new_tier if way.new_tier != way.tier else "as before"
        yield way.rule, way.tier, way.new_rule, tier, f"{load.requests:,}", f"{load.tokens:,}"


def _class_rows(replay: Replay) -> Iterator[tuple[str, ...]]:
    for name in dict.fromkeys(inside.name for inside in sorted(replay.classes)):
        of = {inside: load for inside, load in replay.classes.items() if inside.name == name}
        moved = {inside: load for inside, load in of.items() if inside.tier != inside.new_tier}
        all_, some = sum(of.values(), Load()), sum(moved.values(), Load())
        to = ", ".join(
            f"{inside.tier} -> {inside.new_tier} {load.requests:,}" for inside, load in moved.items()
        )
        yield name, f"{all_.requests:,}", f"{all_.tokens:,}", f"{some.requests:,}", f"{some.tokens:,}", to


def _notes(replay: Replay, bad: Counter[str]) -> Iterator[str]:
    notes: list[str] = []
    if replay.pinned.requests:
        notes.append(f"{replay.pinned.requests:,} requests named their tier themselves: no policy moves them")
    if replay.undecided.requests:
        notes.append(
            f"{replay.undecided.requests:,} requests cannot be decided again, the log lacks of them:"
        )
        notes += [f"  {what} ({count:,})" for what, count in replay.lacking.most_common(10)]
    notes += [
        f"{count:,} requests may be in the class `{name}` or not: the log cannot tell"
        for name, count in replay.unknown.most_common(10)
    ]
    if bad:
        notes.append(f"{bad.total():,} lines could not be read")
    if notes:
        yield ""
        yield from notes


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]], left: int = 1) -> Iterator[str]:
    """Columns side by side, the first `left` of them, and any that is not numbers, begin at the left."""
    table = [head, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    for row in table:
        cells = [
            cell.ljust(width)
            if column < left or (cell and not cell[0].isdigit() and row is not head)
            else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
