"""`dualgauge up`: from nothing to a served completion with one command, and everything ended with Ctrl-C."""

from __future__ import annotations

import asyncio
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from engines import hardware, runfile
from engines.runfile import Paths, Run
from gateway.cli import prepare
from gateway.cli.failures import Failure, interruptible, told
from gateway.config import DEFAULT_FILE, Config, HostPort

if TYPE_CHECKING:
    from gateway.cli.deployment import Prepared
    from gateway.cli.view import View

POLL = 0.2
TICK = 0.5


def _host_port(_context: click.Context, _parameter: click.Parameter, value: str | None) -> HostPort | None:
    try:
        return None if value is None else HostPort.parse(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command("up")
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help=f"The configuration. [default: ./{DEFAULT_FILE}, written where there is none]",
)
@click.option("-d", "--detach", is_flag=True, help="Return once all serves; `dualgauge down` ends it.")
@click.option("--listen", metavar="HOST:PORT", callback=_host_port, help="Listen here instead of `listen`.")
@click.option("--background", is_flag=True, hidden=True)
def up_command(file: Path | None, detach: bool, listen: HostPort | None, background: bool) -> None:
    """Start the engines and the gateway, and keep them running.

    Without a configuration, look at this machine and write one that fits. Install what the engines need and
    fetch their models where that is not done yet. Ctrl-C drains and stops all; once more stops at once.

    \b
    Examples:
      dualgauge up
      dualgauge up -d --listen 127.0.0.1:9000
    """
    from rich.console import Console

    from gateway.cli.view import View

    view = View(Console())
    try:
        with told("stopped before everything was up; nothing is left running"), interruptible():
            path = _configured(file, listen, view)
            config = prepare.load(path)
            paths = runfile.paths(config.path)
            with runfile.hold(paths.lock) as ours:
                if not ours:
                    raise Failure(_running(paths, config))
                _sweep(paths, view)
                prepared = prepare.prepare(config, listen, view)
                if not detach:
                    _serve(prepared, paths, view, background=background)
                    return
            _follow(_spawn(prepared, paths), prepared, paths, view)
    finally:
        view.close()


def _configured(file: Path | None, listen: HostPort | None, view: View) -> Path:
    path = file or Path(DEFAULT_FILE)
    if file is None and not path.exists():
        reasons = prepare.first_config(path, hardware.look(), listen)
        view.say(f"Wrote {path} for this machine:")
        for reason in reasons:
            view.say(f"  {reason}")
    return path


def _running(paths: Paths, config: Config) -> str:
    run = runfile.read(paths.state)
    who = f" (pid {run.owner.pid})" if run else ""
    if run is not None and run.config != str(config.path):
        return (
            f"another configuration, {run.config}, runs from this folder{who}: stop it with "
            f"`dualgauge down --config {shlex.quote(run.config)}`, or keep the two in folders of their own"
        )
    return f"{config.path} is running already{who}: see `dualgauge status`, stop it with `dualgauge down`"


def _sweep(paths: Paths, view: View) -> None:
    """End what an earlier `up` left behind that was killed."""
    left = runfile.read(paths.state)
    if left is not None and (count := runfile.sweep(left)):
        view.say(f"Ended {count} processes that an earlier run had left behind.")
    paths.state.unlink(missing_ok=True)


def _serve(prepared: Prepared, paths: Paths, view: View, *, background: bool) -> None:
    """Run until told to stop. Raises StartError; KeyboardInterrupt where the stop came before all was up."""
    phase = ""

    def listener(run: Run) -> None:
        nonlocal phase
        before, phase = phase, run.phase
        view.show(run)
        if phase == "ready" != before:
            view.close()
            announce(prepared, view)
            if not background:
                view.say("\nCtrl-C stops everything.")
        elif phase == "stopping" and before == "ready":
            view.say("\nDraining: running requests finish first. Ctrl-C again stops at once.")

    if not asyncio.run(_run(prepared, paths, view, listener)):
        raise KeyboardInterrupt


async def _run(prepared: Prepared, paths: Paths, view: View, listener: Callable[[Run], None]) -> bool:
    from engines.launch import ProcessLauncher
    from gateway.cli.deployment import Deployment, engine_units, gateway_unit

    stop, hurry = asyncio.Event(), asyncio.Event()

    def interrupted() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, interrupted)
    engines, gateway = engine_units(prepared, paths), gateway_unit(prepared, paths)
    deployment = Deployment(prepared, paths, ProcessLauncher(), listener, engines=engines, gateway=gateway)
    ticking = asyncio.create_task(_tick(view))
    try:
        return await deployment.run(stop, hurry)
    finally:
        ticking.cancel()


async def _tick(view: View) -> None:
    while True:
        await asyncio.sleep(TICK)
        view.tick()


def announce(prepared: Prepared, view: View) -> None:
    """The base URL, and a command that gets an answer from it."""
    config = prepared.config
    key = "" if config.keys is None else " -H 'authorization: Bearer YOUR-KEY'"
    message = '{"role":"user","content":"Say hello."}'
    body = f'{{"model":"{config.model}","max_tokens":32,"temperature":0,"messages":[{message}]}}'
    view.say(f"\nDualgauge serves {config.model}. Point OpenAI clients at it:", style="bold")
    view.say(f"  export OPENAI_BASE_URL={prepared.base_url}")
    view.say("Try it:")
    curl = f"curl -s {prepared.base_url}/chat/completions{key}"
    view.say(f"  {curl} -H 'content-type: application/json' -d '{body}'")
    view.say(f"Engines and tiers: dualgauge status; console: {config.admin.url}/console/")


def _spawn(prepared: Prepared, paths: Paths) -> subprocess.Popen[bytes]:
    paths.logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-m", "gateway.cli", "up", "--background"]
    command += ["--config", str(prepared.config.path)]
    if prepared.listen:
        command += ["--listen", prepared.listen]
    with paths.log("up").open("wb") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


def _follow(process: subprocess.Popen[bytes], prepared: Prepared, paths: Paths, view: View) -> None:
    """Show the background run until it is ready; Ctrl-C ends it. Raises Failure where it does not come up."""
    run: Run | None = None
    try:
        while process.poll() is None:
            latest = runfile.read(paths.state)
            if latest is not None and latest.owner.pid == process.pid:
                run = latest
                view.show(run)
                if run.phase == "ready":
                    view.close()
                    announce(prepared, view)
                    view.say(f"\nIt runs in the background (pid {process.pid}); `dualgauge down` stops it.")
                    return
            time.sleep(POLL)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
    view.close()
    raise Failure(_last_words(paths))


def _last_words(paths: Paths) -> str:
    log = paths.log("up")
    text = log.read_text(encoding="utf-8", errors="replace").strip()
    _, found, message = text.rpartition("error: ")
    return message if found else f"the background run ended before it was ready, see {log}\n{text[-2000:]}"
