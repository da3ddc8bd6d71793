"""The store of leases in Redis, on servers of the tests' own."""

import asyncio
import contextlib
import logging
import socket
import struct
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from gateway.cli.servers import COMMANDS
from gateway.config import LimitsPart, Seconds
from gateway.errors import LimitExceeded, LimitsUnavailable, SlotsTaken
from gateway.limits import NO_PLAN, Ask, Lease, claim
from gateway.limits import redis as redis_store
from gateway.limits.redis import RedisStore
from policies.plan import Plan
from policies.units import Rate
from tests.support.client import LOOP_TICK, until
from tests.support.redis import SERVER, Server, free_port, needs_redis, server

pytestmark = needs_redis

# On a busy machine a server may be late; what a slow one does to requests has tests of its own.
PATIENT = Seconds(10)


def per_day(**amounts: int) -> dict[str, Any]:
    return {kind: (Rate(amount, 86_400_000.0),) for kind, amount in amounts.items()}


PLAN = Plan("p", **per_day(requests=100, tokens=1000), concurrent=4)


def asking(plan: Plan = PLAN, prompt: int = 0, output: int | None = 0, **more: Any) -> Ask:
    fields = {"tenant": "t", "plan": plan, "tier": "fast", "model": "m"} | more
    return Ask(**fields, prompt=prompt, output=output)


async def take(store: RedisStore, *args: Any, **more: Any) -> Lease:
    reserved = store.reserve(asking(*args, **more))
    return await claim(reserved) if isinstance(reserved, asyncio.Future) else reserved


@contextlib.asynccontextmanager
async def running(url: str, name: str = "a", **settings: Any) -> AsyncIterator[RedisStore]:
    part = LimitsPart(store=url, **{"timeout": PATIENT, **settings})
    store = RedisStore(part, workers=1, process=name, clock=time.monotonic)
    async with store.running():
        yield store


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    with server() as one:
        yield one


@pytest.fixture
def redis(shared: Server) -> Iterator[Redis]:
    with contextlib.closing(shared.client()) as client:
        client.flushall()
        yield client


def taken(redis: Redis, holder: str = "t:t", root: str = "t:t") -> dict[str, float]:
    """What is taken of each bucket, when it was last written."""
    kept: Any = redis.hgetall(f"dualgauge:{{{root}}}:{holder}:buckets")
    return {field.decode(): struct.unpack("<dddd", value)[0] for field, value in kept.items()}


def leases(redis: Redis, holder: str = "t:t", root: str = "t:t") -> int:
    return int(redis.zcard(f"dualgauge:{{{root}}}:{holder}:leases"))  # type: ignore[arg-type]


async def test_a_lease_takes_from_all_limits_and_gives_back(shared: Server, redis: Redis) -> None:
    async with running(shared.url) as store:
        lease = await take(store, prompt=50, output=200)
        assert taken(redis) == {"requests": 1, "tokens": 250}
        assert (leases(redis), store.in_use()) == (1, 1)
        assert b"x-ratelimit-remaining-tokens: 750\r\n" in lease.headers
        lease.settle(50, 20)
        lease.settle(50, 900)
        await until(lambda: leases(redis) == 0)
        assert taken(redis) == {"requests": pytest.approx(1), "tokens": pytest.approx(70, abs=0.01)}
        assert store.in_use() == 0


async def test_what_one_limit_refuses_is_charged_on_none(shared: Server, redis: Redis) -> None:
    async with running(shared.url) as store:
        with pytest.raises(LimitExceeded) as caught:
            await take(store, prompt=500, output=501)
        assert caught.value.error_code == "request_exceeds_limit"
        assert b"x-ratelimit-remaining-tokens: 1000\r\n" in caught.value.headers
        assert (taken(redis), leases(redis), store.in_use()) == ({}, 0, 0)


async def test_slots_are_refused_and_cost_nothing(shared: Server, redis: Redis) -> None:
    async with running(shared.url) as store:
        held = [await take(store) for _ in range(4)]
        with pytest.raises(SlotsTaken):
            await take(store)
        assert taken(redis)["requests"] == pytest.approx(4, abs=0.01)
        for lease in held:
            lease.refund()
        (await take(store)).refund()


async def test_a_refill_is_by_the_servers_clock_and_retry_after_is_true(shared: Server, redis: Redis) -> None:
    plan = Plan("p", requests=(Rate(20, 1.0),))
    async with running(shared.url) as store:
        asked = [take(store, plan) for _ in range(60)]
        refused = [
            r for r in await asyncio.gather(*asked, return_exceptions=True) if isinstance(r, LimitExceeded)
        ]
        wait = refused[-1].retry_after
        assert wait is not None
        assert 0 < wait <= 0.05 + 1e-5
        await asyncio.sleep(wait + LOOP_TICK)
        (await take(store, plan)).refund()


