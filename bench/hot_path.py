#!/usr/bin/env python3
"""CPU of the gateway's own code for one JSON request and one streamed token, without a socket in the way.

    python bench/hot_path.py [--requests 20000] [--tokens 200000] [--profile]

Server and engine connections get transports that only record; the engine's reply is handed in as bytes. What
is left is what this project adds to the kernel's work. Prints the least of several slices, which is steadier
on a shared machine than a mean, beside the speed of a fixed loop on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from gateway.app import Public, build
from gateway.config import parse
from gateway.listeners import listener
from gateway.relay import upstream
from gateway.relay.http1 import Connection
from gateway.telemetry.logs import AccessLog

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.recorder import Recorder

CONFIG = """
model: smollm2
keys: keys.yaml
telemetry: {otlp: "http://127.0.0.1:9", sample: 0.01}
engines:
  - {name: fast-0, tier: fast, kind: external, url: "http://127.0.0.1:1", served_model: smollm2, precision: awq}
  - {name: exact-0, tier: exact, kind: external, url: "http://127.0.0.1:2", served_model: smollm2, precision: fp16}
"""
PROMPT = ("Summarise the plot of Hamlet in three sentences and say which character interests you most. " * 9)[
    :140
]
REPLY = (
    b'{"id":"chatcmpl-0123456789abcdef","object":"chat.completion","created":1790000000,"model":"smollm2",'
    b'"choices":[{"index":0,"message":{"role":"assistant","content":"The quick brown fox jumps."},'
    b'"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":24,"total_tokens":88,'
    b'"completion_tokens":64,"prompt_tokens_details":null}}'
)
CHUNK = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk",'
    b'"created":1790000000,"model":"smollm2","choices":[{"index":0,"delta":{"content":" tok42"},'
    b'"logprobs":null,"finish_reason":null}]}\n\n'
)
SLICES = 400


def request(stream: bool) -> bytes:
    body = (
        '{"model":"smollm2","messages":[{"role":"system","content":"You are helpful."},{"role":"user","content":"'
        + PROMPT
        + '"}],"max_tokens":64'
        + (',"stream":true' if stream else "")
        + "}"
    ).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:8080\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer sk-bench\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def reference() -> float:
    """Microseconds of a fixed loop of plain Python: the machine's speed, to hold the figures against."""
    start = time.process_time()
    total = 0
    for i in range(10_000):
        total += i & 7
    return (time.process_time() - start) * 1e6


class Gateway:
    """One gateway between a recorded client and a recorded engine."""

    def __init__(self, folder: Path, config: str = CONFIG, access: AccessLog | None = None) -> None:
        (folder / "keys.yaml").write_text("keys: [{name: bench, plan: default, key: sk-bench}]\n")
        self.gateway = build(parse(config, folder / "dualgauge.yaml", {}), access=access)
        for engine in self.gateway.fleet.engines:
            self.gateway.fleet.set_state(engine, "ready", "bench")
        for one in self.gateway.upstreams.values():
            one.pool._connect = self._connect  # type: ignore[method-assign]
        self._loop = asyncio.get_running_loop()
        self._streaming = False
        self._done: asyncio.Future[None] | None = None
        self._engine: upstream.Connection | None = None
        server: uvicorn.Server = listener(Public(self.gateway), 1)
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        self._client = Connection(server.config, server.server_state, {}, self._loop)
        self._client.connection_made(Recorder(self._replied))

    async def _connect(self, _loop: Any, _seconds: float) -> upstream.Connection:
        pool = next(iter(self.gateway.upstreams.values())).pool
        connection = upstream.Connection(self._loop, pool._deadlines)

        def on_write(_: bytes) -> None:
            self._engine = connection
            if not self._streaming:
                self._loop.call_soon(connection.data_received, WHOLE_REPLY)

        connection.connection_made(Recorder(on_write))
        return connection

    def _replied(self, data: bytes) -> None:
        done = self._done
        if done is not None and not done.done() and (not self._streaming or data.endswith(b"0\r\n\r\n")):
            done.set_result(None)

    async def json_requests(self, count: int) -> None:
        for _ in range(count):
            self._done = self._loop.create_future()
            self._client.data_received(JSON_REQUEST)
            await self._done

    async def begin_stream(self) -> None:
        self._streaming = True
        self._done = self._loop.create_future()
        self._client.data_received(STREAM_REQUEST)
        await asyncio.sleep(0.01)
        assert self._engine is not None
        self._engine.data_received(STREAM_HEAD + chunked(CHUNK))
        await asyncio.sleep(0.01)

    async def tokens(self, count: int) -> None:
        assert self._engine is not None
        receive, data = self._engine.data_received, chunked(CHUNK)
        for i in range(count):
            receive(data)
            if i & 15 == 0:
                await asyncio.sleep(0)

    async def end_stream(self) -> None:
        assert self._engine is not None
        assert self._done is not None
        self._engine.data_received(b"0\r\n\r\n")
        await self._done
        self._streaming = False


JSON_REQUEST, STREAM_REQUEST = request(False), request(True)
WHOLE_REPLY = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(REPLY),
    REPLY,
)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def least(run: Callable[[int], Awaitable[None]], count: int) -> tuple[float, float]:
    """Microseconds of CPU of one in `count`, and of the reference loop: each the least of several slices."""
    best = speed = 1e9
    for _ in range(SLICES):
        speed = min(speed, reference())
        start = time.process_time()
        await run(count // SLICES)
        best = min(best, (time.process_time() - start) / (count // SLICES))
    return best * 1e6, speed


async def main(args: argparse.Namespace) -> None:
    gateway = Gateway(Path(args.folder))
    profiler = cProfile.Profile() if args.profile else None
    await gateway.json_requests(500)
    if profiler:
        profiler.enable()
    best, _ = await least(gateway.json_requests, args.requests)
    if profiler:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
    print(f"JSON request    {best:8.1f} us")
    await gateway.begin_stream()
    best, speed = await least(gateway.tokens, args.tokens)
    await gateway.end_stream()
    print(f"streamed token  {best:8.1f} us")
    print(f"reference loop  {speed:8.1f} us")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--profile", action="store_true")
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        parser.set_defaults(folder=temporary)
        uvloop.run(main(parser.parse_args()))
