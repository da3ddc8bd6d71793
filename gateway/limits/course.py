"""What the requests of one tenant, tier and model count in, worked out once: the same for every store.

All limits are kept as token buckets, which is GCRA in its form of a continuous-state leaky bucket (ITU-T
I.371, annex A): a bucket holds at most its limit, starts full and refills continuously; a settlement may
leave it in debt, which the refill pays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.errors import LimitExceeded, SlotsTaken
from gateway.limits import Ask, duration, spelled
from policies.plan import Plan
from policies.units import Rate

# A client that waits as long as it is told comes when the bucket holds what it needs, not a rounding below.
MARGIN = 1e-6
# When another request will end nobody knows.
SLOT_SECONDS = 1.0
UNBOUNDED = 1 << 40
KINDS = ("requests", "tokens")


@dataclass(frozen=True, slots=True)
class Meter:
    """One bucket, as a plan describes it. A reservation takes `each` of it, and `weight` for each token; in
    the settlement a cached prompt token counts `saved` less."""

    scope: int
    field: str
    kind: str
    rate: Rate
    each: float
    weight: float
    saved: float
    plan: str

    @property
    def words(self) -> str:
        return self.kind.replace("_", " ")


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose buckets they are, and how many requests it may have in flight; None is any number."""

    name: str
    concurrent: int | None
    plan: str


@dataclass(frozen=True, slots=True)
class Course:
    """`root` names what all scopes belong to: the organisation, else the tenant. `room` is half of the
    smallest limit, in tokens."""

    ask: Ask
    root: str
    scopes: tuple[Scope, ...]
    meters: tuple[Meter, ...]
    room: int
    lines: Lines = field(repr=False)

    def fits(self, ask: Ask) -> bool:
        """Whether it was worked out from the same plans."""
        return self.ask.plan is ask.plan and self.ask.shared is ask.shared

    def tokens(self, ask: Ask) -> int:
        """What a request reserves. One that names no bound reserves its plan's, and never so much that a
        whole limit is gone."""
        if ask.output is not None:
            return ask.prompt + ask.output
        return ask.prompt + min(ask.plan.output, max(1, self.room - ask.prompt))

    def slots_taken(self, scope: int, levels: Sequence[float]) -> SlotsTaken:
        """The refusal of a request for which `scope` has no place; `levels` are those of `meters`."""
        number, plan = self.scopes[scope].concurrent, self.scopes[scope].plan
        error = SlotsTaken(
            f"{number} requests are running, plan `{plan}` allows no more: wait for one to end",
            retry_after=SLOT_SECONDS,
        )
        error.scope = self.scopes[scope].name
        error.headers = self.lines.render(levels)
        return error

    def over_limit(self, tokens: int, levels: Sequence[float]) -> LimitExceeded | None:
        """The refusal of a request for which the buckets do not hold enough, None where they do.

        Waiting as long as it says is enough for every bucket.
        """
        worst: tuple[float, Meter, float, float] | None = None
        for meter, level in zip(self.meters, levels, strict=True):
            amount = meter.each + tokens * meter.weight
            if amount > meter.rate.amount:
                return self._too_large(meter, amount, levels)
            if level < amount:
                wait = (amount - level) / meter.rate.per_second + MARGIN
                if worst is None or wait > worst[0]:
                    worst = wait, meter, amount, level
        if worst is None:
            return None
        wait, meter, amount, level = worst
        error = LimitExceeded(
            f"{_allowed(meter)}: {math.ceil(amount)} needed, {max(0, math.floor(level))} left; "
            f"try again in {duration(wait)}",
            retry_after=wait,
        )
        return self._told(error, meter, levels)

    def _too_large(self, meter: Meter, amount: float, levels: Sequence[float]) -> LimitExceeded:
        error = LimitExceeded(
            f"this request reserves {math.ceil(amount)} {meter.words}, and {_allowed(meter)}: "
            "ask for fewer tokens (max_tokens)",
            code="request_exceeds_limit",
        )
        return self._told(error, meter, levels)

    def _told(self, error: LimitExceeded, meter: Meter, levels: Sequence[float]) -> LimitExceeded:
        error.limit = meter.kind
        error.headers = self.lines.render(levels)
        return error


