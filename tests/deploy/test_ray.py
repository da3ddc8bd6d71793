"""The Ray Serve application on a Ray of one node, with stand-ins for the engines and a real Redis."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import yaml

from gateway.config import read
from tests.engines import fake_engine
from tests.support.client import Reply, Wire, request
from tests.support.ray_cluster import FOLDER, Cluster, cluster, needs_ray, shipped, wait
from tests.support.redis import needs_redis, server
from tests.support.serving import free_port

STREAMS = 100
MANY = 16
PACE = 0.2
LONG = 100_000
CHAT = "/v1/chat/completions"
BEGUN = b"data: {"
POLICY = """
version: 1
rules: [{name: all, send: fast, if_unavailable: fail}]
plans: {default: {requests: 100000/d, concurrent: 10000}}
"""
DEPLOYMENT = """
admin: 127.0.0.1:%d
model: smollm2
policy: policy.yaml
limits: {store: "%s"}
health: {every: 500ms}
shutdown_grace: 40s
engines:
  - {name: fast, tier: fast, kind: vllm, model: ./model, precision: awq, args: [--counts, --pace, "%g"]}
  - {name: exact, tier: exact, kind: vllm, model: ./model, precision: bf16, args: [--counts, --pace, "%g"]}
"""


def small(deployments: dict[str, Any]) -> None:
    """Room for all of it on any machine, and an autoscaler that is in a hurry."""
    for one in deployments.values():
        one["ray_actor_options"]["num_cpus"] = 0.1
    del deployments["fast"]["autoscaling_config"]
    deployments["fast"]["num_replicas"] = 2
    hurry = {"upscale_delay_s": 1, "downscale_delay_s": 2, "metrics_interval_s": 1, "look_back_period_s": 2}
    deployments["exact"]["autoscaling_config"] |= {"target_ongoing_requests": 4, **hurry}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("ray")
    python = folder / "python"
    script = shlex.quote(str(Path(fake_engine.__file__ or "")))
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {script} "$@"\n')
    python.chmod(0o755)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "policy.yaml").write_text(POLICY)
    with server() as redis:
        file = folder / "dualgauge.yaml"
        file.write_text(DEPLOYMENT % (free_port(), redis.url, PACE, PACE))
        with cluster(file, {"DUALGAUGE_VLLM_PYTHON": str(python)}, cpus=4) as one:
            one.deploy(small)
            wait("all replicas run", lambda: one.running(gateway=2, fast=2, exact=1))
            wait("all gateways know both tiers", lambda: asyncio.run(known(one.port)))
            yield one


async def known(port: int) -> bool:
    """Whether both tiers answer, in a row that hardly leaves a gateway out."""
    engines: list[str] = []
    for model in ["smollm2:fast", "smollm2:exact"] * 8:
        async with await Wire.open(port) as wire:
            wire.send(CHAT, chat(model, stream=False))
            engines.append((await wire.reply()).headers.get("x-dualgauge-engine", ""))
    return all(engines)


def chat(model: str = "smollm2:fast", tokens: int = 5, *, stream: bool = True) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hi"}]
    return {"model": model, "messages": messages, "max_tokens": tokens, "stream": stream}


def whole(reply: Reply) -> bool:
    streamed = reply.headers.get("content-type", "").startswith("text/event-stream")
    done = not streamed or reply.body.endswith(b"data: [DONE]\n\n")
    return reply.status == 200 and reply.complete and done


def begun(reply: Reply) -> bool:
    """Whether a stream had an event, or the head of a whole reply, which was complete by then, was there."""
    return BEGUN in reply.body or (reply.status == 200 and "content-length" in reply.headers)


class Load:
    """Requests from `many` clients for as long as a block runs: what became of each."""

    def __init__(self, port: int, body: dict[str, Any], many: int = MANY) -> None:
        self.replies: list[Reply] = []
        self._port = port
        self._body = body
        self._many = many

    async def __aenter__(self) -> Self:
        self._stop = asyncio.Event()
        self._clients = [asyncio.create_task(self._ask()) for _ in range(self._many)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        await asyncio.gather(*self._clients)

    async def _ask(self) -> None:
        while not self._stop.is_set():
            async with await Wire.open(self._port) as wire:
                head, end, body = request(CHAT, self._body).partition(b"\r\n\r\n")
                wire.raw(head + end)
                await asyncio.sleep(0.01)  # as two packets: most clients write them one by one
                wire.raw(body)
                self.replies.append(await wire.reply())

    @property
    def failed(self) -> Counter[str]:
        """Requests that ended badly before their reply had begun."""
        return Counter(
            f"{reply.status} {bytes(reply.body[:200])!r}"
            for reply in self.replies
            if not whole(reply) and not begun(reply)
        )


async def happens(what: str, condition: Callable[[], bool], seconds: float = 90) -> None:
    await asyncio.to_thread(wait, what, condition, seconds)


async def failed_while_one_is_replaced(served: Cluster, name: str, body: dict[str, Any]) -> Counter[str]:
    """Requests that failed while a replica of this deployment was killed, and another one came."""
    async with Load(served.port, body) as load:
        await asyncio.sleep(2)
        victim, pid = next(iter(served.replicas(name).items()))
        os.kill(pid, signal.SIGKILL)
        at = len(load.replies)
        await happens("it is replaced", lambda: victim not in served.replicas(name))
        await happens("another runs", lambda: served.running(**{name: 2}))
    assert len(load.replies) > at
    return load.failed


@needs_ray
@needs_redis
@pytest.mark.parametrize("tier", ["fast", "exact"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_tier_answers(served: Cluster, tier: str, stream: bool) -> None:
    async def ask() -> None:
        async with await Wire.open(served.port) as wire:
            wire.send(CHAT, chat(f"smollm2:{tier}", stream=stream))
            reply = await wire.reply()
        assert (reply.status, reply.headers["x-dualgauge-tier"]) == (200, tier)
        assert reply.headers["x-dualgauge-engine"].startswith(f"{tier}-")
        assert whole(reply)

    asyncio.run(ask())


@needs_ray
@needs_redis
def test_a_stream_arrives_as_it_is_made(served: Cluster) -> None:
    async def ask() -> None:
        async with await Wire.open(served.port) as wire:
            wire.send(CHAT, chat(tokens=1000))
            assert b"[DONE]" not in await wire.until(BEGUN, times=5)

    asyncio.run(ask())


@needs_ray
@needs_redis
def test_a_cancel_is_seen_by_the_engine(served: Cluster) -> None:
    async def ask() -> None:
        async with await Wire.open(served.port) as wire:
            wire.send(CHAT, chat(tokens=1000))
            await wire.until(BEGUN)
            name = wire.answer.headers["x-dualgauge-engine"]
            log = served.folder / "ray" / "session_latest" / "logs" / f"{name}.log"
            before = log.read_text().count("aborted")
            wire.leave()
        await happens("the engine sees it", lambda: log.read_text().count("aborted") > before, 5)

    asyncio.run(ask())


@needs_ray
@needs_redis
def test_limits_are_counted_over_all_gateways(served: Cluster) -> None:
    async def ask() -> None:
        async def left() -> int:
            async with await Wire.open(served.port) as wire:
                wire.send(CHAT, chat(stream=False))
                return int((await wire.reply()).headers["x-ratelimit-remaining-requests"])

        # Two that counted for themselves would tell each figure twice.
        assert len(set(await asyncio.gather(*(left() for _ in range(20))))) > 15

    asyncio.run(ask())


@needs_ray
@needs_redis
def test_an_engine_killed_under_load_fails_no_request_that_had_not_begun(served: Cluster) -> None:
    assert not asyncio.run(failed_while_one_is_replaced(served, "fast", chat()))


@needs_ray
@needs_redis
@pytest.mark.parametrize("kind", ["stream", "whole", "long"])
@pytest.mark.parametrize("once", range(3))
def test_a_gateway_killed_under_load_fails_no_request_that_had_not_begun(
    served: Cluster, kind: str, once: int
) -> None:
    body = chat(tokens=1, stream=kind == "stream")
    if kind == "long":
        body["messages"][0]["content"] *= LONG // 2
    assert not asyncio.run(failed_while_one_is_replaced(served, "gateway", body))


@needs_ray
@needs_redis
def test_a_rolling_restart_cuts_no_stream_and_refuses_no_request(served: Cluster) -> None:
    def restart(deployments: dict[str, Any]) -> None:
        small(deployments)
        variables = deployments["gateway"]["ray_actor_options"]["runtime_env"]["env_vars"]
        variables["DUALGAUGE_GENERATION"] = str(time.time())

    async def ask() -> None:
        before = set(served.replicas("gateway"))

        def replaced() -> bool:
            return served.running(gateway=2) and not before & set(served.replicas("gateway"))

        wires = [await Wire.open(served.port) for _ in range(STREAMS)]
        for wire in wires:
            wire.send(CHAT, chat(tokens=150))
        await asyncio.gather(*(wire.until(BEGUN) for wire in wires))
        async with Load(served.port, chat(), many=4) as load:
            await asyncio.to_thread(served.deploy, restart)
            replies = await asyncio.gather(*(wire.reply() for wire in wires))
            await happens("new ones replace the old", replaced)
        for wire in wires:
            wire.leave()
        assert Counter(map(whole, replies)) == {True: STREAMS}
        assert Counter(map(whole, load.replies)) == {True: len(load.replies)}

    asyncio.run(ask())


@needs_ray
@needs_redis
def test_a_tier_grows_under_load_and_shrinks_without_cutting_a_stream(served: Cluster) -> None:
    async def ask() -> None:
        async with Load(served.port, chat("smollm2:exact", 40)) as load:
            await happens("another engine comes", lambda: len(served.replicas("exact")) == 2)
            await happens("both answer", lambda: len(engines(load.replies)) == 2)
        async with Load(served.port, chat("smollm2:exact", 60), many=2) as load:
            await happens("one goes", lambda: served.running(exact=1))
        assert Counter(map(whole, load.replies)) == {True: len(load.replies)}

    asyncio.run(ask())


def engines(replies: Iterable[Reply]) -> set[str]:
    return {reply.headers["x-dualgauge-engine"] for reply in replies}


# What needs no Ray.


def test_the_files_name_the_same_engines() -> None:
    config = read(FOLDER / "dualgauge.yaml")
    (app,) = yaml.safe_load((FOLDER / "serve.yaml").read_text())["applications"]
    names = [spec.name for spec in config.engines]
    assert [one["name"] for one in app["deployments"]] == ["gateway", *names]
    assert config.limits.store.startswith("redis://")


def test_the_file_listens_where_serve_does() -> None:
    options = yaml.safe_load((FOLDER / "serve.yaml").read_text())["http_options"]
    assert read(FOLDER / "dualgauge.yaml").listen.port == options["port"]


def test_a_stream_outlasts_a_change_of_replicas() -> None:
    longest = max(spec.timeouts.total for spec in read(FOLDER / "dualgauge.yaml").engines)
    assert int(shipped()["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) > longest


def test_the_version_of_ray_is_the_extras() -> None:
    text = (FOLDER.parents[1] / "pyproject.toml").read_text()
    assert re.search(r'^ray = \["ray\[serve\]>=2\.60', text, re.MULTILINE)
