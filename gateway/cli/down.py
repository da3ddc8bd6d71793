"""`dualgauge down`: end what `dualgauge up` runs, in the background or in another terminal."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import click

from engines import runfile
from engines.runfile import Paths, Run
from gateway.cli.failures import Failure, told
from gateway.cli.options import running_config
from gateway.cli.view import View
from gateway.config import located

POLL = 0.2
MARGIN = 60.0


@click.command("down")
@running_config
@click.option("--now", is_flag=True, help="Do not wait for running requests.")
def down_command(file: Path, now: bool) -> None:
    """Stop what `dualgauge up` runs: requests in flight finish first, then gateway and engines end.

    Where nothing runs it says so and succeeds.

    \b
    Examples:
      dualgauge down
      dualgauge down --now
    """
    from rich.console import Console

    view = View(Console())
    try:
        with told("the stop goes on; see `dualgauge status`"):
            _down(file, view, now=now)
    finally:
        view.close()


def _down(file: Path, view: View, *, now: bool) -> None:
    paths = runfile.paths(file)
    run = runfile.read(paths.state)
    if run is None:
        view.say(f"nothing runs for {file}")
        return
    if run.config != str(located(file)):
        raise Failure(f"what runs from this folder is {run.config}: name it with --config")
    if run.boot == runfile.boot_id() and run.owner.alive():
        _end(run, paths, view, now=now)
    elif (count := runfile.sweep(run)) == 0:
        view.say(f"nothing runs for {file}")
    else:
        view.say(f"ended {count} processes that a killed `dualgauge up` had left behind")
    paths.state.unlink(missing_ok=True)


def _end(run: Run, paths: Paths, view: View, *, now: bool) -> None:
    """Ask the owner to stop, follow it, and end whatever it does not."""
    view.begin(run)
    if run.phase != "stopping":
        os.kill(run.owner.pid, signal.SIGTERM)
    if now:
        time.sleep(POLL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(run.owner.pid, signal.SIGTERM)
    end = time.monotonic() + run.longest_stop + MARGIN
    while run.owner.alive():
        latest = runfile.read(paths.state)
        if latest is not None and latest.owner == run.owner:
            run = latest
            view.show(run)
        if time.monotonic() >= end:
            os.kill(run.owner.pid, signal.SIGKILL)
            runfile.sweep(run)
            raise Failure(f"pid {run.owner.pid} did not stop in time and was killed, with all that it ran")
        view.tick()
        time.sleep(POLL)
    view.close()
    if (count := runfile.sweep(run)) > 0:
        view.say(f"ended {count} more processes that were left")
    view.say("everything is stopped")
