#!/usr/bin/env python3
"""What leases cost: CPU and latency of reserving and settling, in memory and in Redis.

    python bench/limits.py [--requests 20000] [--concurrent 64]

Each figure is the least of several slices, beside the speed of a fixed loop on this machine. For Redis a server
is started on a unix socket; the figures are of this process, the server's CPU is not in them.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from gateway.config import LimitsPart, Seconds
from gateway.limits import Ask, Store, claim
from gateway.limits.memory import MemoryStore
from gateway.limits.redis import RedisStore
from policies.plan import Plan
from policies.units import Rate
from tests.support.redis import server

SLICES = 40
ENGINE_SECONDS = (0.02, 0.08)
MOST = 10
PLAN = Plan("default", requests=(Rate(10**9, 60.0),), tokens=(Rate(10**9, 60.0),), concurrent=1000)


def reference() -> float:
    """Microseconds of a fixed loop of plain Python."""
    start = time.process_time()
    total = 0
    for i in range(10_000):
        total += i & 7
    return (time.process_time() - start) * 1e6


def ask(number: int) -> Ask:
    return Ask(f"tenant-{number % 50}", PLAN, "fast", "smollm2", 60, 200)


def memory(requests: int) -> float:
    """Microseconds of CPU a request."""
    store = MemoryStore(time.monotonic)
    best = 1e9
    for _ in range(SLICES):
        start = time.process_time()
        for number in range(requests // SLICES):
            store.reserve(ask(number)).settle(60, 50)
        best = min(best, (time.process_time() - start) / (requests // SLICES))
    return best * 1e6


async def paced(store: Store, requests: int, concurrent: int) -> tuple[float, list[float]]:
    """Microseconds of CPU a request, and the latency of each reservation, ascending, in microseconds. Each
    request asks, is with its engine for some 50 ms, and settles."""
    taken: list[float] = []

    async def client(number: int, count: int) -> None:
        for _ in range(count):
            began = time.perf_counter()
            reserved = store.reserve(ask(number))
            lease = await claim(reserved) if isinstance(reserved, asyncio.Future) else reserved
            taken.append((time.perf_counter() - began) * 1e6)
            await asyncio.sleep(random.uniform(*ENGINE_SECONDS))
            lease.settle(60, 50)

    best = 1e9
    each = max(1, min(MOST, requests // SLICES // concurrent))
    for _ in range(SLICES):
        start = time.process_time()
        await asyncio.gather(*(client(number, each) for number in range(concurrent)))
        best = min(best, (time.process_time() - start) / (each * concurrent))
    return best * 1e6, sorted(taken)


async def redis(requests: int, concurrent: int) -> None:
    with server() as one:
        settings = LimitsPart(store=one.url, timeout=Seconds(5))
        store = RedisStore(settings, workers=1, process="bench", clock=time.monotonic)
        async with store.running():
            await paced(store, concurrent, concurrent)
            cpu, taken = await paced(store, requests, concurrent)
            assert store.fallbacks() == 0
    # What the clients of this benchmark cost themselves.
    own, _ = await paced(MemoryStore(time.monotonic), requests, concurrent)
    median, high = taken[len(taken) // 2], taken[len(taken) * 99 // 100]
    print(
        f"Redis, {concurrent:3} at a time    {cpu - own:8.2f} us of CPU more, p50 {median:.0f} us, p99 {high:.0f} us"
    )


async def main(args: argparse.Namespace) -> None:
    print(f"memory, a request       {memory(args.requests):8.2f} us of CPU")
    for concurrent in (1, args.concurrent):
        await redis(args.requests, concurrent)
    print(f"reference loop          {min(reference() for _ in range(SLICES)):8.2f} us")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--concurrent", type=int, default=64)
    uvloop.run(main(parser.parse_args()))
