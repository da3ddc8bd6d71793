"""Leases: what a request may use is reserved before an engine is asked, and settled once when it ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from policies.plan import Plan


@dataclass(frozen=True, slots=True)
class Ask:
    """What one request wants: `prompt` and `output` in tokens, `output` None where it named no bound."""

    tenant: str
    plan: Plan
    tier: str
    prompt: int
    output: int | None


class Lease(Protocol):
    """A reservation. `settle` counts once, whoever calls it first; later calls change nothing."""

    @property
    def headers(self) -> bytes:
        """Header lines `x-ratelimit-*` after this request's own reservation, each with its CRLF."""

    def settle(self, prompt: int, completion: int) -> None:
        """Give back what was not used, charge what was used beyond the reservation. Tokens."""

    def refund(self) -> None:
        """Give everything back but the request itself: no engine answered it."""


class Store(Protocol):
    async def reserve(self, ask: Ask, now: float) -> Lease:
        """All dimensions at once or none. `now` in seconds. Raises LimitExceeded."""

    def in_use(self) -> int:
        """Leases that are not settled."""

    def up(self) -> bool:
        """Whether leases are kept where they belong."""

    def fallbacks(self) -> int:
        """How many reservations were made elsewhere, by `on_store_failure`, since the start."""

    def usage(self, now: float) -> Mapping[str, Mapping[str, float]]:
        """What each tenant has left, by dimension."""


def duration(seconds: float) -> str:
    """OpenAI's spelling: `0s`, `250ms`, `6.5s`, `1m30s`, `2h0m5s`."""
    if seconds <= 0:
        return "0s"
    seconds = max(0.001, round(seconds, 3))
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    tail = f"{rest:.3f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{tail}"
    return f"{minutes}m{tail}" if minutes else tail
