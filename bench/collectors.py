#!/usr/bin/env python3
"""What a broken collector of traces costs requests: latency and memory of a gateway that traces every one.

    python bench/collectors.py [--rounds 4] [--seconds 5] [--rate 100]

One `dualgauge serve` for each kind of collector, in front of the same engine: none (no traces), well, down
(nothing listens), refusing (503), slow (a second for each batch), hanging (takes the connection and never
answers). They take turns; requests come at a steady rate, and the best round's percentiles are shown, in ms, with
the memory of the process at the end and the spans that were sent and lost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.client import Wire
from tests.support.engine import FakeEngine, Script, engines, hang, reply
from tests.support.serving import deployment, free_port
from tests.support.shapes import CHAT

TAKEN: Script = reply(b"", content_type="application/x-protobuf")
COLLECTORS: dict[str, Script | None] = {
    "none": None,
    "well": TAKEN,
    "down": None,
    "refusing": reply(b"", 503),
    "slow": reply(b"", content_type="application/x-protobuf", delay=1),
    "hanging": hang,
}


class Served:
    def __init__(self, folder: Path, engine: FakeEngine, collector: str | None) -> None:
        self.port, self.admin = free_port(), free_port()
        file: dict[str, Any] = deployment({"fast": engine}, tiers=["fast"], health={"every": "1s"})
        file |= {"listen": f"127.0.0.1:{self.port}", "admin": f"127.0.0.1:{self.admin}"}
        if collector is not None:
            file["telemetry"] = {"otlp": collector, "sample": 1}
        folder.mkdir()
        (folder / "policy.yaml").write_text(
            "version: 1\nrules: [{name: all, send: fast, if_unavailable: fail}]"
        )
        (folder / "dualgauge.yaml").write_text(json.dumps({**file, "policy": "policy.yaml"}))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gateway.cli", "serve", "--config", str(folder / "dualgauge.yaml")],
            stderr=(folder / "log").open("w"),
        )

    async def ready(self) -> None:
        for _ in range(600):
            with contextlib.suppress(OSError):
                url = f"http://127.0.0.1:{self.admin}/readyz"
                answer = await asyncio.to_thread(urllib.request.urlopen, url)
                if answer.status == 200:
                    return
            await asyncio.sleep(0.05)
        raise TimeoutError("the gateway is not ready")

    async def load(self, seconds: float, rate: float) -> list[float]:
        """Seconds that each of a steady rate of requests took, from when it was due."""
        took: list[float] = []
        async with contextlib.AsyncExitStack() as stack:
            wires = [await stack.enter_async_context(await Wire.open(self.port)) for _ in range(4)]

            async def lane(wire: Wire, first: int) -> None:
                for i in range(first, int(seconds * rate), len(wires)):
                    due = start + i / rate
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
                    began = time.perf_counter()
                    wire.send(CHAT.path, CHAT.ask())
                    assert (await wire.reply()).status == 200
                    took.append(time.perf_counter() - began)

            start = time.perf_counter()
            await asyncio.gather(*(lane(wire, first) for first, wire in enumerate(wires)))
        return took

    def memory(self) -> float:
        """MiB that the process has in memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    async def spans(self) -> str:
        url = f"http://127.0.0.1:{self.admin}/metrics"
        text = (await asyncio.to_thread(lambda: urllib.request.urlopen(url).read())).decode()
        named = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("dualgauge_spans"))
        return f"{float(named['dualgauge_spans_sent_total']):.0f} sent, {float(named['dualgauge_spans_dropped_total']):.0f} lost"


@contextlib.asynccontextmanager
async def everything(folder: Path) -> AsyncIterator[dict[str, Served]]:
    engine = FakeEngine(reply(CHAT.reply))
    collectors = {name: FakeEngine(script) for name, script in COLLECTORS.items() if script is not None}
    async with engines(engine, *collectors.values()):
        urls = {name: one.url for name, one in collectors.items()} | {"down": "http://127.0.0.1:9"}
        served = {name: Served(folder / name, engine, urls.get(name)) for name in COLLECTORS}
        try:
            for one in served.values():
                await one.ready()
            yield served
        finally:
            for one in served.values():
                one.process.kill()
                one.process.wait()


async def main(args: argparse.Namespace, folder: Path) -> None:
    async with everything(folder) as served:
        figures: dict[str, list[tuple[float, float, float]]] = {name: [] for name in served}
        for one in served.values():
            await one.load(1, args.rate)
        before = {name: one.memory() for name, one in served.items()}
        for _ in range(args.rounds):
            for name, one in served.items():
                took = sorted(await one.load(args.seconds, args.rate))
                p99 = took[int(len(took) * 0.99)]
                figures[name].append((statistics.median(took) * 1e3, p99 * 1e3, took[-1] * 1e3))
        print(f"{'collector':10} {'p50':>7} {'p99':>7} {'max':>7}   memory, spans")
        for name, one in served.items():
            p50, p99, most = (min(column) for column in zip(*figures[name], strict=True))
            grown = f"{before[name]:.0f} -> {one.memory():.0f} MiB"
            print(f"{name:10} {p50:7.2f} {p99:7.2f} {most:7.2f}   {grown}, {await one.spans()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--rate", type=float, default=100)
    with tempfile.TemporaryDirectory() as temporary:
        uvloop.run(main(parser.parse_args(), Path(temporary)))