async def test_of_two_processes_exactly_what_fits_is_admitted(shared: Server, redis: Redis) -> None:
    plan = Plan("p", **per_day(tokens=1000))
    async with running(shared.url, "a") as one, running(shared.url, "b") as other:
        results = await asyncio.gather(
            *(take(store, plan, 50, 200) for store in (one, other) for _ in range(5)), return_exceptions=True
        )
        held = [result for result in results if not isinstance(result, BaseException)]
        assert len(held) == 4
        assert all(isinstance(r, LimitExceeded) for r in results if isinstance(r, BaseException))
        for lease in held:
            lease.settle(50, 20)
        await until(lambda: leases(redis) == 0)
        assert taken(redis)["tokens"] == pytest.approx(280, abs=0.01)


async def test_the_tier_that_answered_is_charged(shared: Server, redis: Redis) -> None:
    rates = {"exact": (Rate(1000, 1e9),), "fast": (Rate(1000, 1e9),)}
    plan = Plan("p", tokens=(Rate(9000, 1e9),), tier_tokens=rates, weights={"exact": 4.0}, cached=0.5)
    async with running(shared.url) as store:
        lease = await take(store, plan, 100, 100, tier="exact")
        assert taken(redis) == {"tokens": 800, "exact_tokens": 200}
        lease.settle(100, 50, cached=40, tier="fast")
        await until(lambda: leases(redis) == 0)
        expected = {"tokens": 130, "exact_tokens": 0, "fast_tokens": 130}
        assert taken(redis) == {kind: pytest.approx(amount, abs=0.001) for kind, amount in expected.items()}


async def test_an_organisation_holds_beside_its_tenants(shared: Server, redis: Redis) -> None:
    team = Plan("team", **per_day(requests=3), concurrent=2)
    inside = {"organisation": "acme", "shared": team}
    async with running(shared.url) as store:
        first, second = [await take(store, tenant=tenant, **inside) for tenant in ("a", "b")]
        with pytest.raises(SlotsTaken, match="plan `team` allows no more"):
            await take(store, tenant="c", **inside)
        first.refund()
        (await take(store, tenant="c", **inside)).refund()
        with pytest.raises(LimitExceeded, match="plan `team` allows 3 requests"):
            await take(store, tenant="a", **inside)
        second.refund()
        await until(lambda: leases(redis, "o:acme", "o:acme") == 0)
        assert leases(redis, "t:b", "o:acme") == 0


async def test_an_edited_plan_keeps_the_share_that_is_left(shared: Server, redis: Redis) -> None:
    async with running(shared.url) as store:
        lease = await take(store, Plan("p", **per_day(tokens=1000)), output=500)
        (await take(store, Plan("p", **per_day(tokens=100)))).refund()
        assert taken(redis)["tokens"] == pytest.approx(50, abs=0.01)
        lease.refund()
        await until(lambda: taken(redis)["tokens"] == 0)


async def test_buckets_that_are_full_are_not_kept(shared: Server, redis: Redis) -> None:
    plan = Plan("p", requests=(Rate(100, 0.5),), tokens=(Rate(1000, 0.5),))
    async with running(shared.url) as store:
        (await take(store, plan, 10, 500)).settle(10, 10)
        await until(lambda: redis.keys("dualgauge:{t:t}:*:buckets") == [])
        assert b"remaining-tokens: 1000" in (await take(store, plan)).headers


async def test_without_limits_the_server_is_not_asked(shared: Server, redis: Redis) -> None:
    async with running(shared.url) as store:
        lease = await take(store, NO_PLAN)
        assert (store.in_use(), lease.headers) == (1, b"")
        lease.settle(10, 10)
        assert store.in_use() == 0
        assert redis.keys("dualgauge:{t:*") == []


async def test_what_is_asked_in_one_tick_goes_out_at_once(shared: Server, redis: Redis) -> None:
    async with running(shared.url) as store:
        before: Any = redis.info("stats")
        held = await asyncio.gather(*(take(store, tenant=f"t{n}") for n in range(50)))
        after: Any = redis.info("stats")
        reads = after["total_reads_processed"] - before["total_reads_processed"]
        assert reads <= 5
        assert store.fallbacks() == 0
        for lease in held:
            lease.refund()


async def test_a_client_that_leaves_while_it_is_asked_for_leaves_no_lease(
    shared: Server, redis: Redis
) -> None:
    async with running(shared.url) as store:
        task = asyncio.create_task(take(store, output=400))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: "tokens" in taken(redis) and leases(redis) == 0)
        assert taken(redis)["tokens"] == 0
        assert store.in_use() == 0


