#!/usr/bin/env python3
"""A gateway under mixed traffic for a long time: memory, descriptors, threads, leases, and errors nobody asked for.

    python bench/soak.py [--minutes 30] [--clients 40] [--every 15] [--write]

`dualgauge serve` with keys, the shipped policy, a real Redis, metrics and sampled traces, in front of two engines of
bench/native/engine.c. Clients send whole and streamed chats and completions, short and long, by keys of several
tenants, also ones that must be refused; one in ten leaves before its reply has ended. Every --every seconds something
happens: policy or keys are changed and reloaded (by file watch, SIGHUP or the admin API), a policy with a mistake is
to be refused, dualgauge.yaml changes, an engine is killed and comes back.

An error counts as injected only where an engine was away while the request was under way, and only as 502, 503, 504
or a stream that ends with an error event; anything else that is not the reply it must be is an error. Memory's slope
is that of PSS by least squares, after the first third; its standard error says how much a short run can tell.

Exit status 1 where an error was not injected, or leases, descriptors or threads were left, or (from 20 minutes on)
memory grew by 1 MiB an hour or more. The last line is JSON. `--write` keeps it in bench/results.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.contenders import POLICY, deploy, our_program
from bench.figures import merged, slope, slope_error
from bench.gateways import keep, kept, on_signals
from bench.machine import (
    Engines,
    HarnessError,
    Process,
    ask,
    facts,
    free_port,
    needs,
    others,
    running,
    until_answered,
)
from bench.report import render
from engines.bench.spent import now
from tests.support.client import Wire
from tests.support.redis import Server, server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GAP_US = 10_000
TENANTS = 20
TOKENS = 30
REST_SECONDS = 8.0
SAMPLE_SECONDS = 2.0
AWAY_SECONDS = 2.0
LEAVING = 0.1
TELLING_MINUTES = 20
MOST_MIB_AN_HOUR = 1.0
SPARE_DESCRIPTORS = 2
"""Connections of probes, which may be under way when descriptors are counted."""
ENGINE_AWAY = frozenset({502, 503, 504})
LONG = "The train from Lyon was late again, and nobody on the platform seemed to mind very much. " * 400
PROMPTS = (
    "Summarise the plot of Hamlet in three sentences.",
    "Fix this:\n```python\ndef f(xs):\n    for x in xs:\n        return [x for x in xs if x not in xs]\n```",
    "Решите уравнение и объясните каждый шаг.",
    LONG,
)


@dataclass
class Seen:
    """What clients saw, and when engines were away: (from, until), the latter infinite while one is."""

    outcomes: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    away: list[tuple[float, float]] = field(default_factory=list)

    def overlapped(self, began: float) -> bool:
        return any(until > began for _, until in self.away)

    def fail(self, what: str) -> None:
        self.outcomes["error"] += 1
        self.errors.append(f"{time.strftime('%H:%M:%S')} {what}")


@dataclass(frozen=True)
class Sample:
    at: float
    rss: float
    pss: float
    descriptors: int
    threads: int


@dataclass
class Place:
    folder: Path
    gateway: Process
    port: int
    admin: int
    engines: Engines
    seen: Seen
    editions: itertools.count[int] = field(default_factory=itertools.count)

    def sample(self) -> Sample:
        rss, pss = self.gateway.memory()
        return Sample(time.monotonic(), rss, pss, self.gateway.count("fd"), self.gateway.count("task"))

    def metric(self, name: str) -> float:
        """The sum of its series."""
        lines = ask(self.admin, "/metrics")[1].decode().splitlines()
        return sum(
            float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{"))
        )

    def write(self, name: str, text: str) -> None:
        beside = self.folder / f"{name}.new"
        beside.write_text(text)
        beside.replace(self.folder / name)


def keys(edition: int) -> str:
    """The last tenant's key is another one in each edition."""
    some = [{"name": f"t{n}", "key": f"sk-{n}"} for n in range(TENANTS)]
    some += [{"name": "bench", "key": "sk-bench"}, {"name": "passing", "key": f"sk-edition-{edition}"}]
    return json.dumps({"keys": some})


