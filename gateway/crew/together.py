"""What the processes of a crew are asked, and their answers as one: the site that they make together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from gateway.config import Config
from gateway.console.live import Live
from gateway.crew import figures
from gateway.crew.member import Member
from gateway.site import SiteError
from gateway.telemetry import series
from gateway.telemetry.history import EVERY_SECONDS, History
from gateway.telemetry.recent import MOST as MOST_ROWS
from gateway.telemetry.series import Families, Family, Point

logger = logging.getLogger("dualgauge.gateway")

READY_SECONDS = 1.0
NOBODY = "no worker serves: the gateway's log tells why"

decode = msgspec.json.decode


class Together:
    """`members` are asked as they are at the time; `name` is one that no other process has."""

    def __init__(
        self,
        config: Config,
        members: list[Member],
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
        name: str,
    ) -> None:
        self._config = config
        self._clock = clock
        self._members = members
        # What was ordered, for those that are still to come; what those that have ended had counted.
        self._holds: dict[str, str] = {}
        self._past: Families = []
        self._deaths = 0
        self.stopping = False
        self._history = History(config.tiers, [spec.name for spec in config.engines], clock, wall)
        self._live = Live(name, clock, self._history)

    @property
    def _serving(self) -> list[Member]:
        """By their places."""
        return sorted((m for m in self._members if m.state == "serving"), key=lambda m: m.number)

    @property
    def _leaving(self) -> list[Member]:
        return [member for member in self._members if member.state == "leaving"]

    async def _all(self, members: Sequence[Member], what: str, *arguments: object) -> list[bytes]:
        """The answer of each; one that ends meanwhile has none. Raises SiteError where one is silent."""

        async def one(member: Member) -> bytes | None:
            try:
                return await member.ask(what, *arguments)
            except EOFError:
                return None
            except TimeoutError:
                message = f"worker {member.number} (pid {member.pid}) does not answer"
                raise SiteError(503, message) from None

        answers = await asyncio.gather(*map(one, members))
        return [answer for answer in answers if answer is not None]

    async def _one(self, what: str, *arguments: object) -> bytes:
        """The answer of the first that has one. Raises SiteError."""
        for member in (*self._serving, *self._leaving):
            with contextlib.suppress(EOFError, TimeoutError):
                return await member.ask(what, *arguments)
        raise SiteError(503, NOBODY)

    async def _look(self) -> Families:
        """What all have counted; of one that does not answer, what it had when it last did."""

        async def one(member: Member) -> None:
            number = member.seen.ask()
            with contextlib.suppress(SiteError, EOFError, TimeoutError):
                member.seen.answer(number, decode(await member.ask("metrics"), type=Families))

        await asyncio.gather(*map(one, self._serving + self._leaving))
        serving = [member.seen.families for member in self._serving]
        leaving = [member.seen.families for member in self._leaving]
        return series.merged(serving, leaving, self._past)

    async def _look_often(self) -> None:
        """Of a worker that is killed, no more is lost than it counted since the last look."""
        while True:
            try:
                counted = await self._look()
                history = self._history
                history.take(figures.looked(counted, history.tiers, history.engines))
            except Exception:
                logger.exception("the workers' figures cannot be put together")
            await asyncio.sleep(EVERY_SECONDS)

    # the site

    async def ready(self) -> tuple[int, bytes]:
        told: list[tuple[int, bytes]] = []

        async def one(member: Member) -> None:
            with contextlib.suppress(SiteError, EOFError, TimeoutError):
                answer = await member.ask("ready", seconds=READY_SECONDS)
                status, body = decode(answer, type=tuple[int, msgspec.Raw])
                told.append((status, bytes(body)))

        await asyncio.gather(*map(one, self._serving))
        if not told:
            tiers = dict.fromkeys(self._config.tiers, "no worker serves")
            return 503, msgspec.json.encode({"ready": False, "tiers": tiers, "draining": self.stopping})
        return min(told)

    async def scrape(self, accept: str) -> tuple[bytes, str]:
        counted = [*await self._look(), *self._own()]
        return await asyncio.to_thread(series.scrape, counted, accept)

    def _own(self) -> Families:
        count, deaths = "dualgauge_workers", "dualgauge_worker_deaths"
        states = {"serving": len(self._serving), "leaving": len(self._leaving)}
        points = [Point(count, (("state", state),), float(number)) for state, number in states.items()]
        text = "Workers that ended by themselves and were started again"
        return [
            Family(count, "gauge", "Gateway processes behind the port", points),
            Family(deaths, "counter", text, [Point(f"{deaths}_total", (), float(self._deaths))]),
        ]

    async def _bodies(self, what: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        serving, leaving = self._serving, self._leaving
        answers = await asyncio.gather(self._all(serving, what), self._all(leaving, what))
        first, second = ([decode(answer) for answer in some] for some in answers)
        if not first and not second:
            raise SiteError(503, NOBODY)
        return first, second

    async def status(self) -> dict[str, Any]:
        return {**figures.statuses(*await self._bodies("status")), "workers": self._workers()}

    def _workers(self) -> list[dict[str, Any]]:
        return [{"number": m.number, "pid": m.pid, "state": m.state} for m in self._members]

    async def reload(self) -> object:
        answers = [decode(answer) for answer in await self._all(self._serving, "reload")]
        if not answers:
            raise SiteError(503, NOBODY)
        needed = any(answer["restart_needed"] for answer in answers)
        return {**answers[0], "restart_needed": needed}

    async def hold(self, engine: str, reason: str) -> object:
        self._holds[engine] = reason
        joining = [member for member in self._members if member.state == "joining"]
        serving, leaving = [*self._serving, *joining], self._leaving
        answers = await self._all(serving, "hold", engine, reason)
        for member in leaving:
            # Its configuration may be an older one, without this engine.
            with contextlib.suppress(SiteError):
                answers += await self._all([member], "hold", engine, reason)
        if not answers:
            raise SiteError(503, NOBODY)
        bodies = [decode(answer) for answer in answers]
        return {**bodies[0], "in_flight": sum(body["in_flight"] for body in bodies)}

    async def demand(self) -> object:
        serving, leaving = await self._bodies("demand")
        return figures.demands([*serving, *leaving])

    async def live(self, cursor: str) -> bytes:
        if self._live.due():
            serving, leaving = self._serving, self._leaving
            states = [await self._states(serving), await self._states(leaving)]
            if not states[0] and not states[1]:
                raise SiteError(503, NOBODY)
            counted = await self._look()
            state = {**figures.shown(states[0], states[1], counted), "workers": self._workers()}
            rows = {name: row for member in (*serving, *leaving) for name, row in member.rows.items()}
            self._live.show(msgspec.json.encode(state), rows, rows.__getitem__)
        return self._live.body(cursor)

    async def _states(self, members: Sequence[Member]) -> list[dict[str, Any]]:
        """What each shows of itself; its new decisions are put to those that it has told before."""
        states = []
        for member in members:
            with contextlib.suppress(SiteError, EOFError, TimeoutError):
                told = decode(await member.ask("live", member.cursor), type=Told)
                member.cursor = told.cursor
                for row in told.decisions:
                    seen = decode(row, type=Row)
                    member.rows[seen.id] = bytes(row), seen.done
                while len(member.rows) > MOST_ROWS:
                    del member.rows[next(iter(member.rows))]
                states.append(told.state)
        return states

    async def decision(self, request_id: str) -> object:
        refused = SiteError(503, NOBODY)
        for member in (*self._serving, *self._leaving):
            try:
                return await member.ask("decision", request_id)
            except SiteError as error:
                refused = error
            except (EOFError, TimeoutError):
                continue
        raise refused

    async def policy(self) -> object:
        return await self._one("policy")

    async def tenants(self) -> object:
        return await self._one("tenants", figures.tenant_totals(await self._look()))

    async def explain(self, pasted: bytes) -> object:
        return await self._one("explain", pasted.decode("utf-8", "replace"))


class Told(msgspec.Struct):
    """What a worker's console shows since a cursor."""

    cursor: str
    state: dict[str, Any]
    decisions: list[msgspec.Raw]


class Row(msgspec.Struct):
    id: str
    done: bool
