"""`dualgauge doctor`: what is wrong with a set-up, and what to do about each thing."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from gateway.cli.options import config_option
from gateway.config import DEFAULT_FILE

if TYPE_CHECKING:
    from engines.hardware import Runner
    from gateway.cli.findings import Finding
    from gateway.config import Config
    from policies.document import Diagnostic

FAULTS = 1
Check = tuple[str, Callable[[], "Iterable[Finding]"]]


class Examined(msgspec.Struct, frozen=True):
    """One check: what it found, nothing where all is well. `skipped` says why it was not made."""

    name: str
    findings: tuple[Finding, ...] = ()
    skipped: str | None = None


@click.command("doctor")
@config_option("path", "The deployment; without one, the machine alone is looked at.")
@click.option("--strict", is_flag=True, help="Warnings count as faults.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor_command(path: Path, strict: bool, as_json: bool) -> None:
    """Look at a set-up before it fails: driver, memory, ports, engines' versions, Redis, clock, files, disk.

    Changes nothing, and needs nothing to run; what runs is asked. Engines' and Redis's versions are compared
    with a list of known vulnerabilities that comes with this release.

    \b
    Exit codes: 0 no fault, 1 a fault (with --strict: or a warning), 2 wrong options.

    \b
    Examples:
      dualgauge doctor
      dualgauge doctor --config /etc/dualgauge/dualgauge.yaml --strict
      dualgauge doctor --json
    """
    from engines.hardware import run

    # What is logged while a policy is read is a finding already.
    logging.getLogger("dualgauge").addHandler(logging.NullHandler())
    examined = examine(path, run)
    bad = {"fault", "warning"} if strict else {"fault"}
    sound = not any(finding.level in bad for one in examined for finding in one.findings)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode({"sound": sound, "checks": examined})))
    else:
        for one in examined:
            _show(one)
    if not sound:
        sys.exit(FAULTS)


def examine(path: Path, runner: Runner) -> list[Examined]:
    """Every check, in an order in which the first fault is the first to mend. `runner` runs nvidia-smi."""
    from engines import hardware
    from gateway.cli import access, findings, servers

    config, wrong = _configuration(path)
    examined = [Examined("configuration", wrong)]
    machine = hardware.look(runner)
    checks: list[Check] = [("clock", findings.clock), ("open files", findings.system)]
    if config is not None:
        specs = config.engines
        running = _running(config)
        checks[:0] = [
            ("driver", lambda: findings.driver(specs, machine, runner)),
            ("processor", lambda: findings.processor(specs, machine)),
            ("engines", lambda: servers.engines(specs)),
            ("redis", lambda: servers.store(config)),
            ("files", lambda: access.files(config)),
            ("disk", lambda: findings.disk(config)),
            ("network", lambda: findings.exposed(config)),
        ]
        free: list[Check] = [
            ("memory", lambda: findings.memory(specs, machine)),
            ("ports", lambda: findings.ports(config)),
        ]
        if running:
            examined += [Examined(name, skipped="in use by this gateway, which runs") for name, _ in free]
        else:
            checks[:0] = free
    return examined + [Examined(name, tuple(check())) for name, check in checks]


def _configuration(path: Path) -> tuple[Config | None, tuple[Finding, ...]]:
    """The deployment with its policy and keys, or what is wrong with it."""
    from gateway.cli.findings import Finding
    from gateway.config import read
    from gateway.snapshots import read_snapshot
    from policies.document import ProblemsError

    try:
        config = read(path)
    except FileNotFoundError:
        do = "`dualgauge up` writes one that fits this machine; name another with --config"
        # Without --config the machine alone may be meant; a file that was named is.
        return None, (
            Finding("warning" if path == Path(DEFAULT_FILE) else "fault", f"there is no {path}", do),
        )
    except ProblemsError as error:
        return None, _told(error.diagnostics)
    except (OSError, UnicodeDecodeError) as error:
        return None, (Finding("fault", f"{path} cannot be read: {error}", "make it readable, in UTF-8"),)
    try:
        snapshot, problem = read_snapshot(config)
    except ProblemsError as error:
        return config, _told(error.diagnostics)
    found = _told(snapshot.policy.warnings)
    if problem is None:
        return config, found
    return config, (
        *found,
        Finding("warning", problem, "mend the candidate, or take `shadow` out of the policy"),
    )


def _told(diagnostics: Iterable[Diagnostic]) -> tuple[Finding, ...]:
    from gateway.cli.findings import Finding
    from gateway.files import UNREADABLE

    return tuple(
        Finding(
            "fault" if problem.severity == "error" else "warning",
            f"{problem.file}:{problem.line}:{problem.column}: {problem.message}",
            f"see that {problem.file} is there and that the gateway's user may read it, or name another"
            if problem.message.startswith(UNREADABLE)
            else f"mend line {problem.line} of {problem.file}",
        )
        for problem in diagnostics
    )


def _running(config: Config) -> bool:
    """Whether this deployment's gateway answers on its admin port."""
    from gateway.cli.status import ask

    return ask(config)[0] is not None


def _show(one: Examined) -> None:
    if one.skipped is not None:
        click.echo(f"{click.style('-', dim=True)} {one.name}: {one.skipped}")
    elif not one.findings:
        click.echo(f"{click.style('ok', fg='green')} {one.name}")
    for finding in one.findings:
        colour = "red" if finding.level == "fault" else "yellow"
        click.echo(f"{click.style(finding.level, fg=colour, bold=True)} {one.name}: {finding.what}")
        click.echo(f"    {finding.do}")