def _allowed(meter: Meter) -> str:
    return f"plan `{meter.plan}` allows {meter.rate.amount} {meter.words} in {meter.rate.seconds:g} s"


def chart(ask: Ask) -> Course:
    """The course of a request's tenant, plans, tier and model."""
    scopes: list[Scope] = []
    meters: list[Meter] = []
    plan, shared = ask.plan, ask.shared
    holders: list[tuple[str, Plan]] = [(f"t:{ask.tenant}", plan)]
    if ask.model in plan.models:
        holders.append((f"t:{ask.tenant}/{ask.model}", plan.models[ask.model]))
    if ask.organisation:
        holders.append((f"o:{ask.organisation}", shared))
        if ask.model in shared.models:
            holders.append((f"o:{ask.organisation}/{ask.model}", shared.models[ask.model]))
    for index, (name, limits) in enumerate(holders):
        scopes.append(Scope(name, limits.concurrent, limits.name))
        meters += _meters(index, limits, shared if name.startswith("o:") else plan, ask.tier)
    room = min((m.rate.amount / 2 / m.weight for m in meters if m.weight), default=UNBOUNDED)
    root = f"o:{ask.organisation}" if ask.organisation else f"t:{ask.tenant}"
    return Course(ask, root, tuple(scopes), tuple(meters), int(room), Lines(meters))


def _meters(scope: int, limits: Plan, plan: Plan, tier: str) -> list[Meter]:
    """The buckets that `limits`, a plan or its limits of one model, has for a request of this tier."""
    kinds = (
        ("requests", limits.requests, 1.0, 0.0),
        ("tokens", limits.tokens, 0.0, plan.weights.get(tier, 1.0)),
        (f"{tier}_tokens", limits.tier_tokens.get(tier, ()), 0.0, 1.0),
    )
    return [
        Meter(
            scope=scope,
            field=f"{kind}.{i}" if i else kind,
            kind=kind,
            rate=rate,
            each=each,
            weight=weight,
            saved=weight * (1.0 - plan.cached),
            plan=limits.name,
        )
        for kind, rates, each, weight in kinds
        for i, rate in enumerate(rates)
    ]


class Lines:
    """The header lines of a course: of several limits of a kind, the one with the least left is shown."""

    __slots__ = ("_form", "_kinds", "_single")

    def __init__(self, meters: Sequence[Meter]) -> None:
        # Of each kind that has limits: the place of each in `meters`, its limit, and its refill in a second.
        self._kinds = [
            tuple((i, m.rate.amount, m.rate.per_second) for i, m in enumerate(meters) if m.kind == kind)
            for kind in KINDS
            if any(m.kind == kind for m in meters)
        ]
        self._form = b"".join(
            b"x-ratelimit-limit-%b: %%d\r\nx-ratelimit-remaining-%b: %%d\r\nx-ratelimit-reset-%b: %%b\r\n"
            % ((kind.encode(),) * 3)
            for kind in KINDS
            if any(m.kind == kind for m in meters)
        )
        self._single = all(len(kind) == 1 for kind in self._kinds)

    def render(self, levels: Sequence[float]) -> bytes:
        """Lines with limit, remaining and reset; `levels` are those of the course's meters."""
        values: tuple[int | bytes, ...] = ()
        for kind in self._kinds:
            index, amount, per_second = kind[0] if self._single else min(kind, key=lambda one: levels[one[0]])
            level = levels[index]
            reset = spelled(int((amount - level) / per_second * 1000 + 0.999))
            values += (amount, int(level) if level > 0 else 0, reset)
        return self._form % values
