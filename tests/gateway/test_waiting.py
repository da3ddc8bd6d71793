"""Waiting for a slot of a plan or for an engine of a tier: bounded, fair, and ended by whoever leaves."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import SlotsTaken
from gateway.limits import NO_PLAN, Ask, Ended, Lease, Store
from gateway.limits.course import chart
from gateway.limits.memory import MemoryStore
from gateway.limits.waiting import Line, SlotLines
from policies.plan import Plan
from tests.support.client import Reply, Wire, ask, until
from tests.support.engine import FakeEngine, engines, hang, reply
from tests.support.redis import needs_redis, server
from tests.support.serving import Served, serving
from tests.support.shapes import CHAT, check_error

KEYS = """
organisations: [{name: acme, plan: team}]
keys:
- {name: a, key: sk-a, organisation: acme}
- {name: b, key: sk-b, organisation: acme}
"""


def policy(plans: str, contract: str = "fail") -> str:
    return f"version: 1\nrules: [{{name: all, send: fast, if_unavailable: {contract}}}]\nplans:\n  {plans}\n"


def waiting(served: Served) -> int:
    return len(served.gateway.slots)


def for_tier(served: Served) -> int:
    return len(served.gateway.tiers._lines["fast"])


async def asked(served: Served, key: str = "sk-a", note: str = "") -> Reply:
    body = CHAT.ask(messages=[{"role": "user", "content": note or "hello"}])
    return await ask(served.port, CHAT.path, body, headers={"x-api-key": key})


class Gate:
    """An engine that answers one request for each `open`, and notes who came in which order."""

    def __init__(self) -> None:
        self.came: list[str] = []
        self.turns = asyncio.Semaphore(0)

    async def __call__(self, exchange: Any) -> None:
        self.came.append(exchange.received.json["messages"][0]["content"])
        await self.turns.acquire()
        await reply(CHAT.reply)(exchange)

    def open(self, times: int = 1) -> None:
        for _ in range(times):
            self.turns.release()


# a line


@given(st.lists(st.sampled_from("abcd")), st.integers(1, 10))
def test_a_line_is_bounded_and_gives_each_tenant_its_turn(arrivals: list[str], most: int) -> None:
    line: Line[int] = Line(most)
    inside: dict[int, str] = {}
    for one, tenant in enumerate(arrivals):
        inside[one] = tenant
        dropped = line.add(tenant, one)
        if dropped is not None:
            counts = Counter(inside.values())
            assert counts[inside[dropped]] == max(counts.values())
            del inside[dropped]
        assert len(line) == len(inside) <= most
    taken = [line.take() for _ in range(len(line))]
    assert {one: tenant for tenant, one in taken} == inside
    for tenant in set(inside.values()):
        own = [one for name, one in taken if name == tenant]
        assert own == sorted(own)
        assert [name for name, _ in taken].index(tenant) < len(set(inside.values()))


def test_who_has_left_is_not_taken() -> None:
    line: Line[str] = Line(10)
    for one in ("a1", "a2", "b1"):
        line.add(one[0], one)
    line.remove("a", "a1")
    line.remove("a", "a1")
    assert (len(line), line.take(), line.take(), len(line)) == (2, ("a", "a2"), ("b", "b1"), 0)


def test_who_is_put_back_keeps_its_turn() -> None:
    line: Line[str] = Line(10)
    for one in ("a1", "a2", "b1"):
        line.add(one[0], one)
    line.put_back(*line.take())
    assert [line.take()[1] for _ in range(3)] == ["a1", "b1", "a2"]


# for a slot


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 2), st.integers(0, 1)),
        st.tuples(st.sampled_from(["end", "leave"]), st.integers(0, 20), st.just(0)),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(STEPS)
def test_nobody_waits_while_a_slot_of_its_own_is_free(steps: list[Any]) -> None:
    asyncio.run(wait_and_leave(steps))


async def wait_and_leave(steps: list[Any]) -> None:
    """Two tenants share three slots, one of whom has a single one for model 0; a third has its own."""
    store = MemoryStore(lambda: 0.0)
    lines = SlotLines(store, 1000)
    team = Plan("team", concurrent=3)
    plans = [
        Plan("a", concurrent=2, wait=60.0, models={"0": Plan("a0", concurrent=1)}),
        Plan("b", concurrent=2, wait=60.0),
        Plan("c", concurrent=1, wait=60.0),
    ]
    running: list[Lease] = []
    tasks: list[tuple[Ask, asyncio.Task[None]]] = []
    turns: list[str] = []

    async def one(wanted: Ask) -> None:
        scope = lines.ahead(wanted)
        if scope is None:
            try:
                running.append(store.reserve(wanted))
                return
            except SlotsTaken as taken:
                scope = taken.scope
        running.append(await lines.wait(wanted, scope))
        turns.append(wanted.tenant)

    for what, number, model in steps:
        if what == "ask":
            tenant = "abc"[number]
            shared = ("acme", team) if tenant != "c" else ("", NO_PLAN)
            wanted = Ask(tenant, plans[number], "fast", str(model), 1, 1, *shared)
            tasks.append((wanted, asyncio.create_task(one(wanted))))
        elif what == "end" and running:
            running.pop(number % len(running)).refund()
        elif what == "leave" and tasks:
            tasks[number % len(tasks)][1].cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        tasks = [(wanted, task) for wanted, task in tasks if not task.done()]
        assert len(lines) == len(tasks)
        for wanted, _ in tasks:
            with pytest.raises(SlotsTaken):
                store.reserve(wanted)
    expected = len(turns) + len(tasks)
    while running:
        running.pop().refund()
        for _ in range(5):
            await asyncio.sleep(0)
    assert (len(turns), len(lines), store.in_use()) == (expected, 0, 0)
    await asyncio.gather(*(task for _, task in tasks))


OWN_SLOTS = """default: {concurrent: 9}
  team: {concurrent: 64}
  one: {concurrent: 1, wait: 20s}"""
OWN_KEYS = """
organisations: [{name: acme, plan: team}]
keys:
- {name: a, key: sk-a, organisation: acme, plan: one}
- {name: b, key: sk-b, organisation: acme, plan: one}
- {name: c, key: sk-c, organisation: acme}
"""


@pytest.fixture(params=["memory", pytest.param("redis", marks=needs_redis)])
def store(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """`limits` of a configuration."""
    if request.param == "memory":
        yield {}
    else:
        with server() as redis:
            yield {"store": redis.url, "timeout": "10s"}


async def test_who_waits_for_a_slot_of_its_own_delays_nobody_else(
    tmp_path: Path, store: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.limits.waiting.LOOK_SECONDS", 60.0)
    gate = Gate()
    engine = FakeEngine(gate)
    options: dict[str, Any] = {"policy": policy(OWN_SLOTS), "keys": OWN_KEYS, "limits": store}
    async with engines(engine), serving(tmp_path, {"fast": engine}, **options) as served:
        asking = [asyncio.create_task(asked(served, "sk-a", f"a{number}")) for number in range(4)]
        await until(lambda: waiting(served) == 3)
        asking += [asyncio.create_task(asked(served, f"sk-{name}", name)) for name in "bc"]
        await until(lambda: {"b", "c"} <= set(gate.came))
        assert waiting(served) == 3
        gate.open(6)
        assert [(await one).status for one in asking] == [200] * 6
        await until(lambda: served.clean)


class Elsewhere:
    """A store whose `free` slots other processes take and give back, which it does not tell of."""

    def __init__(self, *, far: bool) -> None:
        self.free = 0
        self._far = far

    def on_end(self, hook: Ended) -> None: ...

    def last_seen(self, ask: Ask) -> bytes:
        return b""

    def reserve(self, ask: Ask) -> Any:
        error = None if self.free else chart(ask).slots_taken(0, [])
        self.free -= error is None
        if not self._far:
            if error is not None:
                raise error
            return object()
        promise: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if error is None:
            promise.set_result(object())
        else:
            promise.set_exception(error)
        return promise


@pytest.mark.parametrize("far", [False, True])
async def test_one_look_takes_all_slots_that_became_free_elsewhere(far: bool) -> None:
    store = Elsewhere(far=far)
    lines = SlotLines(cast("Store", store), 10)
    one = Ask("a", Plan("one", concurrent=1, wait=20.0), "fast", "m", 1, 1)
    waits = [asyncio.create_task(lines.wait(one, "t:a")) for _ in range(5)]
    await until(lambda: len(lines) == 5)
    store.free = 4
    lines._look()
    await until(lambda: [task.done() for task in waits] == [True] * 4 + [False])
    waits[-1].cancel()
    await asyncio.wait(waits)
    assert len(lines) == 0


async def test_who_waited_in_vain_is_told_what_is_left(tmp_path: Path, store: dict[str, Any]) -> None:
    engine = FakeEngine(hang)
    plan = policy("default: {concurrent: 1, wait: 50ms, requests: 10/day}")
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}, policy=plan, limits=store) as served,
        await Wire.open(served.port) as first,
    ):
        first.send(CHAT.path, CHAT.ask())
        await until(lambda: engine.generations == 1)
        for answer in await asyncio.gather(*(asked(served) for _ in range(3))):
            assert answer.status == 429
            assert answer.headers["x-ratelimit-limit-requests"] == "10"
            assert answer.headers["x-ratelimit-remaining-requests"] == "9"


async def test_one_more_waits_and_is_told_how_long(tmp_path: Path) -> None:
    gate = Gate()
    engine = FakeEngine(gate)
    plan = policy("default: {concurrent: 1, wait: 20s, requests: 10/day}")
    async with engines(engine), serving(tmp_path, {"fast": engine}, policy=plan) as served:
        first, second = (asyncio.create_task(asked(served)) for _ in range(2))
        await until(lambda: waiting(served) == 1 and engine.generations == 1)
        assert served.gateway.store.usage()["anonymous"]["requests"] == pytest.approx(9, abs=0.01)
        gate.open(2)
        assert "x-dualgauge-queue-seconds" not in (await first).headers
        answer = await second
        assert answer.status == 200
        assert float(answer.headers["x-dualgauge-queue-seconds"]) >= 0.001
        await until(lambda: served.clean)
        metrics = served.metrics().decode()
        assert 'dualgauge_queue_seconds_count{tier="fast"} 1.0' in metrics
        assert waiting(served) == 0


async def test_one_tenants_many_do_not_delay_anothers_first(tmp_path: Path) -> None:
    gate = Gate()
    engine = FakeEngine(gate)
    plan = policy("default: {concurrent: 9, wait: 20s}\n  team: {concurrent: 1}")
    async with engines(engine), serving(tmp_path, {"fast": engine}, policy=plan, keys=KEYS) as served:
        asking = [asyncio.create_task(asked(served, "sk-a", "first"))]
        await until(lambda: gate.came == ["first"])
        for number in range(5):
            asking.append(asyncio.create_task(asked(served, "sk-a", f"a{number}")))
            await until(lambda: waiting(served) == len(asking) - 1)
        asking.append(asyncio.create_task(asked(served, "sk-b", "b")))
        await until(lambda: waiting(served) == 6)
        gate.open(7)
        await asyncio.gather(*asking)
        assert gate.came == ["first", "a0", "b", "a1", "a2", "a3", "a4"]
        assert served.clean


async def test_who_leaves_the_line_is_forgotten(tmp_path: Path) -> None:
    engine = FakeEngine(hang)
    plan = policy("default: {concurrent: 1, wait: 20s}")
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}, policy=plan) as served,
        await Wire.open(served.port) as first,
        await Wire.open(served.port) as second,
    ):
        first.send(CHAT.path, CHAT.ask())
        await until(lambda: engine.generations == 1)
        second.send(CHAT.path, CHAT.ask())
        await until(lambda: waiting(served) == 1)
        second.leave()
        await until(lambda: waiting(served) == 0)
        first.leave()
        await until(lambda: served.clean)
        assert engine.generations == 1


async def test_nobody_waits_longer_than_the_plan_says(tmp_path: Path) -> None:
    engine = FakeEngine(hang)
    plan = policy("default: {concurrent: 1, wait: 50ms}")
    async with (
        engines(engine),
        serving(tmp_path, {"fast": engine}, policy=plan) as served,
        await Wire.open(served.port) as first,
    ):
        first.send(CHAT.path, CHAT.ask())
        await until(lambda: engine.generations == 1)
        answer = await asked(served)
        assert "none became free in 0.05 s" in check_error(answer, 429, code="concurrency_exceeded")
        assert float(answer.headers["x-dualgauge-queue-seconds"]) >= 0.05
        assert waiting(served) == 0


async def test_a_full_line_drops_the_newest_of_the_longest(tmp_path: Path) -> None:
    gate = Gate()
    engine = FakeEngine(gate)
    plan = policy("default: {concurrent: 9, wait: 20s}\n  team: {concurrent: 1}")
    options: dict[str, Any] = {"policy": plan, "keys": KEYS, "limits": {"waiting": 2}}
    async with engines(engine), serving(tmp_path, {"fast": engine}, **options) as served:
        asking = [asyncio.create_task(asked(served, "sk-a", "first"))]
        await until(lambda: gate.came == ["first"])
        for number in range(2):
            asking.append(asyncio.create_task(asked(served, "sk-a", f"a{number}")))
            await until(lambda: waiting(served) == len(asking) - 1)
        asking.append(asyncio.create_task(asked(served, "sk-b", "b")))
        message = check_error(await asking[2], 429, code="concurrency_exceeded")
        assert "too many wait" in message
        gate.open(3)
        await asyncio.gather(*asking)
        assert gate.came == ["first", "a0", "b"]


async def test_a_limit_of_another_kind_ends_the_wait(tmp_path: Path) -> None:
    gate = Gate()
    engine = FakeEngine(gate)
    plan = policy("default: {concurrent: 1, wait: 20s, requests: 1/day}")
    async with engines(engine), serving(tmp_path, {"fast": engine}, policy=plan) as served:
        first, second = (asyncio.create_task(asked(served)) for _ in range(2))
        await until(lambda: waiting(served) == 1)
        gate.open()
        check_error(await second, 429, code="rate_limit_exceeded")
        assert (await first).status == 200


@needs_redis
async def test_a_slot_that_another_process_frees_is_found(tmp_path: Path) -> None:
    gate = Gate()
    engine = FakeEngine(gate)
    plan = policy("default: {concurrent: 1, wait: 20s}")
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    with server() as redis:
        options: dict[str, Any] = {"policy": plan, "limits": {"store": redis.url, "timeout": "10s"}}
        async with (
            engines(engine),
            serving(folders[0], {"fast": engine}, **options) as one,
            serving(folders[1], {"fast": engine}, **options) as other,
        ):
            first = asyncio.create_task(asked(one))
            await until(lambda: engine.generations == 1)
            second = asyncio.create_task(asked(other))
            await until(lambda: waiting(other) == 1)
            gate.open(2)
            assert [(await first).status, (await second).status] == [200, 200]
            await until(lambda: one.clean and other.clean)


# for a tier


async def test_those_who_wait_for_a_tier_go_on_in_turns(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with engines(engine), serving(tmp_path, {"fast": engine}) as served:
        served.mark("fast-0", "down")
        went: list[str] = []

        async def wait(name: str) -> None:
            await served.gateway.tiers.wait("fast", name[0], 20)
            went.append(name)

        waits = [asyncio.create_task(wait(name)) for name in ("a1", "a2", "a3", "b1", "c1", "b2")]
        await until(lambda: for_tier(served) == 6)
        served.mark("fast-0", "ready")
        await asyncio.gather(*waits)
        assert went == ["a1", "b1", "c1", "a2", "b2", "a3"]
        assert for_tier(served) == 0


async def test_a_wait_for_a_tier_is_told(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    plan = policy("default: {}", "{wait: 20s}")
    async with engines(engine), serving(tmp_path, {"fast": engine}, policy=plan) as served:
        served.mark("fast-0", "down")
        task = asyncio.create_task(asked(served))
        await until(lambda: for_tier(served) == 1)
        served.mark("fast-0", "ready")
        answer = await task
        assert answer.status == 200
        assert float(answer.headers["x-dualgauge-queue-seconds"]) >= 0.001


async def test_a_line_for_a_tier_is_bounded(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    options: dict[str, Any] = {"policy": policy("default: {}", "{wait: 20s}"), "limits": {"waiting": 1}}
    async with engines(engine), serving(tmp_path, {"fast": engine}, **options) as served:
        served.mark("fast-0", "down")
        first = asyncio.create_task(asked(served))
        await until(lambda: for_tier(served) == 1)
        message = check_error(await asked(served), 503, code="no_engine_ready")
        assert "too many requests wait for tier `fast`" in message
        served.mark("fast-0", "ready")
        assert (await first).status == 200


async def test_a_wait_for_a_tier_ends_in_time(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    plan = policy("default: {}", "{wait: 50ms}")
    async with engines(engine), serving(tmp_path, {"fast": engine}, policy=plan) as served:
        served.mark("fast-0", "down")
        check_error(await asked(served), 503, code="no_engine_ready")
        assert for_tier(served) == 0
