#!/usr/bin/env python3
"""What telemetry costs: microseconds of CPU of one JSON request and of one streamed token, part by part.

    python bench/telemetry.py [--rounds 30] [--requests 1000]

The same gateway as in `hot_path.py`, with each part on by itself and with all: metrics, the access log (JSON
lines to a file), traces of 1 % of the requests to a collector that takes them. All threads count. The variants
take turns; each figure is the median of its rounds, beside the speed of a fixed loop on this machine.
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


class NoMetrics:
    """In place of a gateway's metrics: nothing is counted."""

    def count(self, record: Any) -> None: ...
    def overhead(self, seconds: float) -> None: ...
    def pace(self, tier: str, clock: Any) -> Any:
        return self

    def beat(self) -> None: ...


def variants(folder: Path, port: int) -> dict[str, Gateway]:
    made: dict[str, Gateway] = {}
    for name in ("nothing", "metrics", "access log", "traces, none sampled", "traces, 1 %", "everything"):
        own = folder / name
        own.mkdir()
        config = PLAIN
        if "traces" in name or name == "everything":
            share = 0 if "none" in name else 0.01
            config = CONFIG.replace("127.0.0.1:9", f"127.0.0.1:{port}").replace("0.01", str(share))
        access = None
        if name in ("access log", "everything"):
            access = configure(LogsPart(format="json"), (own / "log").open("w"))
            assert access is not None
            access.start()
        made[name] = Gateway(own, config, access)
        if name not in ("metrics", "everything"):
            made[name].gateway.metrics = NoMetrics()  # type: ignore[assignment]
    return made


async def main(args: argparse.Namespace, folder: Path, port: int) -> None:
    gateways = variants(folder, port)
    for gateway in gateways.values():
        await gateway.json_requests(300)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # as `gateway.server.run`
    asked: dict[str, list[float]] = {name: [] for name in gateways}
    token: dict[str, list[float]] = {name: [] for name in ("nothing", "everything")}
    speed = 1e9
    for _ in range(args.rounds):
        for name, gateway in gateways.items():
            speed = min(speed, reference())
            start = time.process_time()
            await gateway.json_requests(args.requests)
            # What was sampled is sent in this round.
            tracer = gateway.gateway.tracer
            if tracer is not None:
                tracer.sender.flush()
            asked[name].append((time.process_time() - start) / args.requests * 1e6)
        for name, figures in token.items():
            await gateways[name].begin_stream()
            start = time.process_time()
            await gateways[name].tokens(args.requests * 5)
            figures.append((time.process_time() - start) / (args.requests * 5) * 1e6)
            await gateways[name].end_stream()
    base = statistics.median(asked["nothing"])
    for name, figures in asked.items():
        median = statistics.median(figures)
        print(f"JSON request, {name:22} {median:7.1f} us  {median - base:+6.1f}")
    base = statistics.median(token["nothing"])
    for name, figures in token.items():
        median = statistics.median(figures)
        print(f"streamed token, {name:20} {median:7.2f} us  {median - base:+6.2f}")
    for name, gateway in gateways.items():
        if gateway.gateway.tracer is not None:
            sender = gateway.gateway.tracer.sender
            print(f"spans, {name:29} {sender.sent} sent, {sender.dropped} dropped")
    print(f"reference loop {speed:28.1f} us")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--requests", type=int, default=1000)
    collector = subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE, text=True)
    try:
        assert collector.stdout is not None
        listens = int(collector.stdout.readline())
        with tempfile.TemporaryDirectory() as temporary:
            uvloop.run(main(parser.parse_args(), Path(temporary), listens))
    finally:
        collector.kill()