# traffic


def body_of(path: str, prompt: str, tokens: int, stream: bool, usage: bool) -> dict[str, Any]:
    asked: dict[str, Any] = {"model": "smollm2", "max_tokens": tokens}
    if path == CHAT:
        asked["messages"] = [{"role": "user", "content": prompt}]
    else:
        asked["prompt"] = prompt
    if stream:
        asked["stream"] = True
        if usage:
            asked["stream_options"] = {"include_usage": True}
    return asked


def fault_of(stream: bool, usage: bool, tokens: int, status: int, complete: bool, body: bytes) -> str | None:
    """What is wrong with a reply, or None."""
    if status != 200:
        return f"{status} {body[:300]!r}"
    if not complete:
        return f"cut after {len(body)} bytes: {body[-200:]!r}"
    if not stream:
        return None if body.endswith(b"}") else f"not JSON: {body[-200:]!r}"
    if not body.endswith(b"data: [DONE]\n\n"):
        return f"no end: {body[-300:]!r}"
    if (came := body.count(b'"content":"@')) != tokens:
        return f"{came} of {tokens} tokens"
    if (b'"usage":{' in body) != usage:
        return "usage was not asked" if not usage else "no usage"
    return None


async def request(place: Place, wire: Wire, dice: random.Random) -> bool:
    """One, judged; whether its connection can be used on."""
    seen, began = place.seen, time.monotonic()
    path = CHAT if dice.random() < 0.8 else COMPLETIONS
    stream, usage = dice.random() < 0.5, dice.random() < 0.5
    tokens = dice.randint(1, TOKENS)
    headers = {"authorization": f"Bearer sk-{dice.randrange(TENANTS)}"}
    if dice.random() < 0.1:
        headers["x-criticality"] = "high"
    wire.send(path, body_of(path, dice.choice(PROMPTS), tokens, stream, usage), headers=headers)
    if dice.random() < LEAVING:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(dice.uniform(0, TOKENS * GAP_US / 1e6)):
                await wire.reply()
        if dice.random() < 0.5:
            wire.reset()
        seen.outcomes["left"] += 1
        return False
    reply = await wire.reply()
    # After the event of an error the gateway closes.
    fault = fault_of(stream, usage and stream, tokens, reply.status, reply.complete, bytes(reply.body))
    if fault is None:
        seen.outcomes["streams" if stream else "whole replies"] += 1
    elif seen.overlapped(began) and (
        reply.status in ENGINE_AWAY or (reply.status == 200 and b'"error"' in reply.body)
    ):
        seen.outcomes["broken by an engine's end"] += 1
    else:
        seen.fail(f"{path} {'stream' if stream else 'whole'}: {fault}")
    return fault is None and reply.headers.get("connection") != "close"


async def refused(place: Place, wire: Wire, dice: random.Random) -> bool:
    """One that must be refused."""
    asked = body_of(CHAT, PROMPTS[0], 1, False, False)
    headers = {"authorization": "Bearer sk-0"}
    wrong: list[tuple[int, object, dict[str, str]]] = [
        (401, asked, {"authorization": "Bearer sk-nobody"}),
        (400, b'{"model": "smollm2", "messages": [', headers),
        (400, {**asked, "n": 1_000_000_000}, headers),
        (404, {**asked, "model": "gpt-9"}, headers),
    ]
    want, body, headers = dice.choice(wrong)
    wire.send(CHAT, body, headers=headers)
    reply = await wire.reply()
    if reply.status == want:
        place.seen.outcomes["refused"] += 1
    else:
        place.seen.fail(f"{want} was due, it is {reply.status} {bytes(reply.body[:300])!r}")
    return reply.complete and reply.headers.get("connection") != "close"


