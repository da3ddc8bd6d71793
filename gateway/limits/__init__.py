"""Leases: what a request may use is reserved before an engine is asked, and settled once when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from policies.plan import Plan

if TYPE_CHECKING:
    from gateway.limits.course import Scope

NO_PLAN = Plan("unlimited")


class Ask(msgspec.Struct, frozen=True, gc=False):
    """What one request wants: `prompt` and `output` in tokens, `output` None where it named no bound. `model`
    is the name that it asked for; `shared` is the plan of the tenant's `organisation`, if it is in one."""

    tenant: str
    plan: Plan
    tier: str
    model: str
    prompt: int
    output: int | None
    organisation: str = ""
    shared: Plan = NO_PLAN


class Lease(Protocol):
    """A reservation. It ends once, by whichever of `settle` and `refund` is called first; later calls change
    nothing."""

    @property
    def headers(self) -> bytes:
        """Header lines `x-ratelimit-*` after this request's own reservation, each with its CRLF."""

    def settle(self, prompt: int, completion: int, cached: int = 0, tier: str = "") -> None:
        """Give back what was not used, charge what was used beyond the reservation. Tokens; `cached` is the
        part of `prompt` that came from the prefix cache, `tier` the one that answered, where not the one that
        was asked for."""

    def refund(self) -> None:
        """Give everything back but the request itself: no engine answered it."""


class Held(NamedTuple):
    """Buckets to be looked at: the `root` and the name of their scope (see `course.Course`), and their
    fields: `requests`, `tokens`, `exact_tokens`; of several limits of a kind also `requests.1` and so on."""

    root: str
    name: str
    fields: tuple[str, ...]


Reserved = Lease | asyncio.Future[Lease]
Ended = Callable[["tuple[Scope, ...]"], None]


class Store(Protocol):
    """Where leases are kept."""

    def reserve(self, ask: Ask) -> Reserved:
        """All dimensions at once or none: a lease, or where the store is not in this process, the promise of
        one (see `claim`). Raises LimitExceeded, LimitsUnavailable; the promise too."""

    async def levels(self, holders: Sequence[Held]) -> Mapping[str, Mapping[str, float]]:
        """What these have left of the buckets that are named, and how many requests of theirs run
        (`concurrent`), by the holders' names. A bucket that is not told is full; a holder that is not told
        is not known, because the store does not answer."""

    def in_use(self) -> int:
        """Leases that are not settled."""

    def up(self) -> bool:
        """Whether leases are kept where they belong."""

    def fallbacks(self) -> int:
        """How many reservations were made elsewhere, by `on_store_failure`, since the start."""

    def last_seen(self, ask: Ask) -> bytes:
        """Header lines `x-ratelimit-*` for a request that reserves nothing, as far as this process knows
        what is left."""

    def on_end(self, hook: Ended) -> None:
        """`hook` is told of each lease that ends: the scopes of its course."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """The store's own work beside requests; ends with nothing left open."""


async def claim(promise: asyncio.Future[Lease]) -> Lease:
    """The lease of a promise. Where the caller is cancelled meanwhile, a lease that came all the same is
    given back."""
    try:
        return await promise
    except asyncio.CancelledError:
        if promise.done() and not promise.cancelled() and promise.exception() is None:
            promise.result().refund()
        raise


def duration(seconds: float) -> str:
    """OpenAI's spelling: `0s`, `250ms`, `6.5s`, `1m30s`, `2h0m5s`."""
    return spelled(round(seconds * 1000) or int(seconds > 0)).decode()


@lru_cache(4096)
def spelled(ms: int) -> bytes:
    """A duration of so many milliseconds in OpenAI's spelling."""
    if ms <= 0:
        return b"0s"
    if ms < 1000:
        return b"%dms" % ms
    if ms < 60_000:
        return b"%gs" % (ms / 1000)
    minutes, ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    return b"%dh%dm%gs" % (hours, minutes, ms / 1000) if hours else b"%dm%gs" % (minutes, ms / 1000)
