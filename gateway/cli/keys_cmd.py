"""`dualgauge keys …`: who may ask, and what for."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from gateway import keyformat
from gateway.cli import keyfile
from gateway.cli.failures import Failure, told
from gateway.cli.options import F, config_option
from gateway.config import NAME
from gateway.config import read as read_config
from gateway.identity import DEFAULT_PLAN, Keyring, Known, Tenant, moment, parse_keys
from policies import units

FINGERPRINT = 12
OVERLAP = "24h"


class _Anything(tuple[str, ...]):
    """Knows every name: where no deployment says which there are."""

    def __contains__(self, name: object) -> bool:
        return True


def _common(command: F) -> F:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option(
            "--file", type=click.Path(path_type=Path, dir_okay=False), help="The key file, instead."
        ),
        config_option("config", "The deployment; its `keys` is the file."),
    ):
        command = option(command)
    return command


class _Keys:
    """A key file, and what its deployment knows."""

    def __init__(self, config: Path, file: Path | None) -> None:
        """Raises Failure, ProblemsError, OSError."""
        known = Known(_Anything(), _Anything(), _Anything())
        if config.is_file():
            deployment = read_config(config)
            if file is None and deployment.keys is None:
                raise Failure(f"{config} names no key file: add `keys: keys.yaml` to it, or use --file")
            if file is None or (deployment.keys is not None and file.resolve() == deployment.keys.resolve()):
                from gateway.runtime import model_names
                from gateway.snapshots import read_policy

                policy = read_policy(deployment.policy, deployment, str(config))
                known = Known(deployment.tiers, tuple(policy.plans), tuple(model_names(deployment)))
            file = file or deployment.keys
        if file is None:
            raise Failure(f"there is no {config}: name the key file with --file")
        self.path = file.resolve()
        self.shown = str(file)
        self._known = known

    def text(self) -> str:
        try:
            return self.path.read_text("utf-8")
        except FileNotFoundError:
            return ""
        except UnicodeDecodeError:
            raise Failure(f"{self.shown} is not UTF-8: save it as UTF-8") from None

    def ring(self, text: str) -> Keyring:
        """Raises ProblemsError where a gateway would refuse the file."""
        return parse_keys(text, self.shown, self._known, loopback=True)

    def entry(self, text: str, name: str) -> dict[str, Any]:
        found = next((key for key in keyfile.entries(text, self.shown) if key.get("name") == name), None)
        if found is None:
            names = ", ".join(str(key.get("name")) for key in keyfile.entries(text, self.shown))
            raise Failure(f"there is no key `{name}` in {self.shown}; there is: {names or 'none'}")
        return found

    def save(self, text: str) -> None:
        self.ring(text)
        keyfile.write(self.path, text)


@click.group("keys")
def keys_group() -> None:
    """Make, list, revoke and rotate the keys of applications.

    A key is shown once, when it is made; the file holds its SHA-256. A gateway that runs reads a changed file
    within two seconds. Everything else in the file, comments too, stays as it is.

    Exit codes: 0 done, 1 refused or failed, 2 wrong usage.
    """


@keys_group.command("create")
@click.argument("name")
@click.option("--plan", help=f"A plan of the policy. [default: {DEFAULT_PLAN}]")
@click.option("--tag", "tags", multiple=True, help="For `tenant_tag` in policies; may be given again.")
@click.option(
    "--tier", "tiers", multiple=True, help="A tier that it may use; may be given again. [default: all]"
)
@click.option(
    "--model", "models", multiple=True, help="A model that it may ask for, likewise. [default: all]"
)
@click.option("--organisation", help="An organisation of the file, whose plan holds too.")
@click.option("--expires", help="2027-01-01, 2027-01-01T12:00:00+00:00, or from now on: 90d, 12h.")
@_common
def create_command(
    name: str,
    plan: str | None,
    tags: tuple[str, ...],
    tiers: tuple[str, ...],
    models: tuple[str, ...],
    organisation: str | None,
    expires: str | None,
    config: Path,
    file: Path | None,
    as_json: bool,
) -> None:
    """Make a key, and print it once.

    NAME is public: it is in metrics, traces and logs.

    \b
    Examples:
      dualgauge keys create ci
      dualgauge keys create trial-42 --plan trial --tier fast --expires 30d
      OPENAI_API_KEY=$(dualgauge keys create notebook)
    """
    if not NAME.fullmatch(name):
        raise click.BadParameter("use letters, digits, dots, dashes; 63 at most", param_hint="NAME")
    key = keyformat.new_key()
    entry: dict[str, keyfile.Value] = {"name": name, "sha256": _sha256(key)}
    given: dict[str, Any] = {
        "plan": plan,
        "tags": list(tags),
        "tiers": list(tiers),
        "models": list(models),
        "organisation": organisation,
        "expires": _date(expires) if expires is not None else None,
    }
    entry |= {field: value for field, value in given.items() if value}
    with told():
        keys = _Keys(config, file)
        with keyfile.locked(keys.path):
            text = keys.text()
            if any(key.get("name") == name for key in keyfile.entries(text, keys.shown)):
                raise Failure(f"`{name}` is a key in {keys.shown} already: rotate it, or choose another name")
            keys.save(keyfile.with_key(text, entry, keys.shown))
    _show_key(key, {"file": keys.shown, **entry}, as_json)


@keys_group.command("list")
@_common
def list_command(config: Path, file: Path | None, as_json: bool) -> None:
    """Show the keys: never the keys themselves, but the first digits of their SHA-256.

    \b
    Examples:
      dualgauge keys list
      dualgauge keys list --json
    """
    now = time.time()
    with told():
        keys = _Keys(config, file)
        text = keys.text()
        ring = keys.ring(text) if text.strip() else Keyring({})
        current = {tenant.name: tenant for tenant in reversed(ring.tenants)}
        listed = [_described(key, current[key["name"]], now) for key in keyfile.entries(text, keys.shown)]
    if as_json:
        click.echo(json.dumps(listed, indent=2))
        return
    if not listed:
        click.echo(f"no keys in {keys.shown}: `dualgauge keys create NAME` makes one", err=True)
        return
    for line in _table(listed):
        click.echo(line)


@keys_group.command("revoke")
@click.argument("name")
@_common
def revoke_command(name: str, config: Path, file: Path | None, as_json: bool) -> None:
    """End a key, and one that it replaced. Its entry stays, as `disabled`, so that its name stays taken.

    \b
    Example:
      dualgauge keys revoke ci
    """
    with told():
        keys = _Keys(config, file)
        with keyfile.locked(keys.path):
            text = keys.text()
            entry = keys.entry(text, name)
            before = entry.get("disabled") is True
            if not before:
                fields: dict[str, keyfile.Value | None] = {"disabled": True, "previous": None}
                keys.save(keyfile.with_fields(text, name, fields, keys.shown))
    if as_json:
        click.echo(json.dumps({"name": name, "file": keys.shown, "revoked": True, "was_revoked": before}))
    else:
        click.echo(f"{name} {'was revoked already' if before else 'is revoked'} in {keys.shown}")


@keys_group.command("rotate")
@click.argument("name")
@click.option("--overlap", default=OVERLAP, show_default=True, help="How long the old key is still accepted.")
@click.option("--expires", help="When the new key ends, as for `create`. [default: as the old one]")
@_common
def rotate_command(
    name: str, overlap: str, expires: str | None, config: Path, file: Path | None, as_json: bool
) -> None:
    """Replace a key by a new one, and print it once. Name, plan, limits and all else stay.

    The old key is accepted for a while longer, so that applications can change over; the one before that ends
    at once. A key that was revoked or has expired is not brought back: create another.

    \b
    Examples:
      dualgauge keys rotate ci
      dualgauge keys rotate ci --overlap 7d --expires 90d
      dualgauge keys rotate leaked --overlap 0s
    """
    now = time.time()
    try:
        seconds = units.duration(overlap)
    except ValueError as exc:
        raise click.BadParameter(str(exc), param_hint="--overlap") from None
    end = _date(expires) if expires is not None else None
    key = keyformat.new_key()
    with told():
        keys = _Keys(config, file)
        with keyfile.locked(keys.path):
            text = keys.text()
            entry = keys.entry(text, name)
            current = next(tenant for tenant in keys.ring(text).tenants if tenant.name == name)
            if current.disabled or current.expires <= now:
                raise Failure(f"`{name}` is {_state(current, now)}: create another key")
            old = entry.get("sha256") or _sha256(str(entry["key"]).strip())
            fields: dict[str, keyfile.Value | None] = {"sha256": _sha256(key), "key": None, "previous": None}
            if seconds > 0:
                fields["previous"] = {"sha256": old, "until": _iso(now + seconds)}
            if end is not None:
                fields["expires"] = end
            keys.save(keyfile.with_fields(text, name, fields, keys.shown))
    shown = {field: value for field, value in fields.items() if value is not None}
    _show_key(key, {"file": keys.shown, "name": name, **shown}, as_json)
    if not as_json:
        ends = f"until {_iso(now + seconds)}" if seconds > 0 else "no longer"
        click.echo(f"The old key is accepted {ends}.", err=True)


@keys_group.command("check")
@_common
def check_command(config: Path, file: Path | None, as_json: bool) -> None:
    """Say what a key is, without asking a gateway; exit code 1 where it would not be accepted.

    The key is read from standard input, since arguments can be seen by others.

    \b
    Example:
      printf %s "$OPENAI_API_KEY" | dualgauge keys check
    """
    now = time.time()
    key = sys.stdin.readline().strip()
    with told():
        keys = _Keys(config, file)
        text = keys.text()
        ring = keys.ring(text) if text.strip() else Keyring({})
    tenant = ring.find(key.encode()) if key else None
    state = "unknown" if tenant is None else _state(tenant, now)
    form = _form(key)
    if as_json:
        click.echo(json.dumps({"state": state, "name": tenant.name if tenant else None, "form": form}))
    elif tenant is None:
        click.echo(f"no key of {keys.shown}; {form}")
    else:
        click.echo(f"{tenant.name}: {state}")
    if state != "valid":
        sys.exit(1)


def _form(key: str) -> str:
    if keyformat.well_formed(key):
        return "it has the form of a key of Dualgauge's"
    if key.startswith(keyformat.PREFIX):
        return "it begins as a key of Dualgauge's, and has a typo or is cut"
    return "it has not the form of a key of Dualgauge's"


def _sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _iso(seconds: float) -> str:
    return dt.datetime.fromtimestamp(round(seconds), dt.UTC).isoformat()


def _date(text: str) -> str:
    """A date as the key file has it. Raises click.BadParameter."""
    try:
        if text[-1:].isalpha() and text[:1].isdigit() and "T" not in text:
            return _iso(time.time() + units.duration(text))
        end = moment(text)
    except ValueError as exc:
        raise click.BadParameter(f"{exc}; or 90d", param_hint="--expires") from None
    if end <= time.time():
        raise click.BadParameter(f"{text} is over already", param_hint="--expires")
    return text


def _state(tenant: Tenant, now: float) -> str:
    return "revoked" if tenant.disabled else "expired" if tenant.expires <= now else "valid"


def _described(key: dict[str, Any], tenant: Tenant, now: float) -> dict[str, Any]:
    digest = key.get("sha256") or _sha256(str(key["key"]).strip())
    previous = key.get("previous")
    until = None if previous is None else str(previous["until"])
    if until is not None and (moment(until) <= now or _state(tenant, now) != "valid"):
        until = None
    return {
        "name": tenant.name,
        "state": _state(tenant, now),
        "plan": tenant.plan,
        "tags": sorted(tenant.tags),
        "tiers": None if tenant.tiers is None else sorted(tenant.tiers),
        "models": None if tenant.models is None else sorted(tenant.models),
        "organisation": tenant.organisation or None,
        "expires": None if math.isinf(tenant.expires) else _iso(tenant.expires),
        "previous_until": until,
        "sha256": digest[:FINGERPRINT].lower(),
    }


def _table(listed: list[dict[str, Any]]) -> Iterator[str]:
    columns = ("name", "state", "plan", "tiers", "models", "tags", "organisation", "expires", "sha256")
    empty = {"tiers": "all", "models": "all", "expires": "never"}
    rows: list[tuple[str, ...]] = [columns]
    for key in listed:
        shown = {**key}
        if key["previous_until"] is not None:
            shown["state"] += f", the old one until {key['previous_until']}"
        rows.append(
            tuple(
                ", ".join(value) or "none"
                if isinstance(value, list)
                else str(value or empty.get(column, "-"))
                for column, value in ((column, shown[column]) for column in columns)
            )
        )
    widths = [max(len(row[index]) for row in rows) for index in range(len(columns))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _show_key(key: str, told_of: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"key": key, **told_of}))
        return
    click.echo(key)
    click.echo(
        f"This is `{told_of['name']}`'s key: it is shown once, {told_of['file']} holds its SHA-256.", err=True
    )