async def client(place: Place, number: int, until: float) -> None:
    dice = random.Random(number)
    while time.monotonic() < until:
        try:
            async with await Wire.open(place.port) as wire:
                for _ in range(dice.randint(1, 20)):
                    if time.monotonic() >= until:
                        return
                    kind = refused if dice.random() < 0.05 else request
                    if not await kind(place, wire, dice):
                        break
                    await asyncio.sleep(dice.uniform(0.02, 0.3))
        except (OSError, TimeoutError) as exc:
            place.seen.fail(f"{type(exc).__name__}: {exc}")
            await asyncio.sleep(1)


# what happens


async def reloaded(place: Place, want: int) -> None:
    status, told = await asyncio.to_thread(ask, place.admin, "/admin/reload", b"")
    if status != want:
        place.seen.fail(f"a reload was to give {want} and gave {status} {told[:300]!r}")


async def new_policy(place: Place) -> None:
    place.write("policy.yaml", f"{POLICY.read_text()}# edition {next(place.editions)}\n")
    await reloaded(place, 200)


async def watched_policy(place: Place) -> None:
    place.write("policy.yaml", f"{POLICY.read_text()}# edition {next(place.editions)}\n")


async def broken_policy(place: Place) -> None:
    good = (place.folder / "policy.yaml").read_text()
    place.write("policy.yaml", good.replace("send: exact", "send: exat", 1))
    await reloaded(place, 400)
    place.write("policy.yaml", good)
    await reloaded(place, 200)


async def new_keys(place: Place) -> None:
    place.write("keys.yaml", keys(next(place.editions)))
    place.gateway.signal(signal.SIGHUP)


async def new_configuration(place: Place) -> None:
    file = json.loads((place.folder / "dualgauge.yaml").read_text())
    place.write(
        "dualgauge.yaml", json.dumps({**file, "timeouts": {"total": f"{1000 + next(place.editions)}s"}})
    )
    await reloaded(place, 200)


async def engine_away(place: Place) -> None:
    which, seen = next(place.editions) % 2, place.seen
    seen.away.append((time.monotonic(), float("inf")))
    await asyncio.to_thread(place.engines.restart, which, AWAY_SECONDS)
    async with asyncio.timeout(30):
        while (await asyncio.to_thread(ask, place.admin, "/readyz"))[0] != 200:
            await asyncio.sleep(0.2)
    # Until what was sent to it before has surely been answered.
    await asyncio.sleep(1)
    seen.away[-1] = (seen.away[-1][0], time.monotonic())


HAPPENINGS: tuple[Callable[[Place], Awaitable[None]], ...] = (
    new_policy,
    engine_away,
    new_keys,
    watched_policy,
    broken_policy,
    engine_away,
    new_configuration,
)


async def happen(place: Place, every: float, until: float, counts: Counter[str]) -> None:
    for what in itertools.cycle(HAPPENINGS):
        if time.monotonic() + every + AWAY_SECONDS * 3 > until:
            return
        await asyncio.sleep(every)
        await what(place)
        counts[what.__name__.replace("_", " ")] += 1


async def traffic(
    place: Place, args: argparse.Namespace, seconds: float, counts: Counter[str]
) -> list[Sample]:
    """Until all clients have gone; one sample every two seconds of it."""
    until = time.monotonic() + seconds
    asking = [asyncio.create_task(client(place, number, until)) for number in range(args.clients)]
    happening = asyncio.create_task(happen(place, args.every, until, counts))
    samples = []
    while time.monotonic() < until:
        await asyncio.sleep(SAMPLE_SECONDS)
        place.gateway.check()
        samples.append(await asyncio.to_thread(place.sample))
        await asyncio.to_thread(place.metric, "dualgauge_leases")
        if happening.done():
            happening.result()
        left = max(0, until - time.monotonic())
        if sys.stderr.isatty():
            print(
                f"\r{left:5.0f} s left, {samples[-1].pss:.1f} MiB, {place.seen.outcomes.total()} requests",
                end="",
                file=sys.stderr,
            )
    await asyncio.gather(*asking, happening)
    return samples


async def at_rest(place: Place) -> Sample:
    await asyncio.sleep(REST_SECONDS)
    return await asyncio.to_thread(place.sample)


