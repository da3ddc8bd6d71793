"""Load on one engine after the other: `python -m benchmark.load`, an order on each line of standard input.

An order is a JSON list of arguments as `vllm bench serve` takes them; the answer is one line of JSON on the
descriptor that `DUALGAUGE_ANSWERS_FD` names: what that command would have saved, or `{"error": …}`. One
process for all orders, since importing vLLM takes longer than most of them. The first line says `{}`: ready.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from typing import Any

from vllm.benchmarks.serve import add_cli_args, main_async
from vllm.utils.argparse_utils import FlexibleArgumentParser


def answer(value: dict[str, Any]) -> None:
    os.write(int(os.environ["DUALGAUGE_ANSWERS_FD"]), f"{json.dumps(value)}\n".encode())


def run(arguments: list[str]) -> dict[str, Any]:
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    try:
        return asyncio.run(main_async(parser.parse_args(arguments)))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it was, it is told
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG: end with our parent
    answer({})
    for line in sys.stdin:
        answer(run(json.loads(line)))


if __name__ == "__main__":
    main()
