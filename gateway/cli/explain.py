"""`dualgauge explain`: how requests would be decided, without an engine or a running gateway."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click
import msgspec

from gateway.asked import DIALECTS, Caller, RefusedError, decoded, explained, facts_of, record, signals
from gateway.cli.chosen import compiled, deployed, log_of, tiers_of
from gateway.cli.explained import lines
from policies.logged import DecisionLine, FieldsLine, Reader, decode
from policies.policy import Explanation, Policy

if TYPE_CHECKING:
    from gateway.config import Config
    from gateway.tokenizer import Tokenizer

MAX_LAST = 10_000
_FIELDS = b'{"kind":"fields"'


def _headers(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for value in values:
        name, colon, text = value.partition(":")
        if not colon or not name.strip():
            raise click.BadParameter(f"`{value}`: write it as `x-criticality: high`")
        headers[name.strip().lower()] = text.strip()
    return headers


def _moment(_context: click.Context, _parameter: click.Parameter, value: str | None) -> float:
    if value is None:
        return time.time()
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise click.BadParameter(f"`{value}`: write it as 2026-11-30T09:00:00+01:00") from None
    return moment.timestamp()


@click.command("explain")
@click.argument("file", required=False)
@click.option("--text", help="Explain this user message instead of a request body.")
@click.option(
    "--jsonl", metavar="FILE", help="One request body a line (`-`: stdin), one JSON object a line out."
)
@click.option(
    "--last", type=click.IntRange(1, MAX_LAST), metavar="N", help="The last N decisions of the decision log."
)
@click.option("--log", metavar="FILE", help="The log for --last. [default: that of ./dualgauge.yaml]")
@click.option(
    "--policy", metavar="POLICY", help="A path or a shipped name. [default: that of ./dualgauge.yaml]"
)
@click.option("--header", "headers", multiple=True, callback=_headers, help="A header, as `name: value`.")
@click.option("--dialect", type=click.Choice(tuple(DIALECTS)), help="The API shape. [default: by the body]")
@click.option("--tenant", default="anonymous", show_default=True, help="The public name of the caller's key.")
@click.option("--tag", "tags", multiple=True, help="A tag of the caller's key.")
@click.option("--time", "moment", callback=_moment, help="When it comes, 2026-11-30T09:00. [default: now]")
@click.option(
    "--tokenizer", metavar="FILE", help="A tokenizer.json to count with. [default: that of ./dualgauge.yaml]"
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def explain_command(
    file: str | None,
    text: str | None,
    jsonl: str | None,
    last: int | None,
    log: str | None,
    policy: str | None,
    headers: dict[str, str],
    dialect: str | None,
    tenant: str,
    tags: tuple[str, ...],
    moment: float,
    tokenizer: str | None,
    as_json: bool,
) -> None:
    """Show how a request would be decided: its signals, each rule held or not, and why.

    FILE holds a request body as JSON; `-` reads it from stdin. --last shows decisions that were made, and how
    the policy decides them now; the gateway may run meanwhile.

    \b
    Examples:
      dualgauge explain request.json --header "x-criticality: high"
      dualgauge explain --last 20 --policy new.yaml
    """
    if sum(source is not None for source in (file, text, jsonl, last)) != 1:
        raise click.UsageError("give one of FILE, --text, --jsonl and --last")
    needed = policy is None or (last is not None and log is None)
    deployment = deployed() if needed else None
    tiers = tiers_of(deployment)
    if policy is None and deployment is not None:
        policy = deployment.policy
    rules = compiled(policy or "default", tiers)
    if last is not None:
        made = _last(Path(log) if log is not None else log_of(deployment, "--log"), last)
        _show_made(made, rules, as_json)
        return
    caller = Caller(headers, tenant, frozenset(tags), dialect, moment)

    counted, prompts = _tokenizer(tokenizer, deployment)

    def explain(raw: bytes) -> Explanation:
        facts = facts_of(decoded(raw), caller)
        if counted is not None:
            facts.tokens = counted.count(facts.conversation, facts.dialect)
        return explained(rules, tiers, facts)

    if jsonl is not None:
        with _opened(jsonl) as stream:
            sys.exit(_explain_lines(stream, explain))
    if text is not None:
        try:
            raw = msgspec.json.encode({"messages": [{"role": "user", "content": text}]})
        except UnicodeEncodeError:
            raise click.UsageError("--text is not UTF-8") from None
    else:
        with _opened(str(file)) as stream:
            raw = stream.read()
    try:
        explanation = explain(raw)
    except RefusedError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(record(explanation, rules, prompts)), indent=2))
    else:
        for line in lines(explanation, rules, prompts):
            click.echo(line)


def _tokenizer(file: str | None, deployment: Config | None) -> tuple[Tokenizer | None, str]:
    """What counts prompts, and how they are measured in words."""
    from gateway.tokenizer import Tokenizer, TokenizerError, tokenizer_of

    found: Tokenizer | None
    if file is not None:
        found, prompts = Tokenizer(Path(file)), f"counted by {file}"
    else:
        found, prompts = (None, "estimated") if deployment is None else tokenizer_of(deployment)
    if found is None:
        return None, prompts
    try:
        found.load()
    except TokenizerError as error:
        if file is not None:
            raise click.ClickException(str(error)) from None
        return None, f"estimated: {error}"
    return found, prompts


def _opened(file: str) -> IO[Any]:
    try:
        return click.open_file(file, "rb")
    except OSError as error:
        raise click.ClickException(f"cannot read {file}: {error.strerror}") from None


def _explain_lines(raws: Iterable[bytes], explain: Callable[[bytes], Explanation]) -> int:
    """One record a line, in order; a line that cannot be explained has `error` instead. The exit status."""
    status = 0
    for number, raw in enumerate(raws, 1):
        if not raw.strip():
            continue
        found: dict[str, Any]
        try:
            explanation = explain(raw)
            decision = explanation.decision
            found = {
                "tier": decision.tier,
                "rule": decision.rule,
                "signals": signals(explanation),
                "reasons": decision.reasons,
            }
        except RefusedError as error:
            found, status = {"line": number, "error": str(error)}, 1
        click.echo(msgspec.json.encode(found))
    return status


# decisions that were made


def _last(log: Path, count: int) -> list[DecisionLine | FieldsLine]:
    """The last decisions of a log, oldest first, behind the lines of the fields that they name."""
    from gateway.telemetry.decision_files import backwards, logs

    files = logs(log)
    if not files:
        raise click.ClickException(f"there is no decision log {log}")
    fields: dict[str, FieldsLine] = {}
    decisions: list[DecisionLine] = []
    try:
        for one in files:
            decisions += _of_one(backwards(one), count, fields)
    except OSError as error:
        raise click.ClickException(f"cannot read {log}: {error.strerror}") from None
    if len(files) > 1:
        decisions.sort(key=lambda line: line.time, reverse=True)
    return [*fields.values(), *reversed(decisions[:count])]


def _of_one(lines: Iterable[bytes], count: int, fields: dict[str, FieldsLine]) -> list[DecisionLine]:
    """The last decisions of what one process wrote, the newest first; lines of fields are put to `fields`."""
    decisions: list[DecisionLine] = []
    wanted: set[str] = set()
    for raw in lines:
        if len(decisions) == count and wanted <= fields.keys():
            break
        if len(decisions) == count and not raw.startswith(_FIELDS):
            continue
        try:
            line = decode(raw)
        except ValueError:  # what is no line is passed over: `policy replay` tells of it
            continue
        if isinstance(line, FieldsLine):
            fields.setdefault(line.id, line)
        elif len(decisions) < count:
            decisions.append(line)
            wanted.add(line.fields)
    return decisions


def _show_made(made: list[DecisionLine | FieldsLine], policy: Policy, as_json: bool) -> None:
    reader = Reader(policy)
    found: list[dict[str, Any]] = []
    for number, line in enumerate(made):
        if isinstance(line, FieldsLine):
            reader.fields(line)
            continue
        explanation, lacking = reader.explain(line)
        if as_json:
            found.append({"made": line, **record(explanation, policy), "lacking": sorted(lacking)})
            continue
        if number and not isinstance(made[number - 1], FieldsLine):
            click.echo()
        for text in _made(line, explanation, lacking):
            click.echo(text)
        for text in lines(explanation, policy):
            click.echo(text)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
    elif not any(isinstance(line, DecisionLine) for line in made):
        click.echo("the log holds no decision")


def _made(line: DecisionLine, explanation: Explanation, lacking: set[str]) -> Iterator[str]:
    """What was done with a request, before how the policy decides it now."""
    when = datetime.fromtimestamp(line.time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    yield click.style(f"{when}  {line.id}  {line.tenant}  {line.dialect}  {line.model}", bold=True)
    where = f", answered by {line.engine} ({line.served})" if line.engine else ""
    why = f", {line.because}" if line.because else ""
    yield f"decided then: {line.tier}, by the rule `{line.rule}` of {line.policy}{where}{why}, {line.outcome}"
    decision = explanation.decision
    if (decision.tier, decision.rule) != (line.tier, line.rule):
        yield click.style("decided otherwise now:", fg="yellow")
    if lacking:
        yield click.style(f"not in the log, taken for not given: {', '.join(sorted(lacking))}", fg="yellow")
