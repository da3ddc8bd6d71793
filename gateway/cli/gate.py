"""The gateway as `up` drives it: which engines get no requests, and what still runs on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from engines import runfile
from engines.runfile import UnitState
from engines.spec import bearer
from engines.swap import Demand
from gateway.config import Config

if TYPE_CHECKING:
    import httpx2

LOOK = 0.1
ANSWER_SECONDS = 5.0
AGAIN = 0.5
TRIES = 60


class GateError(Exception):
    """There is a gateway, and it does not do as it is told."""


class Gate:
    """Has the gateway hold what is not ready and let go what is; `run` alone tells it, so that orders keep
    their order.

    A gateway that is not there gives nobody requests; one that starts reads in the run file what is held.
    """

    def __init__(self, config: Config) -> None:
        self._url = config.admin.url
        self._token = config.admin_token
        self._wanted: Mapping[str, str] = {}
        self._told: dict[str, str] = {}
        self._news = asyncio.Event()
        self._heard = asyncio.Event()

    def want(self, units: Iterable[UnitState]) -> None:
        self._wanted = {unit.name: runfile.why_held(unit) for unit in units}
        self._news.set()

    def forget(self) -> None:
        """Another gateway starts: what the last one was told counts no more."""
        self._told.clear()
        self._news.set()

    async def run(self) -> None:
        """Tell what is new, until it is cancelled."""
        while True:
            self._news.clear()
            for name, why in self._wanted.items():
                if self._told.get(name) == why:
                    continue
                self._told.pop(name, None)
                try:
                    await self._ask("POST", f"/admin/engines/{name}/hold", {"reason": why})
                except GateError:
                    self._news.set()  # again, after what else there is to tell
                    await asyncio.sleep(AGAIN)
                else:
                    self._told[name] = why
                    self._heard.set()
            await self._news.wait()

    async def idle(self, name: str, progress: Callable[[int], None] = lambda _: None) -> None:
        """Return once the engine gets nothing new and nothing runs on it any more. Raises GateError.

        `progress` hears how many requests still run, at each change.
        """
        while not self._told.get(name) or self._told.get(name) != self._wanted.get(name):
            self._heard.clear()
            await self._heard.wait()
        before = None
        while left := await self._in_flight(name):
            if left != before:
                before = left
                progress(left)
            await asyncio.sleep(LOOK)

    async def demand(self) -> Mapping[str, Demand]:
        """What is asked of each tier; empty where no gateway tells."""
        try:
            answer = await self._ask("GET", "/admin/demand")
            return {} if answer is None else {t: Demand(**found) for t, found in answer["tiers"].items()}
        except (GateError, KeyError, TypeError, AttributeError):
            return {}

    async def _in_flight(self, name: str) -> int:
        answer = await self._ask("GET", "/admin/status")
        if answer is None:
            return 0
        try:
            return int(next(engine["in_flight"] for engine in answer["engines"] if engine["name"] == name))
        except (StopIteration, KeyError, TypeError, ValueError):
            raise GateError(f"the gateway at {self._url} does not know {name}") from None

    async def _ask(self, method: str, path: str, body: object = None) -> Any:
        """Its answer, None where there is no gateway. One that is slow is asked again."""
        import httpx2

        headers = bearer(self._token)
        async with self._client() as client:
            for _ in range(TRIES):
                try:
                    reply = await client.request(
                        method, path, json=body, headers=headers, timeout=ANSWER_SECONDS
                    )
                except httpx2.ConnectError:
                    return None
                except httpx2.HTTPError:
                    await asyncio.sleep(AGAIN)
                    continue
                if reply.status_code != 200:
                    raise GateError(f"the admin port {self._url} answers {reply.status_code} to {path}")
                try:
                    return reply.json()
                except ValueError:
                    raise GateError(f"another program answers at the admin port {self._url}") from None
        raise GateError(f"the admin port {self._url} does not answer")

    def _client(self) -> httpx2.AsyncClient:
        from engines.launch import client

        return client(self._url)
