#!/usr/bin/env python3
"""What telemetry costs: microseconds of CPU of one JSON request and of one streamed token, part by part.

    python bench/telemetry.py [--rounds 30] [--requests 3000]

The same gateway as in `hot_path.py`, with each part on by itself and with all: metrics, the access log (JSON
lines to a file), traces of 1 % of the requests to a collector that takes them. All threads count. Each variant
has a process of its own (in one, Python could not specialise its code for any), and they take turns; shown are
medians, and medians of the differences within a round, which a machine that is now faster and now slower does
not change.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop
from hot_path import CONFIG, Gateway, reference
from rich.console import Console
from rich.progress import track

from gateway.config import LogsPart
from gateway.server import settle
from gateway.telemetry.ended import Ended
from gateway.telemetry.logs import configure

COLLECTOR = """
import http.server

class Collector(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
print(server.server_port, flush=True)
server.serve_forever()
"""
PLAIN = CONFIG.replace('telemetry: {otlp: "http://127.0.0.1:9", sample: 0.01}\n', "")
assert PLAIN != CONFIG


VARIANTS = ("nothing", "metrics", "access log", "traces, none sampled", "traces, 1 %", "everything")
ROUNDS_OF_A_PROCESS = 3
"""Two processes of the same variant differ by microseconds, with where their memory lies: no figure may hang on
one of them."""


class NoMetrics:
    """In place of a gateway's metrics: nothing is counted."""

    def count(self, record: Any) -> None: ...
    def overhead(self, seconds: float) -> None: ...
    def pace(self, tier: str, clock: Any) -> Any:
        return lambda: None


class NobodyAsks(Ended):
    """Where there are neither metrics nor a log."""

    def add(self, record: Any) -> None: ...


class Variant:
    """One gateway, of which some of the telemetry is on."""

    def __init__(self, name: str, folder: Path, port: int) -> None:
        config = PLAIN
        if "traces" in name or name == "everything":
            share = "0" if "none" in name else "0.01"
            config = CONFIG.replace("127.0.0.1:9", f"127.0.0.1:{port}").replace("0.01", share)
        # As in every serving process, a thread waits for messages. Python takes 1 us more for each request as
        # soon as there is a second thread, whatever it does: that is no telemetry's.
        wanted = name in ("access log", "everything")
        access = configure(LogsPart(format="json", access=wanted), (folder / "log").open("w"))
        if access is not None:
            access.start()
        self.name = name
        self._access = access
        self._one = Gateway(folder, config, access)
        gateway = self._one.gateway
        if name not in ("metrics", "everything"):
            gateway.metrics = NoMetrics()  # type: ignore[assignment]
            gateway.ended = Ended(gateway.metrics, access)
        if name in ("nothing", "traces, none sampled", "traces, 1 %"):
            gateway.ended = NobodyAsks(gateway.metrics, None)

    async def request(self, count: int) -> float:
        """Microseconds of CPU of a request, all threads taken together, what they do behind it too."""
        start = time.process_time()
        await self._one.json_requests(count)
        self._one.gateway.ended.tell()
        while self._access is not None and self._access.waiting:
            time.sleep(0.01)
        tracer = self._one.gateway.tracer
        if tracer is not None:
            tracer.sender.flush()
            assert tracer.sender.dropped == 0
        return (time.process_time() - start) / count * 1e6

    async def token(self, count: int) -> float:
        """Microseconds of CPU of a streamed token."""
        await self._one.begin_stream()
        start = time.process_time()
        await self._one.tokens(count)
        spent = (time.process_time() - start) / count * 1e6
        await self._one.end_stream()
        return spent


async def serve(name: str, folder: Path, port: int) -> None:
    """Measure one variant whenever standard input says so: a line has how many requests and tokens."""
    variant = Variant(name, folder, port)
    await variant.request(500)
    await variant.token(5_000)
    settle()
    for line in sys.stdin:
        requests, tokens = map(int, line.split())
        # Whoever comes behind another finds that one's data in the caches.
        await variant.request(50)
        request, speed = await variant.request(requests), reference()
        print(request, await variant.token(tokens), speed, flush=True)


def measure(rounds: int, requests: int, folder: Path, port: int) -> dict[str, list[tuple[float, ...]]]:
    """By variant, what a request, a token and the reference loop took in each round."""
    figures: dict[str, list[tuple[float, ...]]] = {name: [] for name in VARIANTS}
    order = list(VARIANTS)
    with contextlib.ExitStack() as stack:
        processes: dict[str, subprocess.Popen[str]] = {}
        for number in track(range(rounds), "measuring", console=Console(stderr=True)):
            if number % ROUNDS_OF_A_PROCESS == 0:
                stack.close()
                processes = {name: stack.enter_context(_process(name, folder, port)) for name in VARIANTS}
            random.shuffle(order)
            for name in order:
                one = processes[name]
                assert one.stdin is not None
                assert one.stdout is not None
                print(requests, requests * 3, file=one.stdin)
                figures[name].append(tuple(map(float, one.stdout.readline().split())))
    return figures


def _process(name: str, folder: Path, port: int) -> subprocess.Popen[str]:
    (folder / name).mkdir(exist_ok=True)
    command = [sys.executable, __file__, "--variant", name, str(folder / name), str(port)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)


def show(figures: dict[str, list[tuple[float, ...]]]) -> None:
    base = figures["nothing"]
    print(f"{'':22} {'JSON request':>20} {'streamed token':>24}")
    for name, found in figures.items():
        columns = []
        for own, plain in list(zip(zip(*found, strict=True), zip(*base, strict=True), strict=True))[:2]:
            more = statistics.median(a - b for a, b in zip(own, plain, strict=True))
            columns.append(f"{statistics.median(own):9.2f} us {more:+7.2f}")
        print(f"{name:22} {columns[0]:>20} {columns[1]:>24}")
    speeds = [speed for found in figures.values() for *_, speed in found]
    print(f"reference loop {statistics.median(speeds):.0f} us, {min(speeds):.0f} at best")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--requests", type=int, default=3_000, help="in each round")
    parser.add_argument("--variant", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.variant:
        name, place, to = given.variant
        uvloop.run(serve(name, Path(place), int(to)))
        sys.exit()
    collector = subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE, text=True)
    try:
        assert collector.stdout is not None
        port = int(collector.stdout.readline())
        with tempfile.TemporaryDirectory() as temporary:
            show(measure(given.rounds, given.requests, Path(temporary), port))
    finally:
        collector.kill()
