#!/usr/bin/env python3
"""What telemetry costs: microseconds of CPU of one JSON request and of one streamed token, part by part.

    python bench/telemetry.py [--rounds 30] [--requests 1500]

The same gateway as in `hot_path.py`, with each part on by itself and with all: metrics, the access log (JSON
lines to a file), traces of 1 % of the requests to a collector that takes them. All threads count. The variants
take turns in one process; shown are medians, and medians of the differences within a round, which a machine
that is now faster and now slower does not change.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop
from hot_path import CONFIG, Gateway, reference

from gateway.config import LogsPart
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


class NoMetrics:
    """In place of a gateway's metrics: nothing is counted."""

    def count(self, record: Any) -> None: ...
    def overhead(self, seconds: float) -> None: ...
    def pace(self, tier: str, clock: Any) -> Any:
        return self

    def beat(self) -> None: ...


class Variant:
    """One gateway, of which some of the telemetry is on."""

    def __init__(self, name: str, folder: Path, port: int) -> None:
        config, access = PLAIN, None
        if "traces" in name or name == "everything":
            share = "0" if "none" in name else "0.01"
            config = CONFIG.replace("127.0.0.1:9", f"127.0.0.1:{port}").replace("0.01", share)
        if name in ("access log", "everything"):
            access = configure(LogsPart(format="json"), (folder / "log").open("w"))
            assert access is not None
            access.start()
        self.name = name
        self._access = access
        self._one = Gateway(folder, config, access)
        if name not in ("metrics", "everything"):
            self._one.gateway.metrics = NoMetrics()  # type: ignore[assignment]

    async def request(self, count: int) -> float:
        """Microseconds of CPU of a request, all threads taken together, what they do behind it too."""
        start = time.process_time()
        await self._one.json_requests(count)
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


async def measure(
    rounds: int, requests: int, folder: Path, port: int
) -> dict[str, list[tuple[float, float]]]:
    """By variant, what a request and a token took in each round."""
    variants = []
    for name in VARIANTS:
        (folder / name).mkdir()
        variants.append(Variant(name, folder / name, port))
        await variants[-1].request(500)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # as `gateway.server.run`
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    for number in range(rounds):
        # Not always the same one behind the same other.
        for one in variants[:: 1 if number % 2 else -1]:
            figures[one.name].append((await one.request(requests), await one.token(requests * 3)))
    return figures


def show(figures: dict[str, list[tuple[float, float]]]) -> None:
    base = figures["nothing"]
    print(f"{'':22} {'JSON request':>20} {'streamed token':>24}")
    for name, found in figures.items():
        columns = []
        for own, plain in zip(zip(*found, strict=True), zip(*base, strict=True), strict=True):
            more = statistics.median(a - b for a, b in zip(own, plain, strict=True))
            columns.append(f"{statistics.median(own):9.2f} us {more:+7.2f}")
        print(f"{name:22} {columns[0]:>20} {columns[1]:>24}")
    print(f"reference loop {min(reference() for _ in range(50)):.0f} us")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--requests", type=int, default=1_500, help="in each round")
    given = parser.parse_args()
    collector = subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE, text=True)
    try:
        assert collector.stdout is not None
        port = int(collector.stdout.readline())
        with tempfile.TemporaryDirectory() as temporary:
            show(uvloop.run(measure(given.rounds, given.requests, Path(temporary), port)))
    finally:
        collector.kill()
