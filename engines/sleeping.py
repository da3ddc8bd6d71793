"""vLLM's sleep mode: weights go to the machine's memory (level 1), the KV cache is dropped.

`/health` stays 200 and requests hang while an engine sleeps, and a wake-up may answer 200 without effect:
`/is_sleeping` alone is believed. Level 2, which drops the weights, is left out: it needs them loaded again,
and engines have answered gibberish after it (vllm#29341).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from engines.flags import SLEEP_MODE
from engines.launch import ProbeError, Sleep, client
from engines.spec import EngineSpec, bearer

if TYPE_CHECKING:
    import httpx2

SLEEP_SECONDS = 60.0
WAKE_SECONDS = 60.0
LOOK = 0.1
NO_SLEEP_MODE = (
    f"has no sleep mode: write {SLEEP_MODE} into its `args`, with which `dualgauge up` starts it with the "
    "endpoints that this needs"
)


class Sleeper:
    """Puts one engine to sleep and wakes it. Raises ProbeError where it does not do as it is told."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        sleep: Sleep = asyncio.sleep,
        sleep_seconds: float = SLEEP_SECONDS,
        wake_seconds: float = WAKE_SECONDS,
    ) -> None:
        self._spec = spec
        self._pause = sleep
        self._sleep_seconds = sleep_seconds
        self._wake_seconds = wake_seconds

    async def sleep(self) -> None:
        """Nothing may run on the engine: it would be aborted."""
        await self._tell("/sleep?level=1", asleep=True, seconds=self._sleep_seconds)

    async def wake(self) -> None:
        await self._tell("/wake_up", asleep=False, seconds=self._wake_seconds)

    async def asleep(self) -> bool | None:
        """None where it does not tell."""
        async with client(self._spec.url) as asking:
            return await self._asleep(asking)

    async def _tell(self, path: str, *, asleep: bool, seconds: float) -> None:
        import httpx2

        what = "go to sleep" if asleep else "wake up"
        try:
            async with asyncio.timeout(seconds), client(self._spec.url) as asking:
                reply = await asking.post(path, headers=self._headers(), timeout=seconds)
                if reply.status_code == 404:
                    raise ProbeError(f"it {NO_SLEEP_MODE}")
                if reply.status_code != 200:
                    raise ProbeError(f"it would not {what}: {reply.status_code} {reply.text[:200]}")
                while await self._asleep(asking) is not asleep:
                    await self._pause(LOOK)
        except TimeoutError:
            raise ProbeError(f"it did not {what} within {seconds:g} s") from None
        except httpx2.HTTPError as error:
            raise ProbeError(f"it did not {what}: {type(error).__name__} {error}".strip()) from None

    async def _asleep(self, asking: httpx2.AsyncClient) -> bool | None:
        import httpx2

        try:
            reply = await asking.get("/is_sleeping", headers=self._headers())
            found = reply.json()["is_sleeping"]
        except (httpx2.HTTPError, ValueError, KeyError, TypeError):
            return None
        return found if isinstance(found, bool) else None

    def _headers(self) -> dict[str, str]:
        return bearer(self._spec.api_key)