async def test_a_promise_that_is_kept_as_its_caller_leaves_is_given_back(
    shared: Server, redis: Redis
) -> None:
    async with running(shared.url) as store:
        promise = store.reserve(asking(output=400))
        assert isinstance(promise, asyncio.Future)
        task = asyncio.create_task(claim(promise))
        promise.add_done_callback(lambda _: task.cancel())
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: leases(redis) == 0)
        assert store.in_use() == 0


@pytest.mark.parametrize("how", ["script flush", "flushall"])
async def test_a_lost_script_is_healed(shared: Server, redis: Redis, how: str) -> None:
    async with running(shared.url) as store:
        held = await take(store, output=100)
        if how == "script flush":
            redis.script_flush()
        else:
            redis.flushall()
            redis.script_flush()
        results = await asyncio.gather(*(take(store, output=10) for _ in range(3)))
        held.settle(0, 50)
        for lease in results:
            lease.settle(0, 10)
        await until(lambda: leases(redis) == 0)
        expected = 80 if how == "script flush" else 30
        assert taken(redis)["tokens"] == pytest.approx(expected, abs=0.01)
        assert (store.up(), store.fallbacks()) == (True, 0)


async def test_a_lease_of_a_process_that_died_expires(
    shared: Server, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "LEASE_SECONDS", 0.2)
    plan = Plan("p", concurrent=1)
    async with running(shared.url, "dies") as dies, running(shared.url, "lives") as lives:
        lost = await take(dies, plan)
        with pytest.raises(SlotsTaken):
            await take(lives, plan)
        await asyncio.sleep(0.25)
        kept = await take(lives, plan)
        lost.settle(1000, 1000)
        await asyncio.sleep(0.05)
        assert leases(redis) == 1
        kept.refund()


async def test_a_long_stream_keeps_its_lease(
    shared: Server, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "LEASE_SECONDS", 0.6)
    monkeypatch.setattr(redis_store, "RENEW_SECONDS", 0.1)
    plan = Plan("p", concurrent=1)
    async with running(shared.url) as store:
        lease = await take(store, plan)
        await asyncio.sleep(1.2)
        with pytest.raises(SlotsTaken):
            await take(store, plan)
        lease.refund()
        await until(lambda: leases(redis) == 0)


async def test_leases_are_settled_before_the_process_ends(shared: Server, redis: Redis) -> None:
    async with running(shared.url) as store:
        lease = await take(store, output=400)
        lease.settle(0, 5)
    assert leases(redis) == 0
    assert taken(redis)["tokens"] == pytest.approx(5, abs=0.01)


