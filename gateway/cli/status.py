"""`dualgauge status`: engines and tiers, as the processes and the gateway tell them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from engines import runfile
from engines.runfile import Run, UnitState
from engines.spec import EngineSpec
from gateway.cli.failures import told
from gateway.cli.options import running_config
from gateway.cli.prepare import load
from gateway.config import Config

TIMEOUT = 3.0
DIFFERENCES = 10
_COLOURS = {
    "ready": "green",
    "backoff": "yellow",
    "draining": "yellow",
    "drained": "yellow",
    "failed": "red",
    "down": "red",
    "suspect": "yellow",
}
_COLUMNS = ("tier", "engine", "precision", "state", "running", "waiting", "kv", "restarts", "pid", "url")


@click.command("status")
@running_config
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status_command(file: Path, as_json: bool) -> None:
    """Show engines and tiers: their state, load, restarts and where to read more.

    Ends with exit code 0 where every tier has a ready engine, else with 1.

    \b
    Examples:
      dualgauge status
      dualgauge status --json
    """
    with told():
        config = load(file)
        run = runfile.read(runfile.paths(file).state)
        if run is not None and run.config != str(config.path):
            run = None
        answer, trouble = ask(config)
        body = status(config, run, answer)
        click.echo(json.dumps(body, indent=2) if as_json else "\n".join(describe(body, trouble)))
        if not body["ready"]:
            raise SystemExit(1)


def ask(config: Config) -> tuple[Mapping[str, Any] | None, str]:
    """What the gateway's admin port says, or None and why it says nothing."""
    request = urllib.request.Request(f"{config.admin.url}/admin/status")  # noqa: S310 - always http
    if config.admin_token is not None:
        request.add_header("authorization", f"Bearer {config.admin_token}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT) as reply:
            answer = json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return None, f"the admin port {config.admin} answers {error.code}"
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return None, f"no gateway answers on the admin port {config.admin} ({reason})"
    return (
        (answer, "")
        if isinstance(answer, dict) and "engines" in answer
        else (None, "another program answers")
    )


def status(config: Config, run: Run | None, answer: Mapping[str, Any] | None) -> dict[str, Any]:
    """One body from both sources: processes by the run file, readiness and load by the gateway."""
    alive = run is not None and run.boot == runfile.boot_id() and run.owner.alive()
    units = {unit.name: unit for unit in (*run.engines, *run.beside)} if run is not None else {}
    told_by_gateway = {engine["name"]: engine for engine in answer["engines"]} if answer else {}
    engines = [_engine(spec, units.get(spec.name), told_by_gateway.get(spec.name)) for spec in config.engines]
    tiers = {tier: any(e["tier"] == tier and e["state"] == "ready" for e in engines) for tier in config.tiers}
    gateway = run.gateway if run is not None else None
    return {
        "ready": answer is not None and all(tiers.values()),
        "config": str(config.path),
        "console": f"{config.admin.url}/console/",
        "base_url": run.base_url if run is not None else f"{config.listen.url}/v1",
        "phase": run.phase if run is not None and (alive or run.phase == "failed") else None,
        "pid": run.owner.pid if run is not None and alive else None,
        "left_behind": run is not None and not alive and run.phase != "failed",
        "error": run.error if run is not None else None,
        "swap": run.swap if run is not None and alive else None,
        "tiers": {tier: "ready" if ready else "no engine is ready" for tier, ready in tiers.items()},
        "engines": engines,
        "gateway": {
            "answers": answer is not None,
            "pid": gateway.pid if gateway and alive else None,
            "restarts": gateway.restarts if gateway else 0,
            "log": gateway.log if gateway else None,
        },
        "policy": answer.get("policy") if answer else None,
        "workers": answer.get("workers", []) if answer else [],
        "restart_needed": bool(answer and answer.get("restart_needed")),
    }


def _engine(spec: EngineSpec, unit: UnitState | None, told: Mapping[str, Any] | None) -> dict[str, Any]:
    """The process's state where it is not up, else what the gateway finds when it asks."""
    state, reason = ("stopped" if spec.launched else "unknown"), None
    if told is not None:
        state, reason = told["state"], told.get("reason")
    if unit is not None and (unit.state != "ready" or (told is None and spec.launched)):
        state, reason = unit.state, unit.error
    known = told or {}
    return {
        "name": spec.name,
        "tier": spec.tier,
        "precision": spec.precision,
        "url": spec.url,
        "state": state,
        "reason": reason,
        "running": known.get("running"),
        "waiting": known.get("waiting"),
        "kv_usage": known.get("kv_usage"),
        "in_flight": known.get("in_flight"),
        "restarts": unit.restarts if unit else 0,
        "pid": unit.pid if unit else None,
        "log": (unit.log or None) if unit else None,
        "notes": list(unit.notes) if unit else [],
        "warnings": list(unit.warnings) if unit else [],
    }


def describe(body: Mapping[str, Any], trouble: str) -> list[str]:
    """The body as lines for a terminal."""
    lines = [f"{body['config']}: {_headline(body)}"]
    if body["error"]:
        lines += [f"  {line}" for line in body["error"].splitlines()]
    lines += ["", *_table(body["engines"]), ""]
    for tier, state in body["tiers"].items():
        lines.append(f"tier {tier}: {_coloured(state)}")
    if body["swap"]:
        lines.append(f"swap: {body['swap']}")
    lines += [f"{e['name']}: {e['reason']}" for e in body["engines"] if e["reason"] and e["state"] != "ready"]
    for engine in body["engines"]:
        lines += [f"{engine['name']}: {note}" for note in engine["notes"]]
        lines += [click.style(f"{engine['name']}: {text}", fg="yellow") for text in engine["warnings"]]
    if body["gateway"]["answers"]:
        policy = body["policy"] or {}
        lines.append(
            f"gateway: {body['base_url']}, policy {policy.get('file', '?')} {policy.get('hash', '')}"
        )
        if body["workers"]:
            lines.append("workers: " + ", ".join(f"pid {w['pid']} {w['state']}" for w in body["workers"]))
        lines.append(f"console: {body['console']}")
        if policy.get("reload_error"):
            lines.append(f"the policy could not be reloaded:\n{policy['reload_error']}")
        lines += _shadow(policy)
        if body.get("restart_needed"):
            lines.append(
                f"restart needed: {body['config']} was changed, and is read at the start only "
                "(the gateway's part: `dualgauge restart`)"
            )
    else:
        lines.append(f"gateway: {trouble}")
    return lines


def _shadow(policy: Mapping[str, Any]) -> list[str]:
    """The candidate beside the policy, and by which rules it differs."""
    lines = []
    shadow = policy.get("shadow")
    if shadow:
        rollout = (
            f"decides {shadow['rollout'] * 100:.6g} % of the conversations"
            if shadow["rollout"]
            else "does not act"
        )
        decided, moved = shadow["decided"], shadow["moved"]
        share = f" ({moved / decided:.1%})" if decided else ""
        lines.append(f"candidate: {shadow['file']} {shadow['hash']}, {rollout}")
        lines.append(f"  of {decided:,} requests it sends {moved:,}{share} to another tier")
        for one in shadow["differences"][:DIFFERENCES]:
            old, new = f"{one['rule']} ({one['tier']})", f"{one['candidate_rule']} ({one['candidate_tier']})"
            lines.append(f"  {one['requests']:,}: {old} -> {new}")
        if len(shadow["differences"]) > DIFFERENCES:
            lines.append(f"  and {len(shadow['differences']) - DIFFERENCES} more ways, with --json")
        if shadow["failed"]:
            failed = f"  it failed to decide {shadow['failed']:,} requests: the gateway's log tells why"
            lines.append(click.style(failed, fg="red"))
    if policy.get("shadow_error"):
        lines.append(f"the candidate is refused:\n{policy['shadow_error']}")
    return lines


def _headline(body: Mapping[str, Any]) -> str:
    if body["left_behind"]:
        return "its `dualgauge up` was killed; `dualgauge down` clears what is left"
    if body["phase"] == "failed":
        return "the last start failed"
    if body["phase"] is None:
        return (
            "runs without `dualgauge up`"
            if body["gateway"]["answers"]
            else "not running; start it with `dualgauge up`"
        )
    return f"{body['phase']} (pid {body['pid']})"


def _table(engines: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [[_cell(engine, column) for column in _COLUMNS] for engine in engines]
    widths = [max(len(row[at]) for row in [list(_COLUMNS), *rows]) for at in range(len(_COLUMNS))]
    lines = ["  ".join(name.ljust(width) for name, width in zip(_COLUMNS, widths, strict=True)).rstrip()]
    for row in rows:
        cells = [_coloured(cell.ljust(width)) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def _cell(engine: Mapping[str, Any], column: str) -> str:
    key = {"engine": "name", "kv": "kv_usage"}.get(column, column)
    value = engine[key]
    if value is None:
        return "-"
    return f"{value:.0%}" if column == "kv" else str(value)


def _coloured(text: str) -> str:
    colour = _COLOURS.get(text.strip(), "red" if text.startswith("no engine") else None)
    return click.style(text, fg=colour) if colour else text
