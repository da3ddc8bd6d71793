"""A short version of `bench/limits_soak.py`."""

import asyncio
from pathlib import Path

from tests.support.redis import needs_redis, server
from tests.support.soak import WINDOW, Plan, left, soak


@needs_redis
async def test_two_processes_admit_no_more_than_the_plans_and_leave_nothing(tmp_path: Path) -> None:
    """50 tenants in 10 organisations, with clients that leave and engines that break."""
    with server() as redis:
        seen = await soak(tmp_path, Plan(seconds=6, clients=60, timeout="10s"), redis)
        assert {"200", "429", "502", "left"} <= set(seen.statuses)
        assert seen.over() == 0
        # All that was asked for too much of was used: nothing leaks the other way either.
        assert seen.share() > 0.5
        assert left(redis)[1] == 0
        await asyncio.sleep(WINDOW + 1)
        assert left(redis) == (0, 0)
