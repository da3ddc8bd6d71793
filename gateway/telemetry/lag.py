"""How late the event loop runs: what every request of this process waits for, whatever it asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

EVERY_SECONDS = 0.5


async def watch_lag(observe: Callable[[float], None], clock: Callable[[], float]) -> None:
    """Twice a second, how many seconds after its time a timer fired. Runs until it is cancelled."""
    while True:
        due = clock() + EVERY_SECONDS
        await asyncio.sleep(EVERY_SECONDS)
        observe(max(0.0, clock() - due))
