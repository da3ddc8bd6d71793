"""Which policy, tiers and log a command is about: those it is told, else those of the deployment here."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import click

from policies.compile import TIERS, compile_policy
from policies.document import ProblemsError
from policies.policy import Policy
from policies.shipped import policy_text

if TYPE_CHECKING:
    from gateway.config import Config

HERE = Path("dualgauge.yaml")


def _tier_names(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> tuple[str, ...] | None:
    """`fast,exact` as a tuple."""
    if value is None:
        return None
    names = tuple(name.strip() for name in value.split(","))
    if not all(names) or len(set(names)) != len(names):
        raise click.BadParameter("write the tiers from the least to the most precise: fast,exact")
    return names


tiers_option = click.option(
    "--tiers",
    callback=_tier_names,
    help="From the least to the most precise. [default: those of ./dualgauge.yaml, else fast,exact]",
)


def compiled(policy: str, tiers: tuple[str, ...], served: Collection[str] | None = None) -> Policy:
    """A shipped policy or one from a file; ends the program with what is wrong where it cannot be used."""
    try:
        text, file = policy_text(policy)
        return compile_policy(text, file, tiers=tiers, served=served)
    except ProblemsError as error:
        for diagnostic in error.diagnostics:
            click.echo(str(diagnostic), err=True)
        sys.exit(1)


def deployed() -> Config | None:
    """The deployment of this folder, if there is one; ends the program where its file has a mistake."""
    if not HERE.exists():
        return None
    from gateway import config

    try:
        return config.read(HERE)
    except ProblemsError as error:
        raise click.ClickException(str(error)) from None


def tiers_of(deployment: Config | None) -> tuple[str, ...]:
    """The deployment's tiers, else the usual ones."""
    return TIERS if deployment is None else deployment.tiers


def log_of(deployment: Config | None, option: str) -> Path:
    """The deployment's decision log; ends the program where it has none."""
    if deployment is not None and deployment.decision_log is not None:
        return Path(deployment.decision_log.path)
    where = f"there is no {HERE} here" if deployment is None else f"{HERE} has no `decision_log`"
    how = "have one written with `decision_log: {path: decisions.jsonl}`"
    raise click.ClickException(f"{where}: name a log with {option}, or {how}")
