"""A stand-in for the Python of an environment with vLLM: its engines are `fake_engine`, its load generator
answers with figures made here, and writes a line for each order to the file that BENCH_ORDERS names.

BENCH_ENDS is a concurrency at which the generator ends, as if it had been killed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.engines import fake_engine


def answer(value: dict[str, Any]) -> None:
    os.write(int(os.environ["DUALGAUGE_ANSWERS_FD"]), f"{json.dumps(value)}\n".encode())


def generate() -> int:
    answer({})
    for line in sys.stdin:
        order = json.loads(line)
        told = {
            name: order[order.index(name) + 1] for name in ("--model", "--max-concurrency", "--num-prompts")
        }
        level, requests = int(told["--max-concurrency"]), int(told["--num-prompts"])
        with Path(os.environ["BENCH_ORDERS"]).open("a") as orders:
            orders.write(f"{told['--model']} {level} {requests}\n")
        if os.environ.get("BENCH_ENDS") == str(level):
            print("killed by somebody", flush=True)
            return 1
        times = {
            f"p{part}_{name}_ms": 10.0 * level for part in (50, 90, 99) for name in ("e2el", "ttft", "itl")
        }
        speeds = {"output_throughput": 20.0 * level, "total_token_throughput": 60.0 * level}
        answer({"completed": requests, "failed": 0, "duration": 1.5, **speeds, **times})
    return 0


if __name__ == "__main__":
    sys.exit(generate() if "benchmark.load" in sys.argv else fake_engine.main())
