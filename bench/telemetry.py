#!/usr/bin/env python3
"""What telemetry costs: microseconds of CPU of one JSON request and of one streamed token, part by part.

    python bench/telemetry.py [--rounds 7] [--requests 15000]

The same gateway as in `hot_path.py`, with each part on by itself and with all: metrics, the access log (JSON
lines to a file), traces of 1 % of the requests to a collector that takes them. All threads count. Each variant
runs in a process of its own, they take turns; each figure is the least of its rounds, beside the speed of a
fixed loop on this machine.
"""

from __future__ import annotations

import argparse
import gc
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


async def measure(name: str, folder: Path, port: int, requests: int) -> tuple[float, float, float]:
    """Microseconds of CPU of a request and of a token of one variant, and of the reference loop."""
    config, access = PLAIN, None
    if "traces" in name or name == "everything":
        share = "0" if "none" in name else "0.01"
        config = CONFIG.replace("127.0.0.1:9", f"127.0.0.1:{port}").replace("0.01", share)
    if name in ("access log", "everything"):
        access = configure(LogsPart(format="json"), (folder / "log").open("w"))
        assert access is not None
        access.start()
    one = Gateway(folder, config, access)
    if name not in ("metrics", "everything"):
        one.gateway.metrics = NoMetrics()  # type: ignore[assignment]
    await one.json_requests(500)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # as `gateway.server.run`
    speed = min(reference() for _ in range(20))
    start = time.process_time()
    await one.json_requests(requests)
    tracer = one.gateway.tracer
    if tracer is not None:
        tracer.sender.flush()
        assert tracer.sender.dropped == 0
    asked = (time.process_time() - start) / requests * 1e6
    await one.begin_stream()
    start = time.process_time()
    await one.tokens(requests * 3)
    token = (time.process_time() - start) / requests / 3 * 1e6
    await one.end_stream()
    return asked, token, speed


def main(args: argparse.Namespace, port: int) -> None:
    figures: dict[str, list[list[float]]] = {name: [] for name in VARIANTS}
    for _ in range(args.rounds):
        for name, found in figures.items():
            told = subprocess.check_output(
                [sys.executable, __file__, "--one", name, str(port), "--requests", str(args.requests)]
            )
            found.append([float(word) for word in told.split()])
    base = [min(column) for column in zip(*figures["nothing"], strict=True)]
    print(f"{'':22} {'JSON request':>20} {'streamed token':>24} {'reference loop':>18}")
    for name, found in figures.items():
        asked, token, speed = (min(column) for column in zip(*found, strict=True))
        print(
            f"{name:22} {asked:9.1f} us {asked - base[0]:+7.1f} {token:13.2f} us {token - base[1]:+7.2f}"
            f" {speed:15.0f} us"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=15_000)
    parser.add_argument("--one", nargs=2, metavar=("VARIANT", "PORT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        with tempfile.TemporaryDirectory() as temporary:
            name, port = given.one
            print(*uvloop.run(measure(name, Path(temporary), int(port), given.requests)))
    else:
        collector = subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE, text=True)
        try:
            assert collector.stdout is not None
            main(given, int(collector.stdout.readline()))
        finally:
            collector.kill()
