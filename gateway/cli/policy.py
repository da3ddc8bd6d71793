"""`dualgauge policy …`: check a policy file, print the schema that editors use."""

from __future__ import annotations

import json
import sys

import click

from policies.compile import TIERS, compile_policy
from policies.document import ProblemsError
from policies.policy import Policy
from policies.shipped import policy_text


def tier_names(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[str, ...]:
    """`fast,exact` as a tuple."""
    names = tuple(name.strip() for name in value.split(","))
    if not all(names) or len(set(names)) != len(names):
        raise click.BadParameter("write the tiers from the least to the most precise: fast,exact")
    return names


tiers_option = click.option(
    "--tiers",
    default=",".join(TIERS),
    show_default=True,
    callback=tier_names,
    help="The deployment's tiers, from the least to the most precise.",
)


def compiled(policy: str, tiers: tuple[str, ...]) -> Policy:
    """A shipped policy or one from a file; ends the program with what is wrong where it cannot be used."""
    try:
        text, file = policy_text(policy)
        return compile_policy(text, file, tiers=tiers)
    except OSError as error:
        raise click.ClickException(f"cannot read the policy {policy}: {error.strerror}") from None
    except ProblemsError as error:
        for diagnostic in error.diagnostics:
            click.echo(str(diagnostic), err=True)
        sys.exit(1)


@click.group("policy")
def policy_group() -> None:
    """Check policies before they go live."""


@policy_group.command("check")
@click.argument("file")
@tiers_option
def check_command(file: str, tiers: tuple[str, ...]) -> None:
    """Say what is wrong with a policy, as file:line:column; exit 1 where it cannot be used.

    FILE is a path, or the name of a shipped policy: default, strict, thrifty.
    """
    policy = compiled(file, tiers)
    for warning in policy.warnings:
        click.echo(str(warning), err=True)
    count = len(policy.rules)
    click.echo(f"{policy.file}: {count} rule{'s' if count != 1 else ''}, hash {policy.hash}")


@policy_group.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of policy files."""
    from policies.schema import policy_schema

    click.echo(json.dumps(policy_schema(), indent=2))