async def test_an_answer_that_cannot_be_used_delays_no_other(
    shared: Server, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(shared.url, on_store_failure="closed") as store:
        # More than a double holds: no dialect lets it pass.
        promises = [store.reserve(asking(output=output)) for output in (10**400, 1)]
        assert all(isinstance(promise, asyncio.Future) for promise in promises)
        async with asyncio.timeout(10):
            results = await asyncio.gather(*promises, return_exceptions=True)  # type: ignore[arg-type]
        assert isinstance(results[0], LimitsUnavailable)
        results[1].refund()  # type: ignore[union-attr]
        assert "cannot be used" in caplog.text


async def test_processes_are_counted(shared: Server, redis: Redis) -> None:
    async with running(shared.url, "a"), running(shared.url, "b"):
        assert redis.zrange("dualgauge:{processes}", 0, -1) == [b"a", b"b"]


# ways to reach a server


async def test_over_tcp_with_a_user_who_may_do_little(tmp_path: Path) -> None:
    users = tmp_path / "users.acl"
    rights = " ".join(f"+{command}" for command in COMMANDS.split())
    users.write_text(f"user default off\nuser gate on >secret ~dualgauge:* -@all {rights}\n")
    port = free_port()
    with _unchecked("--aclfile", str(users), port=port):
        async with running(f"redis://gate:secret@127.0.0.1:{port}/0") as store:
            await until(store.up)
            (await take(store, output=5)).settle(1, 1)
            assert store.fallbacks() == 0
        async with running(f"redis://gate:wrong@127.0.0.1:{port}/0", on_store_failure="closed") as store:
            assert not store.up()
            with pytest.raises(LimitsUnavailable):
                await take(store)


@contextlib.contextmanager
def _unchecked(*options: str, port: int) -> Iterator[None]:
    """A server that not everybody may ping."""
    assert SERVER is not None
    command = [SERVER, "--port", str(port), "--save", "", "--logfile", "/dev/null", *options]
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            time.sleep(0.01)
        yield
    finally:
        process.kill()
        process.wait()


async def test_over_tls() -> None:
    tls = Path(__file__).parents[1] / "support" / "tls"
    port = free_port()
    files = ("--tls-cert-file", str(tls / "cert.pem"), "--tls-key-file", str(tls / "key.pem"))
    options = ("--tls-port", str(port), *files, "--tls-auth-clients", "no")
    with server(*options):
        url = f"rediss://localhost:{port}/0?ssl_ca_certs={tls / 'cert.pem'}"
        async with running(url) as store:
            await until(store.up)
            (await take(store, output=5)).settle(1, 1)
        async with running(f"rediss://localhost:{port}/0", on_store_failure="closed") as store:
            assert not store.up()  # nobody vouches for its certificate


async def test_a_cluster_keeps_each_tenant_with_one_master() -> None:
    ports = [free_port() for _ in range(3)]
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(server("--cluster-enabled", "yes", port=port)) for port in ports]
        addresses = [f"127.0.0.1:{port}" for port in ports]
        for index, node in enumerate(nodes):
            client = stack.enter_context(contextlib.closing(node.client()))
            client.cluster("ADDSLOTS", *range(index * 5462, min((index + 1) * 5462, 16384)))
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", ports[0])
        clients = [stack.enter_context(contextlib.closing(node.client())) for node in nodes]
        await until(
            lambda: all("cluster_state:ok" in str(c.execute_command("CLUSTER", "INFO")) for c in clients), 20
        )
        async with running(f"redis+cluster://{','.join(addresses)}") as store:
            await until(store.up, 10)
            team = Plan("team", **per_day(requests=1000))
            held = [
                await take(store, prompt=10, tenant=f"t{n}", organisation=f"o{n % 7}", shared=team)
                for n in range(30)
            ]
            assert store.fallbacks() == 0
            kept = [len(client.keys("dualgauge:{o:*")) for client in clients]
            assert all(kept)
            for lease in held:
                lease.settle(1, 1)
            await until(lambda: store.in_use() == 0 and not any(c.keys("*:leases") for c in clients))
            nodes[1].kill()
            await until(lambda: not store.up(), 10)
            outcomes = [
                await take(store, tenant=f"t{n}", organisation=f"o{n % 7}", shared=team) for n in range(7)
            ]
            kinds = {type(lease).__name__ for lease in outcomes}
            assert kinds == {"RedisLease", "MemoryLease"}  # the other masters' tenants do not notice
            for lease in outcomes:
                lease.refund()


async def test_a_cluster_that_is_not_there_is_found_later() -> None:
    port = free_port()
    async with running(f"redis+cluster://127.0.0.1:{port}") as store:
        assert not store.up()
        (await take(store)).refund()
        assert store.fallbacks() == 1
        with server("--cluster-enabled", "yes", port=port) as node:
            with contextlib.closing(node.client()) as client:
                client.cluster("ADDSLOTS", *range(16384))
            await until(store.up, 20)
            (await take(store)).refund()
            assert store.fallbacks() == 1


async def test_sentinels_name_the_master_and_its_successor(caplog: pytest.LogCaptureFixture) -> None:
    master_port, replica_port, sentinel_port = free_port(), free_port(), free_port()
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(server(port=master_port))
        replica = stack.enter_context(server("--replicaof", "127.0.0.1", str(master_port), port=replica_port))
        with contextlib.closing(replica.client()) as client:
            await until(lambda: client.info("replication")["master_link_status"] == "up", 10)  # type: ignore[index]
        folder = replica.folder
        (folder / "sentinel.conf").write_text(
            f"port {sentinel_port}\ndir {folder}\nlogfile {folder}/sentinel.log\n"
            f"sentinel monitor main 127.0.0.1 {master_port} 1\n"
            "sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 2000\n"
        )
        assert SERVER is not None
        sentinel = subprocess.Popen([SERVER, str(folder / "sentinel.conf"), "--sentinel"])
        stack.callback(sentinel.wait)
        stack.callback(sentinel.kill)
        url = f"redis+sentinel://127.0.0.1:{sentinel_port}/main/0"
        async with running(url, on_store_failure="closed") as store:
            await until(store.up, 10)
            with contextlib.closing(Redis(port=sentinel_port)) as client:
                await until(lambda: int(client.sentinel_master("main")["num-slaves"]) == 1, 15)  # type: ignore[index]
            lease = await take(store, output=100)
            master.kill()
            lease.settle(0, 10)
            await until(lambda: not store.up(), 10)
            with pytest.raises(LimitsUnavailable):
                await take(store)
            await until(store.up, 25)
            (await take(store, output=100)).settle(0, 10)
            with contextlib.closing(replica.client()) as client:
                await until(lambda: leases(client) == 0)
        told = [r.message for r in caplog.records if r.levelno == logging.WARNING]
        assert len(told) == 2
