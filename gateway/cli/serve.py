"""`dualgauge serve`, `dualgauge restart` and `dualgauge reload`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from engines.spec import bearer
from gateway.config import DEFAULT_FILE, Config, HostPort, listening, read
from gateway.crew import PLACE, StartError
from policies.document import ProblemsError

FAILED = 1
RELOAD_SECONDS = 10.0
RESTART_SECONDS = 600.0

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
    _serve(config, None if listen is None else str(config.listen))


def _serve(config: Config, listen: str | None) -> None:
    """As one process, as the parent of several, or as one of these."""
    from gateway.server import keep_standard_files, oversee, run, serve
    from gateway.telemetry.logs import configure

    keep_standard_files()
    place = os.environ.pop(PLACE, None)
    access = configure(config.logs)
    if access is not None:
        access.shared = place is not None
    try:
        if place is None and config.workers > 1:
            run(oversee(config, listen))
            return
        from gateway.app import build
        from gateway.holding import hold_back

        gateway = build(config, access=access, others=place is not None)
        hold_back(gateway)
        if place is None:
            run(serve(gateway, listen))
            return
        from gateway.crew.worker import placed, work

        run(work(gateway, placed(place)))
    except ProblemsError as exc:
        raise _fail(str(exc)) from None
    except StartError as exc:
        raise _fail(f"the gateway does not come up: {exc}") from None
    except OSError as exc:
        raise _fail(exc.strerror or str(exc)) from None


@click.command("restart")
@config_option
def restart_command(path: Path) -> None:
    """Replace the processes of a running gateway, one after the other, without a dropped request.

    New processes read the configuration and take the port over once they are ready; the old ones end with
    their last stream. Where a new one does not come up nothing changes, and what is wrong is shown.

    \b
    Example:
      dualgauge restart --config dualgauge.yaml
    """
    told = _ask(path, "restart", RESTART_SECONDS)
    click.echo(f"restarted: {_pids(told['pids'])} on the port now")
    if told["leaving"]:
        click.echo(f"{_pids(told['leaving'])} until the last of the streams that run there has ended")


def _pids(pids: list[int]) -> str:
    which = ", ".join(map(str, pids))
    return f"pid {which} serves" if len(pids) == 1 else f"pids {which} serve"


@click.command("reload")
@config_option
def reload_command(path: Path) -> None:
    """Have a running gateway read its policy and keys again.

    A file with a mistake changes nothing: the old one stays in force, and the mistake is shown.

    \b
    Example:
      dualgauge reload --config dualgauge.yaml
    """
    told = _ask(path, "reload", RELOAD_SECONDS)
    candidate = told.get("candidate")
    beside = f", beside it the candidate {candidate}" if candidate else ""
    click.echo(f"policy {told['policy']} is in force{beside}")
    if told.get("restart_needed"):
        click.echo(f"restart needed: {path} was changed, and is read at the start only (`dualgauge restart`)")


def _ask(path: Path, what: str, seconds: float) -> dict[str, Any]:
    """Have the gateway of this configuration do something; what came of it. Ends the command where it does
    not."""
    import httpx2

    config = load_config(path)
    headers = bearer(config.admin_token)
    try:
        reply = httpx2.post(f"{config.admin.url}/admin/{what}", headers=headers, timeout=seconds)
    except httpx2.TransportError as exc:
        raise _fail(f"no gateway answers at {config.admin.url} ({exc}): is it running?") from None
    if reply.status_code != httpx2.codes.OK:
        raise _fail(reply.json()["error"]["message"])
    answer: dict[str, Any] = reply.json()
    return answer
