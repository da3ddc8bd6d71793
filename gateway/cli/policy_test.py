"""`dualgauge policy test`: requests and what a policy is expected to decide for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import msgspec

from gateway.asked import DIALECTS, Caller, RefusedError, explained, facts_of
from gateway.cli.chosen import compiled, deployed, tiers_of, tiers_option
from policies.decision import Decision
from policies.document import Diagnostic, Document, ProblemsError, convert, decode, load, unknown
from policies.policy import Policy
from policies.shipped import SHIPPED, beside, shipped_cases

MAX_TEXT = 10_000_000


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Expected(_Strict, frozen=True):
    """What must be decided; what is left out may be anything. Each of `reasons` is a part of one given."""

    tier: str | None = None
    rule: str | None = None
    reasons: list[str] | None = None


class Case(_Strict, frozen=True):
    """`request` is a body as applications send it, `text` stands for one with one user message of it, written
    `times` times."""

    name: str
    expect: Expected
    request: dict[str, Any] | None = None
    text: str | None = None
    times: int = 1
    dialect: str | None = None
    headers: dict[str, str] = {}
    tenant: str = "anonymous"
    tags: list[str] = []
    time: str | None = None


class Cases(_Strict, frozen=True):
    """`policy` is a shipped name, or a path beside the file."""

    policy: str
    cases: list[Case]


@click.command("test")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--policy", metavar="POLICY", help="A path or a shipped name, instead of the file's own.")
@tiers_option
def cases_command(files: tuple[str, ...], policy: str | None, tiers: tuple[str, ...] | None) -> None:
    """Decide the cases of FILE and compare; exit 1 where one is decided otherwise, as file:line:column.

    FILE is a path, or a shipped policy (default, strict, thrifty) for the cases that come with it.

    \b
    Examples:
      dualgauge policy test policy.test.yaml
      dualgauge policy test default strict thrifty
    """
    chosen = tiers or tiers_of(deployed())
    count, failed = 0, 0
    for file in files:
        document, cases = _read(file)
        rules = compiled(policy or beside(cases.policy, document.file), chosen)
        for index, case in enumerate(cases.cases):
            wrong = list(_differences(document, index, case, rules, chosen))
            for line in wrong:
                click.echo(str(line), err=True)
            count, failed = count + 1, failed + bool(wrong)
    told = f"{count} case{'s' if count != 1 else ''}"
    click.echo(f"{told}, {failed} failed" if failed else f"{told}, all as expected")
    if failed:
        sys.exit(1)


def _read(file: str) -> tuple[Document, Cases]:
    """The cases of a file; ends the program with everything that is wrong with it."""
    try:
        text, name = shipped_cases(file) if file in SHIPPED else (decode(Path(file).read_bytes(), file), file)
        document = load(text, name)
        if not isinstance(document.value, dict):
            message = "a file of cases is a mapping with the keys `policy` and `cases`"
            raise ProblemsError([document.problem((), message)])
        cases: Cases = convert(document, Cases)
        problems = list(_problems(document, cases))
        if problems:
            raise ProblemsError(problems)
    except OSError as error:
        raise click.ClickException(f"cannot read {file}: {error.strerror}") from None
    except ProblemsError as error:
        click.echo(str(error), err=True)
        sys.exit(1)
    return document, cases


def _problems(document: Document, cases: Cases) -> Iterator[Diagnostic]:
    if not cases.cases:
        yield document.problem(("cases",), "no case: write at least one")
    seen: set[str] = set()
    for index, case in enumerate(cases.cases):
        at = ("cases", index)
        if case.name in seen:
            yield document.problem((*at, "name"), f"another case is called `{case.name}` already")
        seen.add(case.name)
        if (case.request is None) == (case.text is None):
            yield document.problem(at, "a case has either a `request` or a `text`")
        if case.times < 1 or case.times * len(case.text or "") > MAX_TEXT:
            yield document.problem((*at, "times"), f"1 or more, and {MAX_TEXT} characters in all at most")
        if case.dialect is not None and case.dialect not in DIALECTS:
            yield document.problem((*at, "dialect"), unknown("dialect", case.dialect, DIALECTS))
        if case.expect == Expected():
            yield document.problem((*at, "expect"), "expect a `tier`, a `rule` or `reasons`")
        if case.time is not None and _time(case.time) is None:
            yield document.problem((*at, "time"), "write a time with its zone: 2026-11-30T09:00:00+01:00")


def _time(text: str) -> float | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return None if moment.tzinfo is None else moment.timestamp()


def _differences(
    document: Document, index: int, case: Case, policy: Policy, tiers: tuple[str, ...]
) -> Iterator[Diagnostic]:
    at, expect = ("cases", index), case.expect
    body = case.request
    if body is None:
        body = {"messages": [{"role": "user", "content": (case.text or "") * case.times}]}
    caller = Caller(
        headers={name.lower(): value for name, value in case.headers.items()},
        tenant=case.tenant,
        tags=frozenset(case.tags),
        dialect=case.dialect,
        time=None if case.time is None else _time(case.time),
    )
    try:
        decision = explained(policy, tiers, facts_of(body, caller)).decision
    except RefusedError as error:
        where = "text" if case.request is None else "request"
        yield document.problem((*at, where), f"{case.name}: the gateway refuses it: {error}")
        return
    if expect.tier is not None and expect.tier != decision.tier:
        yield _difference(document, (*at, "expect", "tier"), case, f"tier `{expect.tier}`", decision)
    if expect.rule is not None and expect.rule != decision.rule:
        yield _difference(document, (*at, "expect", "rule"), case, f"rule `{expect.rule}`", decision)
    for number, reason in enumerate(expect.reasons or ()):
        if not any(reason in one for one in decision.reasons):
            place = (*at, "expect", "reasons", number)
            yield _difference(document, place, case, f"a reason with `{reason}`", decision)


def _difference(
    document: Document, at: tuple[str | int, ...], case: Case, wanted: str, decision: Decision
) -> Diagnostic:
    why = "; ".join(decision.reasons)
    decided = f"decided is tier `{decision.tier}` by rule `{decision.rule}` ({why})"
    return document.problem(at, f"{case.name}: expected {wanted}, {decided}")
