"""`dualgauge policy …`: check a policy file, print the schema that editors use."""

from __future__ import annotations

import json

import click

from gateway.cli.chosen import compiled, deployed, tiers_of, tiers_option
from gateway.cli.policy_replay import replay_command
from gateway.cli.policy_test import cases_command
from policies.shipped import beside


@click.group("policy")
def policy_group() -> None:
    """Check policies before they go live."""


@policy_group.command("check")
@click.argument("file")
@tiers_option
def check_command(file: str, tiers: tuple[str, ...] | None) -> None:
    """Say what is wrong with a policy, as file:line:column; exit 1 where it cannot be used.

    Its candidate (`shadow`) is checked too.

    FILE is a path, or the name of a shipped policy: default, strict, thrifty.
    """
    deployment = deployed() if tiers is None else None
    served = None if deployment is None else {spec.tier for spec in deployment.engines}
    tiers = tiers or tiers_of(deployment)
    policy = compiled(file, tiers, served)
    checked = [policy]
    if policy.shadow is not None:
        checked.append(compiled(beside(policy.shadow, policy.file), tiers, served))
    for one in checked:
        for warning in one.warnings:
            click.echo(str(warning), err=True)
        count = len(one.rules)
        click.echo(f"{one.file}: {count} rule{'s' if count != 1 else ''}, hash {one.hash}")


@policy_group.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of policy files."""
    from policies.schema import policy_schema

    click.echo(json.dumps(policy_schema(), indent=2))


policy_group.add_command(replay_command)
policy_group.add_command(cases_command)
