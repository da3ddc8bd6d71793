"""`dualgauge policy …`: check a policy file, print the schema that editors use."""

from __future__ import annotations

import json

import click

from gateway.cli.chosen import compiled, tier_names
from gateway.cli.policy_replay import replay_command
from gateway.cli.policy_test import cases_command
from policies.compile import TIERS


@click.group("policy")
def policy_group() -> None:
    """Check policies before they go live."""


@policy_group.command("check")
@click.argument("file")
@click.option(
    "--tiers",
    default=",".join(TIERS),
    show_default=True,
    callback=tier_names,
    help="The deployment's tiers, from the least to the most precise.",
)
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


policy_group.add_command(replay_command)
policy_group.add_command(cases_command)
