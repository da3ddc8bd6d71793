"""Usage in streams, as asked and as not asked, and streams whose readers leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx2
import pytest

from tests.engines_real.asks import LONG, PROSE, SHAPES, TOKENS, chat, events
from tests.engines_real.pair import MODEL, Pair, until

pytestmark = pytest.mark.engines
RUNNING = "vllm:num_requests_running"
ABORT_SECONDS = 10


@pytest.fixture(scope="module")
def client(pair: Pair) -> Iterator[httpx2.Client]:
    with pair.client() as client:
        yield client


@pytest.fixture(params=["chat", "completions"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def stream(client: httpx2.Client, name: str, **more: Any) -> tuple[list[dict[str, Any]], bool]:
    body = {"model": MODEL, "stream": True, "ignore_eos": True, **SHAPES[name].body(PROSE), **more}
    reply = client.post(SHAPES[name].path, json=body)
    assert reply.status_code == 200, reply.text
    sent, done = events(reply.text)
    return [dict(event) for event in sent], done


@pytest.mark.parametrize(
    "more",
    [{}, {"stream_options": None}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}],
    ids=["absent", "null", "empty", "false"],
)
def test_usage_that_was_not_asked_is_not_seen(client: httpx2.Client, name: str, more: dict[str, Any]) -> None:
    sent, done = stream(client, name, **more)
    assert done
    assert all(event["choices"] for event in sent)
    assert all(event.get("usage") is None for event in sent)


def test_usage_that_was_asked_comes_once_and_last(client: httpx2.Client, name: str) -> None:
    sent, done = stream(client, name, stream_options={"include_usage": True})
    assert done
    counted = [event for event in sent if event.get("usage") is not None]
    assert counted == sent[-1:]
    assert counted[0]["choices"] == []
    assert counted[0]["usage"]["completion_tokens"] == TOKENS


def test_the_gateway_counts_what_it_hides(pair: Pair, client: httpx2.Client, name: str) -> None:
    before = pair.counted("fast", "completion")
    stream(client, name)
    until("the stream is counted", lambda: pair.counted("fast", "completion") == before + TOKENS, 10)


def test_usage_without_a_stream_is_dropped(client: httpx2.Client) -> None:
    reply = client.post("/v1/chat/completions", json=chat(stream_options={"include_usage": True}))
    assert reply.status_code == 200
    assert reply.headers["x-dualgauge-dropped"] == "stream_options"


async def idle(load: Callable[[], Awaitable[float]]) -> None:
    """Wait until the engine does nothing, for much less than it would take to finish `LONG` tokens."""
    async with asyncio.timeout(ABORT_SECONDS):
        while await load() > 0:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("tier", ["fast", "exact"])
@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "json"])
async def test_a_reader_who_leaves_frees_the_engine(pair: Pair, tier: str, streamed: bool) -> None:
    """Without an abort the engine would be busy with this reply for a minute."""
    body = chat(model=f"{MODEL}:{tier}", max_tokens=LONG, ignore_eos=True, stream=streamed)

    async def running() -> float:
        return sum(await asyncio.to_thread(pair.metrics, tier, RUNNING))

    await idle(running)
    async with httpx2.AsyncClient(base_url=pair.base, timeout=120, trust_env=False) as client:
        reading = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        while await running() < 1:
            assert not reading.done()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    await idle(running)


async def test_many_readers_who_leave_free_the_engines(pair: Pair) -> None:
    """More streams than an engine runs at a time: those that wait in its queue are freed too."""
    body = chat(max_tokens=LONG, ignore_eos=True, stream=True)

    async def load() -> float:
        return sum(await asyncio.to_thread(pair.metrics, "fast", RUNNING, "vllm:num_requests_waiting"))

    async with httpx2.AsyncClient(base_url=pair.base, timeout=120, trust_env=False) as client:
        readers = [asyncio.create_task(client.post("/v1/chat/completions", json=body)) for _ in range(24)]
        while await load() < len(readers):
            assert not any(reader.done() for reader in readers)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    await idle(load)
