"""`dualgauge serve` and `dualgauge reload`."""

from __future__ import annotations

from pathlib import Path

import click

from engines.spec import bearer
from gateway.config import DEFAULT_FILE, Config, HostPort, listening, read
from policies.document import ProblemsError

FAILED = 1

config_option = click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path),
    default=DEFAULT_FILE,
    show_default=True,
    help="The deployment.",
)


def load_config(path: Path) -> Config:
    """A deployment's configuration; every problem is printed and ends the command with status 1."""
    try:
        return read(path)
    except ProblemsError as exc:
        raise _fail(str(exc)) from None
    except FileNotFoundError:
        raise _fail(
            f"{path} does not exist: `dualgauge up` writes one, or name another with --config"
        ) from None
    except (OSError, UnicodeDecodeError) as exc:
        raise _fail(f"{path} cannot be read: {exc}") from None


def _fail(message: str) -> click.exceptions.Exit:
    click.echo(message, err=True)
    return click.exceptions.Exit(FAILED)


@click.command("serve")
@config_option
@click.option("--listen", metavar="HOST:PORT", help="Instead of the file's `listen`.")
def serve_command(path: Path, listen: str | None) -> None:
    """Run the gateway alone, in front of engines that run already.

    It answers at once, whether or not an engine is up: /readyz tells which tier is ready.

    \b
    Examples:
      dualgauge serve --config dualgauge.yaml
      dualgauge serve --listen 127.0.0.1:9000
    """
    config = load_config(path)
    if listen is not None:
        try:
            address = HostPort.parse(listen)
        except ValueError as exc:
            raise click.BadParameter(str(exc), param_hint="--listen") from None
        try:
            config = listening(config, address)
        except ValueError as exc:
            raise _fail(str(exc)) from None
    from gateway.app import build
    from gateway.holding import hold_back
    from gateway.server import run
    from gateway.telemetry.logs import configure

    access = configure(config.logs)

    try:
        gateway = build(config, access=access)
        hold_back(gateway)
        run(gateway)
    except ProblemsError as exc:
        raise _fail(str(exc)) from None
    except OSError as exc:
        raise _fail(exc.strerror or str(exc)) from None


@click.command("reload")
@config_option
def reload_command(path: Path) -> None:
    """Have a running gateway read its policy and keys again.

    A file with a mistake changes nothing: the old one stays in force, and the mistake is shown.

    \b
    Example:
      dualgauge reload --config dualgauge.yaml
    """
    import httpx2

    config = load_config(path)
    headers = bearer(config.admin_token)
    try:
        reply = httpx2.post(f"{config.admin.url}/admin/reload", headers=headers, timeout=10)
    except httpx2.TransportError as exc:
        raise _fail(f"no gateway answers at {config.admin.url} ({exc}): is it running?") from None
    if reply.status_code != httpx2.codes.OK:
        raise _fail(reply.json()["error"]["message"])
    told = reply.json()
    candidate = told.get("candidate")
    beside = f", beside it the candidate {candidate}" if candidate else ""
    click.echo(f"policy {told['policy']} is in force{beside}")
    if told.get("restart_needed"):
        click.echo(f"restart needed: {path} was changed, and is read at the start only")