async def soak(place: Place, args: argparse.Namespace, redis: Server) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    seconds = args.minutes * 60
    await traffic(place, args, seconds / 3, counts)
    warm = await at_rest(place)
    samples = await traffic(place, args, seconds * 2 / 3, counts)
    end = await at_rest(place)
    points = [((sample.at - samples[0].at) / 3600, sample.pss) for sample in samples]
    with contextlib.closing(redis.client()) as asked:
        held: Any = asked.keys("dualgauge:*:leases")
        in_redis = sum(int(asked.zcard(key)) for key in held)
    log = place.gateway.log.read_text(errors="replace")
    if "Traceback" in log:
        place.seen.fail(f"the gateway's log has a traceback: {log[log.index('Traceback') :][:1500]}")
    return {
        "minutes": args.minutes,
        "requests": dict(place.seen.outcomes),
        "happened": dict(counts),
        "errors": place.seen.outcomes["error"],
        "MiB an hour": slope(points),
        "standard error": slope_error(points),
        "PSS": [warm.pss, end.pss],
        "RSS": [warm.rss, end.rss],
        "descriptors": [warm.descriptors, end.descriptors],
        "threads": [warm.threads, end.threads],
        "leases": [place.metric("dualgauge_leases"), in_redis],
        "in flight": place.metric("dualgauge_in_flight"),
        "engines' streams": place.engines.stats()["active"],
    }


def faults(result: dict[str, Any]) -> list[str]:
    """What must not be."""
    found = []
    if result["errors"]:
        found.append(f"{result['errors']} errors that were not injected")
    if any(result["leases"]) or result["in flight"] or result["engines' streams"]:
        found.append("leases or requests were left")
    if result["descriptors"][1] > result["descriptors"][0] + SPARE_DESCRIPTORS:
        found.append("descriptors grew")
    if result["threads"][1] > result["threads"][0]:
        found.append("threads grew")
    if result["minutes"] >= TELLING_MINUTES and result["MiB an hour"] >= MOST_MIB_AN_HOUR:
        found.append("memory grew")
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--every", type=float, default=15, help="seconds between what happens (%(default)s)")
    parser.add_argument("--write", action="store_true", help="bench/results.json and bench/RESULTS.md")
    args = parser.parse_args()
    if args.minutes < 0.5 or args.clients < 1 or args.every <= 0:
        parser.error("--minutes must be 0.5 or more, --clients 1 or more, --every above 0")
    return args


def run(args: argparse.Namespace) -> dict[str, Any]:
    needs("redis-server")
    with tempfile.TemporaryDirectory(prefix="dg-soak-") as folder, contextlib.ExitStack() as stack:
        here = Path(folder)
        redis = stack.enter_context(server())
        engines = Engines(stack, here, "--gap", str(GAP_US))
        port, admin = free_port(), free_port()
        (here / "policy.yaml").write_text(POLICY.read_text())
        file = deploy(here, port, admin, engines.ports, store=redis.url, policy=here / "policy.yaml")
        file.write_text(
            json.dumps({**json.loads(file.read_text()), "health": {"every": "1s", "down_after": 2}})
        )
        (here / "keys.yaml").write_text(keys(0))
        gateway = stack.enter_context(
            running([our_program(), "serve", "--config", file], here / "gateway.log")
        )
        until_answered(gateway, admin, "/readyz")
        place = Place(here, gateway, port, admin, engines, Seen())
        machine, before = facts(), now()
        result = asyncio.run(soak(place, args, redis))
        for line in place.seen.errors[:20]:
            print(line, file=sys.stderr)
    machine["others"] = others(before)
    return {"machine": machine, **result}


def main() -> int:
    args = arguments()
    on_signals()
    try:
        results = kept()
        result = run(args)
        if args.write:
            keep(merged(results, "soak", result))
    except (HarnessError, OSError) as exc:
        print(exc, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(render({"soak": result}, introduction=""))
    found = faults(result)
    for fault in found:
        print(fault, file=sys.stderr)
    print(json.dumps(result))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
