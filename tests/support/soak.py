"""Two gateways as processes, one Redis, many tenants and clients: what is admitted is held against the plans
while engines break, clients leave, a gateway is killed, or Redis fails in one of several ways."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis import Redis

from tests.support.client import Wire
from tests.support.engine import Exchange, FakeEngine, Script
from tests.support.redis import SERVER, Server, free_port, server
from tests.support.serving import ServedProcess, process

TENANTS = 50
TEAMS = 10
WINDOW = 10.0
TOKENS = 1500
TEAM_TOKENS = 6000
PROMPT = 50
LONGEST = 200
CLOSED = "503 for limits"
PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Say something nice about trains."}]
POLICY = f"""
version: 1
rules: [{{name: all, send: fast, if_unavailable: fail}}]
plans:
  default: {{tokens: {TOKENS}/{WINDOW:.0f}s, requests: 1000/{WINDOW:.0f}s, concurrent: 6, output: 100}}
  team: {{tokens: {TEAM_TOKENS}/{WINDOW:.0f}s, concurrent: 24}}
"""
KEYS = json.dumps(
    {
        "organisations": [{"name": f"team{n}", "plan": "team"} for n in range(TEAMS)],
        "keys": [
            {"name": f"t{n}", "key": f"sk-{n}", "organisation": f"team{n % TEAMS}"} for n in range(TENANTS)
        ],
    }
)
# A gateway that was killed leaves leases that expire by themselves.
LEASES_GONE_SECONDS = 35.0


@dataclass
class Seen:
    """What clients saw. `used` is tokens of whole replies by tenant, `second` statuses by second."""

    used: Counter[int] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    second: dict[int, Counter[str]] = field(default_factory=dict)
    seconds: float = 0.0

    def note(self, began: float, status: str) -> None:
        self.statuses[status] += 1
        self.second.setdefault(int(time.monotonic() - began), Counter())[status] += 1

    def over(self) -> float:
        """Tokens beyond plan and refill, of all tenants and teams: what must not be."""
        allowed = TOKENS * (1 + self.seconds / WINDOW)
        teams = Counter[int]()
        for tenant, used in self.used.items():
            teams[tenant % TEAMS] += used
        of_a_team = TEAM_TOKENS * (1 + self.seconds / WINDOW)
        beyond = [used - allowed for used in self.used.values()]
        beyond += [used - of_a_team for used in teams.values()]
        return sum(max(0.0, amount) for amount in beyond)

    def share(self) -> float:
        """Of what the teams' plans allow, how much was used."""
        return sum(self.used.values()) / (TEAMS * TEAM_TOKENS * (1 + self.seconds / WINDOW))


async def breaking(exchange: Exchange) -> None:
    """One request in ten is not answered."""
    chance = random.random()
    if chance < 0.05:
        exchange.head(500, "application/json", content_length="2")
        exchange.raw(b"{}")
        return
    if chance < 0.1:
        exchange.reset()
        return
    await answering(exchange)


