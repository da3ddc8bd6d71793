"""`dualgauge engine …`: take one engine out of service, and back, without a dropped request."""

from __future__ import annotations

from pathlib import Path

import click

from engines import runfile
from gateway.cli.control import ControlError, Do, Order, ask
from gateway.cli.failures import Failure, told
from gateway.cli.options import running_config

_now = click.option("--now", is_flag=True, help="Do not wait for running requests: they break off.")


@click.group("engine")
def engine_group() -> None:
    """Drain, restart, put to sleep or wake one engine of what `dualgauge up` runs.

    The gateway gives the engine no new requests, those that run finish, and only then something is done to
    it. Ctrl-C while requests still run gives it requests again.

    \b
    Examples:
      dualgauge engine restart fast-0
      dualgauge engine drain exact-0 && dualgauge engine resume exact-0
    """


@engine_group.command("drain")
@click.argument("name")
@running_config
def drain_command(name: str, file: Path) -> None:
    """Return once nothing runs on the engine; it gets no requests until `resume`, whatever happens to it.

    Engines that somebody else runs (`external`, `hosted`) can be drained too.
    """
    _order("drain", name, file)


@engine_group.command("resume")
@click.argument("name")
@running_config
def resume_command(name: str, file: Path) -> None:
    """Let a drained engine have requests again."""
    _order("resume", name, file)


@engine_group.command("restart")
@click.argument("name")
@running_config
@_now
def restart_command(name: str, file: Path, now: bool) -> None:
    """Drain it, end it, start it, prove it, and let it have requests again.

    One that was given up after too many failures is started too.
    """
    _order("restart", name, file, now=now)


@engine_group.command("sleep")
@click.argument("name")
@running_config
def sleep_command(name: str, file: Path) -> None:
    """Drain it and put it to sleep: its weights go to the machine's memory, its GPU memory becomes free.

    Only engines with --enable-sleep-mode in their `args` can.
    """
    _order("sleep", name, file)


@engine_group.command("wake")
@click.argument("name")
@running_config
def wake_command(name: str, file: Path) -> None:
    """Wake it, prove it, and let it have requests; one that is not well is restarted."""
    _order("wake", name, file)


def _order(do: Do, name: str, file: Path, *, now: bool = False) -> None:
    with told("given up; the engine gets requests as before"):
        path = runfile.paths(file).control
        try:
            click.echo(ask(path, Order(do, name, now), lambda text: click.echo(f"  {text}")))
        except ControlError as error:
            raise Failure(str(error)) from None
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            raise Failure(
                f"no `dualgauge up` runs for {file}: name its configuration with --config"
            ) from None
