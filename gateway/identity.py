"""Who is calling: keys to tenants. Fails closed: a key that is not found, revoked or expired is nobody.

A key is looked up by its SHA-256 digest: how long that takes depends on the digest, which nobody can steer,
not on the key. The same is then done for a good key, a revoked one, an expired one and one that is not there.
No digest is remembered from one request to the next: it costs less than a microsecond, and a table from keys
to digests would hold clients' keys in memory and be searched in a time that depends on them.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gateway.config import NAME, Part
from gateway.errors import InvalidKey
from gateway.files import read_text
from policies.document import Diagnostic, Document, ProblemsError, convert, load, unknown
from policies.document import Path as Where

ANONYMOUS = "anonymous"
DEFAULT_PLAN = "default"
_NO_DIGEST = b"\0" * 32
_EMPTY = hashlib.sha256(b"").digest()
DIGEST_BYTES = 32


class Tenant(msgspec.Struct, frozen=True):
    """`tiers` and `models` are what it may use, None: all. `expires` is a Unix time, infinite where there is
    none. `shared` is the plan of its organisation, if it is in one."""

    name: str
    plan: str = DEFAULT_PLAN
    tags: frozenset[str] = frozenset()
    tiers: frozenset[str] | None = None
    models: frozenset[str] | None = None
    expires: float = math.inf
    disabled: bool = False
    organisation: str = ""
    shared: str = DEFAULT_PLAN

    def may_use(self, tier: str) -> bool:
        return self.tiers is None or tier in self.tiers

    def may_ask(self, *names: str) -> bool:
        """Whether it may have a model that goes by any of these names."""
        return self.models is None or not self.models.isdisjoint(names)


_NOT_FOUND = (_NO_DIGEST, Tenant("", disabled=True))


class _Previous(Part, frozen=True):
    """A key that was replaced, and until when it is still accepted."""

    sha256: str
    until: str


class _Key(Part, frozen=True):
    name: str
    sha256: str | None = None
    key: str | None = None
    plan: str = DEFAULT_PLAN
    tags: list[str] = msgspec.field(default_factory=list)
    tiers: list[str] | None = None
    models: list[str] | None = None
    expires: str | None = None
    disabled: bool = False
    organisation: str | None = None
    previous: _Previous | None = None


class _Organisation(Part, frozen=True):
    name: str
    plan: str


class _File(Part, frozen=True):
    keys: list[_Key]
    organisations: list[_Organisation] = msgspec.field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Known:
    """What a key may name. A plan that is not there would be one without limits: only `default`, which is
    every key's that names none, may be missing. A model may be another deployment's with the same keys."""

    tiers: Collection[str]
    plans: Collection[str]
    models: Collection[str]

    def problems(self, document: Document, at: Where, key: _Key) -> Iterator[Diagnostic]:
        """What is named in the key at `at` and not known."""
        if key.plan not in self.plans and key.plan != DEFAULT_PLAN:
            yield document.problem((*at, "plan"), unknown("plan", key.plan, self.plans))
        for position, tier in enumerate(key.tiers or ()):
            if tier not in self.tiers:
                yield document.problem((*at, "tiers", position), unknown("tier", tier, self.tiers))
        for position, model in enumerate(key.models or ()):
            if model not in self.models:
                message = unknown("model", model, self.models)
                yield document.problem((*at, "models", position), message, severity="warning")


class Keyring:
    """An immutable snapshot of a key file; `None` as the table means that no key is asked."""

    def __init__(self, tenants: Mapping[bytes, Tenant] | None, warnings: tuple[Diagnostic, ...] = ()) -> None:
        self._tenants = tenants
        self._found = {digest: (digest, tenant) for digest, tenant in (tenants or {}).items()}
        self.warnings = warnings
        self._anonymous = Tenant(ANONYMOUS)

    @property
    def tenants(self) -> tuple[Tenant, ...]:
        """One for each key: a tenant whose key was just replaced is there twice."""
        return (self._anonymous,) if self._tenants is None else tuple(self._tenants.values())

    def find(self, key: bytes) -> Tenant | None:
        """Whose key it is, valid or not."""
        return (self._tenants or {}).get(hashlib.sha256(key).digest())

    def authenticate(self, presented: bytes | None, now: float) -> Tenant:
        """The tenant of a presented key. Raises InvalidKey, with one text for every reason."""
        if self._tenants is None:
            return self._anonymous
        digest = hashlib.sha256(presented or b"").digest()
        known, tenant = self._found.get(digest, _NOT_FOUND)
        # No `and`: each question is asked, whatever the answer to the one before.
        if not hmac.compare_digest(digest, known) & (not tenant.disabled) & (now < tenant.expires):
            raise InvalidKey(
                "the API key is missing, unknown or no longer valid: send it as `Authorization: Bearer …`"
            )
        return tenant


def presented_key(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The key of `Authorization: Bearer`, else of `x-api-key`."""
    given = headers.get(b"authorization")
    if given is not None:
        scheme, _, key = given.partition(b" ")
        return key.strip() if scheme.lower() == b"bearer" else b""
    given = headers.get(b"x-api-key")
    return None if given is None else given.strip()