async def answering(exchange: Exchange) -> None:
    """Answers after some 50 ms."""
    body = exchange.received.json
    await asyncio.sleep(random.uniform(0.02, 0.08))
    completion = random.randint(1, body.get("max_tokens", 100))
    usage = {"prompt_tokens": PROMPT, "completion_tokens": completion, "total_tokens": PROMPT + completion}
    if not body.get("stream"):
        data = json.dumps({"object": "chat.completion", "choices": [], "usage": usage}).encode()
        exchange.head(200, "application/json", content_length=str(len(data)))
        exchange.raw(data)
        return
    exchange.head(200)
    for _ in range(5):
        exchange.chunk(b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n')
        await asyncio.sleep(0.02)
    exchange.chunk(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
    exchange.end()


async def client(number: int, ports: list[int], seen: Seen, began: float, until: float) -> None:
    tenant = number % TENANTS
    headers = {"x-api-key": f"sk-{tenant}"}
    while time.monotonic() < until:
        body: dict[str, Any] = {"model": "smollm2", "messages": MESSAGES, "user": str(tenant)}
        if random.random() < 0.9:
            body["max_tokens"] = random.randint(1, LONGEST)
        if random.random() < 0.5:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            async with await Wire.open(random.choice(ports)) as wire:
                wire.send(PATH, body, headers=headers)
                if random.random() < 0.1:
                    await asyncio.sleep(random.uniform(0, 0.1))
                    seen.note(began, "left")
                    continue
                answer = await wire.reply()
        except OSError:
            seen.note(began, "refused")
        else:
            status = str(answer.status) if answer.complete else "cut"
            if answer.status == 503 and b"limits_unavailable" in answer.body:
                status = CLOSED
            seen.note(began, status)
            if answer.status == 200 and answer.complete:
                seen.used[tenant] += _total(bytes(answer.body))
        await asyncio.sleep(random.uniform(0.05, 0.25))


def _total(body: bytes) -> int:
    start = body.rfind(b'"total_tokens": ')
    return int(body[start + 16 :].split(b"}")[0]) if start >= 0 else 0


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[tuple[str, Server, Server]]:
    """A master, its replica and a Sentinel: (URL, master, replica)."""
    assert SERVER is not None
    port, other, sentinel_port = free_port(), free_port(), free_port()
    with (
        server(port=port) as master,
        server("--replicaof", "127.0.0.1", str(port), port=other) as replica,
    ):
        config = folder / "sentinel.conf"
        config.write_text(
            f"port {sentinel_port}\ndir {folder}\nlogfile {folder}/sentinel.log\n"
            f"sentinel monitor main 127.0.0.1 {port} 1\n"
            "sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 2000\n"
        )
        sentinel = subprocess.Popen([SERVER, str(config), "--sentinel"])
        try:
            with contextlib.closing(Redis(port=sentinel_port)) as asked:
                deadline = time.monotonic() + 20
                while time.monotonic() < deadline:
                    with contextlib.suppress(Exception):
                        if int(asked.sentinel_master("main")["num-slaves"]) == 1:  # type: ignore[index]
                            break
                    time.sleep(0.1)
            yield f"redis+sentinel://127.0.0.1:{sentinel_port}/main", master, replica
        finally:
            sentinel.kill()
            sentinel.wait()


Fault = Callable[[Server], None]


@dataclass
class Plan:
    """`fault` and `mend` are called at a third of the time and `away` seconds later."""

    seconds: float
    clients: int = 200
    mode: str = "local"
    timeout: str = "2s"
    engine: Script = breaking
    kill_a_gateway: bool = False
    fault: Fault | None = None
    mend: Fault | None = None
    away: float = 3.0


async def soak(folder: Path, plan: Plan, redis: Server, url: str | None = None) -> Seen:
    """Run it; both gateways are up at the end, and all clients have gone."""
    engine, seen = FakeEngine(plan.engine), Seen()
    limits = {"store": url or redis.url, "on_store_failure": plan.mode, "timeout": plan.timeout}
    with contextlib.ExitStack() as stack:
        await engine.start()
        try:
            served = [_start(stack, folder / name, engine, limits) for name in "ab"]
            began = time.monotonic()
            ends = began + plan.seconds
            ports = [one.port for one in served]
            random.seed(1)
            asking = [
                asyncio.create_task(client(number, ports, seen, began, ends))
                for number in range(plan.clients)
            ]
            await asyncio.sleep(plan.seconds / 3)
            if plan.kill_a_gateway:
                served[0].process.kill()
                served[0].process.wait()
                served[0] = await asyncio.to_thread(
                    _start, stack, folder / "again", engine, limits, port=ports[0]
                )
            if plan.fault is not None:
                await asyncio.to_thread(plan.fault, redis)
                await asyncio.sleep(plan.away)
                if plan.mend is not None:
                    await asyncio.to_thread(plan.mend, redis)
            await asyncio.gather(*asking)
            seen.seconds = time.monotonic() - began
            await asyncio.sleep(1.0)
            for one in served:
                one.process.terminate()
                await asyncio.to_thread(one.process.wait)
        finally:
            await engine.stop()
    return seen


def _start(
    stack: contextlib.ExitStack, folder: Path, engine: FakeEngine, limits: dict[str, Any], *, port: int = 0
) -> ServedProcess:
    folder.mkdir()
    health = {"every": "1s", "down_after": 3}
    return stack.enter_context(
        process(folder, {"fast": engine}, policy=POLICY, keys=KEYS, port=port, limits=limits, health=health)
    )


def left(redis: Server) -> tuple[int, int]:
    """(keys of buckets that are not full, leases) in the store."""
    with contextlib.closing(redis.client()) as asked:
        buckets: Any = asked.keys("dualgauge:*:buckets")
        leases: Any = asked.keys("dualgauge:*:leases")
        return len(buckets), sum(int(asked.zcard(key)) for key in leases)  # type: ignore[arg-type]
