"""How a command that starts things ends when it cannot: one message that says what to do, and exit code 1."""

from __future__ import annotations

import contextlib
import errno
import signal
import sys
from collections.abc import Iterator
from types import FrameType

import click

from engines.launch import StartError
from engines.making import MakingError
from engines.parity import ParityError
from engines.plan import PlanError
from policies.document import ProblemsError


class Failure(click.ClickException):
    """A message for the person at the terminal."""

    def show(self, file: object = None) -> None:
        click.echo(click.style("error: ", fg="red", bold=True) + self.message, err=True)


class Interrupted(KeyboardInterrupt):
    """SIGTERM or SIGHUP while something is prepared."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end what is done here as Ctrl-C does, children included."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise Interrupted

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def told(interrupted: str = "stopped") -> Iterator[None]:
    """Turn what can be foreseen into a message; anything else is a fault of ours and keeps its traceback.

    `interrupted` is what Ctrl-C means here.
    """
    try:
        yield
    except ProblemsError as error:
        for diagnostic in error.diagnostics:
            click.echo(str(diagnostic), err=True)
        sys.exit(1)
    except StartError as error:
        raise Failure(describe_start(error)) from None
    except (PlanError, MakingError, ParityError) as error:
        raise Failure(str(error)) from None
    except KeyboardInterrupt:
        click.echo(interrupted, err=True)
        sys.exit(130)
    except OSError as error:
        raise Failure(_describe(error)) from None


def describe_start(error: StartError) -> str:
    """What died, its last words, and where to read the rest."""
    said = "".join(f"\n    {line}" for line in error.lines)
    advice = next((text for sign, text in _ADVICE if sign in "\n".join(error.lines)), _ANY_ADVICE)
    return f"{error.name} {error.what}.{said}\n  {advice}\n  The whole log: {error.log}"


_ANY_ADVICE = "Mend that and run the same command again."
_ADVICE = (
    (
        "less than desired GPU memory utilization",
        "Something else holds GPU memory (nvidia-smi); or lower `share`.",
    ),
    (
        "No available memory for the cache blocks",
        "No room for the KV cache: raise `share`, or take a smaller model.",
    ),
    ("max seq len", "The KV cache is too small: lower --max-model-len in `args`, or raise `share`."),
    ("out of memory", "Lower `share`, or --max-num-seqs in `args`, or take a smaller model."),
    ("unrecognized arguments", "Correct the engine's `args` in the configuration."),
    ("ddress already in use", "Another program took the port meanwhile: change the engine's `port`."),
)


def _describe(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    if error.errno == errno.ENOSPC:
        return f"no disk space is left{where}: free some and run the same command again."
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return f"not allowed to write{where}: {error.strerror}."
    return f"{error.strerror or error}{where}"
