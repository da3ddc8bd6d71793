#!/usr/bin/env python3
"""Limits under load: two gateway processes on one Redis, 50 tenants in 10 organisations, 200 clients.

    python bench/limits_soak.py [--seconds 60]       with cancels, 5xx and a gateway that is killed
    python bench/limits_soak.py --faults             a table of ways in which Redis fails, by on_store_failure

Says how many tokens went beyond plans and refill, and what was left in Redis after a pause.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.redis import Server, server
from tests.support.soak import CLOSED, LEASES_GONE_SECONDS, Plan, Seen, answering, left, soak, watched

FAULT_SECONDS = 15.0
AWAY_SECONDS = 3.0


def flush(redis: Server) -> None:
    with contextlib.closing(redis.client()) as client:
        client.flushall()
        client.script_flush()


FAULTS = {
    "killed, restarted empty": (Server.kill, Server.start),
    "stands still (SIGSTOP)": (Server.stop, Server.resume),
    "read-only": (Server.read_only, Server.writable),
    "flushed": (flush, None),
    "failed over": (Server.kill, None),
}


def told(seen: Seen) -> str:
    return ", ".join(f"{count} {status}" for status, count in sorted(seen.statuses.items()))


async def long(seconds: float, clients: int) -> None:
    with tempfile.TemporaryDirectory() as folder, server() as redis:
        seen = await soak(Path(folder), Plan(seconds, clients, kill_a_gateway=True), redis)
        print(f"{seen.seconds:.1f} s: {told(seen)}")
        print(f"tokens used: {seen.share():.0%} of what the organisations' plans allow")
        print(f"tokens beyond plan and refill: {seen.over():.0f}")
        print(f"at the end: {left(redis)[0]} holders with buckets that are not full, {left(redis)[1]} leases")
        await asyncio.sleep(LEASES_GONE_SECONDS)
        print(f"{LEASES_GONE_SECONDS:.0f} s later: {left(redis)[0]} and {left(redis)[1]}")


async def faults(clients: int, timeout: str) -> None:
    print("| Redis | mode | in 2 s while it is away | beyond plan and refill | 503 for |")
    print("|---|---|---|---|---|")
    for name, (fault, mend) in FAULTS.items():
        for mode in ("closed", "open", "local"):
            plan = Plan(FAULT_SECONDS, clients, mode, timeout, answering, False, fault, mend, AWAY_SECONDS)
            with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
                if name == "failed over":
                    url, redis, _ = stack.enter_context(watched(Path(folder)))
                    seen = await soak(Path(folder), plan, redis, url)
                else:
                    seen = await soak(Path(folder), plan, stack.enter_context(server()))
            first = int(FAULT_SECONDS / 3)
            away = Counter[str]()
            for second in range(first + 1, first + int(AWAY_SECONDS)):
                away += seen.second.get(second, Counter())
            shown = ", ".join(f"{away[s]} of {s}" for s in ("200", "429", CLOSED) if away[s])
            closed = [second for second, some in seen.second.items() if some[CLOSED]]
            lasted = f"{max(closed) + 1 - first} s" if closed else ""
            print(f"| {name} | `{mode}` | {shown} | {seen.over():.0f} tokens | {lasted} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--timeout", default="50ms", help="limits.timeout; more on a machine that is busy")
    args = parser.parse_args()
    began = time.monotonic()
    uvloop.run(faults(args.clients, args.timeout) if args.faults else long(args.seconds, args.clients))
    print(f"took {time.monotonic() - began:.0f} s")