def read_keys(path: Path | None, known: Known, *, loopback: bool) -> Keyring:
    """Load a key file. Raises ProblemsError."""
    if path is None:
        return Keyring(None)
    return parse_keys(read_text(path), str(path), known, loopback=loopback)


def parse_keys(text: str, file: str, known: Known, *, loopback: bool) -> Keyring:
    """A keyring from the text of a key file. Raises ProblemsError."""
    document = load(text, file)
    problems: list[Diagnostic] = []
    tenants: dict[bytes, Tenant] = {}
    names: set[str] = set()
    parsed: _File = convert(document, _File)
    organisations = {one.name: one.plan for one in parsed.organisations}
    for index, one in enumerate(parsed.organisations):
        here: Where = ("organisations", index)
        if not NAME.fullmatch(one.name):
            problems.append(
                document.problem((*here, "name"), "use letters, digits, dots, dashes; 63 at most")
            )
        if one.name in [other.name for other in parsed.organisations[:index]]:
            message = f"`{one.name}` is another organisation's name already"
            problems.append(document.problem((*here, "name"), message))
        if one.plan not in known.plans:
            problems.append(document.problem((*here, "plan"), unknown("plan", one.plan, known.plans)))
    for index, key in enumerate(parsed.keys):
        at = ("keys", index)
        if not NAME.fullmatch(key.name):
            problems.append(document.problem((*at, "name"), "use letters, digits, dots, dashes; 63 at most"))
        if key.name in names:
            problems.append(document.problem((*at, "name"), f"`{key.name}` is another key's name already"))
        names.add(key.name)
        problems.extend(known.problems(document, at, key))
        organisation = key.organisation or ""
        if key.organisation is not None and organisation not in organisations:
            message = unknown("organisation", organisation, organisations)
            problems.append(document.problem((*at, "organisation"), message))
        digests: list[tuple[bytes, float]] = []
        try:
            expires = math.inf if key.expires is None else moment(key.expires)
            digests.append((_digest(key), expires))
            if key.previous is not None:
                until = min(expires, moment(key.previous.until))
                digests.append((_sha256(key.previous.sha256), until))
        except ValueError as exc:
            problems.append(document.problem(at, str(exc)))
        if key.key is not None and not loopback:
            message = f"the key `{key.name}` stands here in plain text: write its sha256 instead"
            problems.append(document.problem((*at, "key"), message, severity="warning"))
        for digest, until in digests:
            if digest in tenants:
                problems.append(document.problem(at, "the same key twice"))
            tenants[digest] = Tenant(
                name=key.name,
                plan=key.plan,
                tags=frozenset(key.tags),
                tiers=None if key.tiers is None else frozenset(key.tiers),
                models=None if key.models is None else frozenset(key.models),
                expires=until,
                disabled=key.disabled,
                organisation=organisation,
                shared=organisations.get(organisation, DEFAULT_PLAN),
            )
    if any(p.severity == "error" for p in problems):
        raise ProblemsError(problems)
    return Keyring(tenants, tuple(problems))


def _digest(key: _Key) -> bytes:
    if (key.sha256 is None) == (key.key is None):
        raise ValueError("give either `sha256` or `key`")
    if key.key is not None:
        if not key.key.strip():
            raise ValueError("`key` is empty")
        return hashlib.sha256(key.key.strip().encode()).digest()
    assert key.sha256 is not None
    return _sha256(key.sha256)


def _sha256(text: str) -> bytes:
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if digest == _EMPTY:
        raise ValueError("`sha256` is that of an empty key")
    if len(digest) != DIGEST_BYTES:
        raise ValueError("`sha256` is 64 hexadecimal digits: printf %s KEY | sha256sum")
    return digest


def moment(text: str) -> float:
    """The Unix time of a date, with a time of day or without; in UTC by default. Raises ValueError."""
    try:
        parsed = dt.datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"`{text}` is not a date: write 2027-01-01 or 2027-01-01T12:00:00+00:00") from None
    if parsed.tzinfo is None:
        parsed = parsed.replace(tzinfo=dt.UTC)
    return parsed.timestamp()
