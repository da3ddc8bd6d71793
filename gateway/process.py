"""One gateway process, as the admin port shows it: alone, or as a worker among others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import msgspec

from gateway.asked import RefusedError
from gateway.console import asking
from gateway.console.live import Live, decision_row, encode, state
from gateway.runtime import Gateway, Stored
from gateway.site import SiteError
from gateway.snapshots import reload
from gateway.surface import ready_reply, status_body
from gateway.telemetry.series import Families, families

MAX_REASON = 200


class Leaving(Protocol):
    """The public port's server, as far as an end needs it."""

    def retire(self) -> None:
        """Take no new connections; those that are there go on until they end."""


class Process:
    """`restarts` is how a process that is alone has another one take its place."""

    def __init__(
        self,
        gateway: Gateway,
        public: Leaving | None = None,
        restarts: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self.gateway = gateway
        self._public = public
        self._restarts = restarts
        self._live = Live(f"{gateway.rand.getrandbits(64):016x}", gateway.clock, gateway.history)

    # what the admin port asks

    async def ready(self) -> tuple[int, bytes]:
        return ready_reply(self.gateway)

    async def scrape(self, accept: str) -> tuple[bytes, str]:
        self.gateway.ended.tell()
        # Beside the event loop: many series take milliseconds to write down.
        return await asyncio.to_thread(self.gateway.metrics.scrape, accept)

    async def status(self) -> dict[str, object]:
        return status_body(self.gateway)

    async def reload(self) -> dict[str, object]:
        gateway = self.gateway
        problem = reload(gateway)
        if problem is not None:
            raise SiteError(400, problem)
        snapshot, candidate = gateway.snapshot, gateway.snapshot.candidate
        return {
            "policy": snapshot.policy.hash,
            "candidate": None if candidate is None else candidate.policy.hash,
            "restart_needed": gateway.restart_needed,
        }

    async def restart(self) -> object:
        if self._restarts is None:
            raise SiteError(409, "this gateway cannot start another one in its place")
        return await self._restarts()

    async def hold(self, engine: str, reason: str) -> dict[str, object]:
        found = self.gateway.fleet.by_name.get(engine)
        if found is None:
            raise SiteError(404, f"there is no engine `{engine[:64]}`")
        self.gateway.fleet.hold(found, reason[:MAX_REASON])
        return {"engine": engine, "held": found.held, "in_flight": found.in_flight}

    async def demand(self) -> dict[str, object]:
        return {"tiers": {tier: _asked_of(self.gateway, tier) for tier in self.gateway.fleet.tiers}}

    async def live(self, cursor: str) -> bytes:
        gateway, live = self.gateway, self._live
        if live.due():
            gateway.ended.tell()
            seen = {one.record.request_id: one for one in gateway.recent.look(gateway.clock())}

            def row(name: str) -> tuple[bytes, bool]:
                return encode(decision_row(seen[name])), seen[name].record.ended > 0

            live.show(encode(state(gateway)), seen, row)
        return live.body(cursor)

    async def decision(self, request_id: str) -> dict[str, Any]:
        seen = self.gateway.recent.find(request_id)
        if seen is None:
            raise SiteError(404, "this decision is not kept any more")
        return asking.why(seen)

    async def policy(self) -> dict[str, Any]:
        return await asyncio.to_thread(asking.policy, self.gateway)

    async def tenants(self, totals: Mapping[str, tuple[float, float]] | None = None) -> dict[str, Any]:
        """`totals`: requests and tokens of each, where others have served them too."""
        self.gateway.ended.tell()
        return await asking.tenants(self.gateway, totals)

    async def explain(self, pasted: bytes | str) -> dict[str, Any]:
        try:
            return await asking.explain(self.gateway, msgspec.json.decode(pasted, type=asking.Pasted))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise SiteError(400, f'send {{"body": {{…}}, "headers": {{…}}}}: {error}') from None
        except RefusedError as error:
            raise SiteError(400, str(error)) from None

    # what the parent of several asks besides

    async def metrics(self) -> Families:
        self.gateway.ended.tell()
        return await asyncio.to_thread(families, self.gateway.metrics.registry)

    async def missing(self) -> dict[str, str]:
        return self.gateway.fleet.missing()

    async def holds(self) -> dict[str, str]:
        """Why engines are held, by their names."""
        return {engine.spec.name: engine.held for engine in self.gateway.fleet.engines if engine.held}

    async def stored(self) -> list[Stored]:
        return self.gateway.stored.all()

    async def remember(self, stored: list[Stored]) -> None:
        """Replies that engines hold, of which other processes have told."""
        for one in stored:
            if one.engine in self.gateway.fleet.by_name:
                self.gateway.stored.put(one)

    async def retire(self) -> None:
        """Leave what comes to others, and end what is here, however long it takes."""
        assert self._public is not None
        self.gateway.retiring = True
        self._public.retire()


def _asked_of(gateway: Gateway, tier: str) -> dict[str, float]:
    """How many requests wait for a tier, the first for how many seconds, and how many are under way."""
    waiting, oldest = gateway.tiers.oldest(tier)
    running = sum(engine.in_flight for engine in gateway.fleet.tiers[tier])
    return {"waiting": waiting, "oldest": oldest, "running": running}
