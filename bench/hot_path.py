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
import time
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from gateway.app import Public, build
from gateway.config import parse
from gateway.relay import upstream
from gateway.relay.http1 import Connection
from gateway.server import listener

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


class Recorder(asyncio.Transport):
    """A transport that keeps nothing; `on_write` sees what would be sent."""

    def __init__(self, on_write: Any = None) -> None:
        super().__init__()
        self._on_write = on_write

    def write(self, data: Any) -> None:
        if self._on_write is not None:
            self._on_write(data)

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...


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


async def main(args: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    folder = Path(args.folder)
    (folder / "keys.yaml").write_text("keys: [{name: bench, plan: default, key: sk-bench}]\n")
    gateway = build(parse(CONFIG, folder / "dualgauge.yaml", {}))
    for engine in gateway.fleet.engines:
        gateway.fleet.set_state(engine, "ready", "bench")
    replies = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        len(REPLY),
        REPLY,
    )
    streaming = False
    current: upstream.Connection | None = None

    async def connect(pool: upstream.Pool, loop_: Any, _seconds: float) -> upstream.Connection:
        connection = upstream.Connection(loop_, pool._deadlines)

        def on_write(_: bytes) -> None:
            nonlocal current
            current = connection
            if not streaming:
                loop_.call_soon(connection.data_received, replies)

        connection.connection_made(Recorder(on_write))
        return connection

    upstream.Pool._connect = connect  # type: ignore[method-assign]
    server: uvicorn.Server = listener(Public(gateway), 1)
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    done: asyncio.Future[None] | None = None
    written = 0

    def on_reply(data: bytes) -> None:
        nonlocal written
        written += 1
        if done is not None and not done.done() and (not streaming or data.endswith(b"0\r\n\r\n")):
            done.set_result(None)

    protocol = Connection(server.config, server.server_state, {}, loop)
    protocol.connection_made(Recorder(on_reply))
    one = request(False)
    profiler = cProfile.Profile() if args.profile else None

    async def json_requests(count: int) -> None:
        nonlocal done
        for _ in range(count):
            done = loop.create_future()
            protocol.data_received(one)
            await done

    await json_requests(500)
    if profiler:
        profiler.enable()
    best = speed = 1e9
    for _ in range(SLICES):
        speed = min(speed, reference())
        start = time.process_time()
        await json_requests(args.requests // SLICES)
        best = min(best, (time.process_time() - start) / (args.requests // SLICES))
    if profiler:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
    print(f"JSON request    {best * 1e6:8.1f} us")
    streaming = True
    done = loop.create_future()
    protocol.data_received(request(True))
    await asyncio.sleep(0.01)
    assert current is not None
    connection = current
    connection.data_received(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        + chunked(CHUNK)
    )
    await asyncio.sleep(0.01)
    data = chunked(CHUNK)
    best = 1e9
    for _ in range(SLICES):
        speed = min(speed, reference())
        start = time.process_time()
        for i in range(args.tokens // SLICES):
            connection.data_received(data)
            if i & 15 == 0:
                await asyncio.sleep(0)
        best = min(best, (time.process_time() - start) / (args.tokens // SLICES))
    print(f"streamed token  {best * 1e6:8.1f} us")
    connection.data_received(b"0\r\n\r\n")
    await done
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
