"""`dualgauge`: each command is a module of its own, loaded when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module, metadata

import click

COMMANDS: Mapping[str, tuple[str, str, str]] = {
    "up": ("gateway.cli.up", "up_command", "Start the engines and the gateway, and keep them running."),
    "down": ("gateway.cli.down", "down_command", "Stop what `up` left running."),
    "status": ("gateway.cli.status", "status_command", "Show engines and tiers."),
    "plan": ("gateway.cli.plan", "plan_command", "Show what fits on which GPUs, and with which limits."),
    "serve": ("gateway.cli.serve", "serve_command", "Run the gateway alone, in front of running engines."),
    "restart": (
        "gateway.cli.serve",
        "restart_command",
        "Replace a running gateway's processes without a dropped request.",
    ),
    "reload": (
        "gateway.cli.serve",
        "reload_command",
        "Have a gateway read its policy and keys again.",
    ),
    "doctor": (
        "gateway.cli.doctor",
        "doctor_command",
        "Look for what is wrong with a set-up, and say what to do.",
    ),
    "explain": ("gateway.cli.explain", "explain_command", "Show how a request would be decided, and why."),
    "keys": ("gateway.cli.keys_cmd", "keys_group", "Make, list, revoke and rotate keys of applications."),
    "policy": (
        "gateway.cli.policy",
        "policy_group",
        "Check, test and replay policies; print the schema.",
    ),
    "bench": ("gateway.cli.bench", "bench_command", "Measure this pair on this machine, and write a report."),
    "engine": ("gateway.cli.engine_cmd", "engine_group", "Drain, restart, sleep or wake one engine."),
    "engines": ("gateway.cli.engines_cmd", "engines_group", "Install the environments that engines run in."),
    "models": ("gateway.cli.models_cmd", "models_group", "Make and check model folders."),
}


class LazyGroup(click.Group):
    """Knows its commands by name and one line; imports only the one that runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, name, _ = COMMANDS[cmd_name]
        command = getattr(import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            from policies.document import unknown

            ctx.fail(unknown("command", args[0], COMMANDS))


def _version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"dualgauge {metadata.version('dualgauge')}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version."
)
def cli() -> None:
    """One OpenAI endpoint in front of two precisions of the same model.

    \b
    Examples:
      dualgauge up                       choose, install, start and serve
      dualgauge status                   what runs, and how it is
      echo '{"messages":[{"role":"user","content":"Fix this SQL"}]}' | dualgauge explain -
    """


def main() -> None:
    cli(prog_name="dualgauge")
