#!/usr/bin/env python3
"""This gateway beside others, in front of the same engines that cost next to nothing.

    python bench/gateways.py load    [--peers vllm-router,sglang-router,litellm] [--store memory|redis] [--write]
    python bench/gateways.py start   how long from the start to the first answer, and the memory then
    python bench/gateways.py streams [--streams 1000]   how late tokens are when there are many streams
    python bench/gateways.py workers [--workers 2]      one worker process against several, on one Redis
    python bench/gateways.py size    what an installation without engines takes
    python bench/gateways.py report  bench/RESULTS.md anew, from what was written

Ours has every feature on: a key, the shipped policy with its classifier, limits that never bind, metrics, 1 % of the
traces sampled. The contenders take turns within each round, so that a machine that is busy is busy for all of them;
the figures to compare are the ratios of one run. CPU is that of a gateway's whole process tree.

`--write` keeps the figures of this part in bench/results.json and writes bench/RESULTS.md from all parts. Needs gcc
and wrk, `--store redis` a redis-server; peers are installed once, into environments of their own (below ~/.cache/dualgauge-bench, or XDG_CACHE_HOME).
Exit status 0 where all was measured, 1 where something failed, 2 for a wrong option. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.contenders import PEERS, deploy, our_program, our_version
from bench.figures import merged
from bench.machine import (
    ROOT,
    Engines,
    HarnessError,
    Process,
    facts,
    free_port,
    native,
    needs,
    others,
    running,
    streamed,
    streams,
    until_answered,
    wrk,
)
from bench.report import DIRECT, LOADS, OURS, brief, render
from engines.bench.spent import now

GAP_US = 20_000
PROMPT = "Summarise the plot of Hamlet in three sentences and say which character interests you most. "
PROMPT_CHARACTERS = 140
JSON_CONNECTIONS = 32
PACED_STREAMS = 200
PATH = "/v1/chat/completions"
RESULTS = ROOT / "bench" / "results.json"
REPORT = ROOT / "bench" / "RESULTS.md"

Result = dict[str, Any]
Rounds = dict[str, dict[str, list[float]]]
"""By contender and figure, one value a round."""


def body(*, stream: bool = False, at_once: bool = True, tokens: int = 64) -> str:
    asked: dict[str, Any] = {
        "model": "smollm2",
        "messages": [
            {"role": "system", "content": "You are helpful. [at once]" if at_once else "You are helpful."},
            {"role": "user", "content": (PROMPT * 2)[:PROMPT_CHARACTERS]},
        ],
        "max_tokens": tokens,
    }
    if stream:
        asked["stream"] = True
    return json.dumps(asked, separators=(",", ":"))


@dataclass(frozen=True)
class Contender:
    """`start` is given its port and the engines' and starts it; `share` is that of the usual connections."""

    name: str
    version: str
    start: Callable[[int, Sequence[int]], Process]
    share: float = 1

    def some(self, connections: int) -> int:
        return max(1, round(connections * self.share))


def ours(stack: contextlib.ExitStack, folder: Path, args: argparse.Namespace, workers: int = 1) -> Contender:
    program = our_program()
    store = "memory"
    if args.store == "redis":
        needs("redis-server")
        from tests.support.redis import server

        store = stack.enter_context(server()).url

    def start(port: int, engines: Sequence[int]) -> Process:
        where = Path(tempfile.mkdtemp(dir=folder))
        file = deploy(where, port, free_port(), engines, store=store, workers=workers)
        return stack.enter_context(running([program, "serve", "--config", file], where / "log"))

    names = [
        OURS,
        *(["redis"] if args.store == "redis" else []),
        *([f"{workers} workers"] if workers > 1 else []),
    ]
    return Contender(", ".join(names), our_version(), start)


def peers(stack: contextlib.ExitStack, folder: Path, args: argparse.Namespace) -> list[Contender]:
    def contender(name: str) -> Contender:
        peer = PEERS[name]
        peer.install()

        def start(port: int, engines: Sequence[int]) -> Process:
            where = Path(tempfile.mkdtemp(dir=folder))
            command = peer.command(peer.folder / "bin", where, port, engines)
            return stack.enter_context(running(command, where / "log", peer.env))

        return Contender(name, peer.version, start, peer.share)

    return [contender(name) for name in args.peers]


@contextlib.contextmanager
def workplace() -> Iterator[tuple[contextlib.ExitStack, Path]]:
    with tempfile.TemporaryDirectory(prefix="dg-bench-") as folder, contextlib.ExitStack() as stack:
        yield stack, Path(folder)


def note(rounds: Rounds, name: str, **figures: float) -> None:
    for figure, value in figures.items():
        rounds.setdefault(name, {}).setdefault(figure, []).append(value)


def json_load(
    process: Process, port: int, connections: int, seconds: float, folder: Path, text: str
) -> tuple[float, float]:
    """(microseconds of CPU, requests a second) of whole replies, or bursts, by `text`."""
    wrk(port, text, connections, 1, folder)
    before = process.cpu()
    seen = wrk(port, text, connections, seconds, folder)
    used = process.cpu() - before
    process.check()
    if seen.errors:
        raise HarnessError(
            f"of {seen.requests} requests to {process.name} some failed: {seen.errors}; {process.told()}"
        )
    if not seen.requests:
        raise HarnessError(
            f"{process.name} answered none of {connections} requests in {seconds:g} s: give it more --seconds"
        )
    return used * 1e6 / seen.requests, seen.rate


def paced_load(
    process: Process, port: int, engines: Engines, count: int, seconds: float
) -> tuple[float, dict[str, Any]]:
    """(microseconds of CPU a token, what the client saw)."""
    warm = 3.0
    client = streams(port, count, seconds + 0.5, 150, warm)
    try:
        time.sleep(warm)
        cpu, tokens = process.cpu(), engines.stats()["tokens"]
        time.sleep(seconds)
        cpu, tokens = process.cpu() - cpu, engines.stats()["tokens"] - tokens
        seen = streamed(client)
    finally:
        client.kill()
        client.wait()
    process.check()
    if seen["errors"] or not tokens:
        raise HarnessError(
            f"{seen['errors']} of the streams broke off, {tokens} tokens came; {process.told()}"
        )
    return cpu * 1e6 / tokens, seen


def load(args: argparse.Namespace) -> Result:
    rounds: Rounds = {}
    with workplace() as (stack, folder):
        engines = Engines(stack, folder, "--gap", str(GAP_US))
        some = [ours(stack, folder, args), *peers(stack, folder, args)]
        started = []
        for contender in some:
            port = free_port()
            process = contender.start(port, engines.ports)
            until_answered(process, port, PATH, body().encode())
            started.append((contender, process, port))
        for number in range(1, args.rounds + 1):
            direct = wrk(engines.ports[0], body(), 1, max(1, args.seconds / 3), folder)
            note(rounds, DIRECT, p50=direct.p50, p99=direct.p99)
            for contender, process, port in started:
                name, connections = contender.name, contender.some(JSON_CONNECTIONS)
                us, rate = json_load(process, port, connections, args.seconds, folder, body())
                burst, _ = json_load(process, port, connections, args.seconds / 2, folder, body(stream=True))
                alone = wrk(port, body(), 1, max(1, args.seconds / 3), folder)
                token, _ = paced_load(process, port, engines, contender.some(PACED_STREAMS), args.seconds)
                rss, pss = process.memory()
                figures = {
                    "json_us": us, "rate": rate, "burst_us": burst / 64, "token_us": token, "rss": rss, "pss": pss,
                    "p50": alone.p50 - direct.p50, "p99": alone.p99 - direct.p99,
                }  # fmt: skip
                note(rounds, name, **figures)
                told = ", ".join(f"{LOADS[figure][0]} {value:.1f}" for figure, value in figures.items())
                print(f"round {number} of {args.rounds}, {name}: {told}", flush=True)
    return {"rounds": rounds, "versions": {one.name: one.version for one in some}}


def start(args: argparse.Namespace) -> Result:
    rounds: Rounds = {}
    with workplace() as (stack, folder):
        engines = Engines(stack, folder)
        some = [ours(stack, folder, args), *peers(stack, folder, args)]
        for number in range(1, args.rounds + 1):
            for contender in some:
                port = free_port()
                process = contender.start(port, engines.ports)
                models = until_answered(process, port, "/v1/models")
                rss, pss = process.memory()
                answered = until_answered(process, port, PATH, body().encode())
                cpu = process.cpu()
                process.stop()
                note(rounds, contender.name, models=models, answered=answered, cpu=cpu, rss=rss, pss=pss)
                print(
                    f"round {number} of {args.rounds}, {contender.name}: /v1/models after {models:.2f} s, "
                    f"a completion after {answered:.2f} s and {cpu:.2f} s of CPU, {rss:.0f} MiB resident",
                    flush=True,
                )
    return {"rounds": rounds, "versions": {one.name: one.version for one in some}}


def many(args: argparse.Namespace) -> Result:
    """Tokens' delays with many streams: without a gateway, through ours, through the peers."""
    rounds: Rounds = {}
    options = ["--step"] if args.step else []
    with workplace() as (stack, folder):
        engines = Engines(stack, folder, "--gap", str(GAP_US), *options)
        some = [ours(stack, folder, args), *peers(stack, folder, args)]
        for number in range(1, args.rounds + 1):
            for contender in [None, *some]:
                port = engines.ports[0] if contender is None else free_port()
                cpu = 0.0
                if contender is None:
                    seen = streamed(streams(port, args.streams, args.seconds, 500, 6))
                else:
                    process = contender.start(port, engines.ports)
                    until_answered(process, port, PATH, body().encode())
                    cpu, seen = paced_load(process, port, engines, args.streams, args.seconds)
                    process.stop()
                name = DIRECT if contender is None else contender.name
                figures = {"token_us": cpu, "tokens": seen["tokens"] / seen["seconds"], "client": seen["cpu"]}
                figures |= {
                    f"{kind}_{p}": seen[kind][p] / 1e3
                    for kind in ("gap", "delay")
                    for p in ("p50", "p99", "p999", "max")
                }
                note(rounds, name, **figures)
                print(
                    f"round {number} of {args.rounds}, {name}: {figures['tokens']:.0f} tokens/s, gap p99 "
                    f"{figures['gap_p99']:.1f} ms, delay p50 {figures['delay_p50']:.1f} p99 {figures['delay_p99']:.1f} ms, "
                    f"client {figures['client']:.0%} of a core",
                    flush=True,
                )
    return {
        "rounds": rounds,
        "versions": {one.name: one.version for one in some},
        "streams": args.streams,
        "step": args.step,
    }


def workers(args: argparse.Namespace) -> Result:
    rounds: Rounds = {}
    with workplace() as (stack, folder):
        engines = Engines(stack, folder, "--gap", str(GAP_US))
        some = [ours(stack, folder, args, count) for count in (1, args.workers)]
        for number in range(1, args.rounds + 1):
            for contender in some:
                port = free_port()
                process = contender.start(port, engines.ports)
                until_answered(process, port, PATH, body().encode())
                at = time.monotonic()
                used, engines_used = process.cpu(), engines.stats()["cpu_us"]
                us, rate = json_load(process, port, JSON_CONNECTIONS * 4, args.seconds, folder, body())
                took = time.monotonic() - at
                cores, of_engines = (
                    (process.cpu() - used) / took,
                    (engines.stats()["cpu_us"] - engines_used) / took / 1e6,
                )
                process.stop()
                note(rounds, contender.name, rate=rate, json_us=us, cores=cores, engines=of_engines)
                print(
                    f"round {number} of {args.rounds}, {contender.name}: {rate:.0f} requests/s, {us:.1f} us each, "
                    f"{cores:.2f} cores (engines {of_engines:.2f})",
                    flush=True,
                )
    versions = {one.name: one.version for one in some}
    return {"rounds": rounds, "versions": versions, "workers": args.workers}


def size(_: argparse.Namespace) -> Result:
    """Of an environment without pip into which this checkout was installed."""
    with tempfile.TemporaryDirectory(prefix="dg-bench-") as folder:
        place = Path(folder) / "venv"
        print("installing this checkout into a fresh environment ...", flush=True)
        python = str(place / "bin" / "python")
        for command in (
            [sys.executable, "-m", "venv", "--without-pip", str(place)],
            [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", str(ROOT)],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise HarnessError(f"{' '.join(command)} failed: {done.stderr.strip()[-1000:]}")
        packages = next(place.glob("lib/*/site-packages"))
        parts = {one.name: _mib(one) for one in packages.iterdir()}
        largest = dict(sorted(parts.items(), key=lambda part: -part[1])[:12])
        return {"total": _mib(place), "largest": largest}


def _mib(path: Path) -> float:
    """What it takes on disk."""
    some = [path, *path.rglob("*")] if path.is_dir() and not path.is_symlink() else [path]
    return sum(one.lstat().st_blocks * 512 for one in some) / 2**20


PARTS: dict[str, Callable[[argparse.Namespace], Result]] = {
    "load": load,
    "start": start,
    "streams": many,
    "workers": workers,
    "size": size,
}
# (rounds, seconds) where none are given.
USUAL = {"load": (3, 5.0), "start": (5, 0.0), "streams": (2, 10.0), "workers": (3, 5.0), "size": (1, 0.0)}


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=[*PARTS, "report"])
    parser.add_argument("--peers", help="comma between them, empty for none; vllm-router where not given")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, help="of each load in each round")
    parser.add_argument("--store", choices=["memory", "redis"], default="memory")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--step", action="store_true", help="streams: all get their tokens at one instant")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="bench/results.json and bench/RESULTS.md")
    args = parser.parse_args(given)
    if args.part != "report":
        rounds, seconds = USUAL[args.part]
        args.rounds = rounds if args.rounds is None else args.rounds
        args.seconds = seconds or 1.0 if args.seconds is None else args.seconds
        if args.rounds < 1 or args.seconds <= 0:
            parser.error("--rounds and --seconds must be above 0")
    if not 1 <= args.streams <= 10_000:
        parser.error("--streams must be 1 to 10000")
    if args.part == "workers":
        # Limits of several processes are kept in one place.
        args.store = "redis"
    if args.workers < 2:
        parser.error("--workers must be 2 or more: one is measured beside them")
    args.peers = [
        name.strip()
        for name in ("vllm-router" if args.peers is None else args.peers).split(",")
        if name.strip()
    ]
    for name in args.peers:
        if name not in PEERS:
            parser.error(f"--peers: {name} is none of {', '.join(PEERS)}")
    return args


def name_of(args: argparse.Namespace) -> str:
    """Under which a part's result is kept: what measures something else has another name."""
    words = [args.part]
    if args.part in ("load", "start", "streams"):
        words += args.peers
    if args.part == "streams":
        words += [str(args.streams), *(["step"] if args.step else [])]
    if args.part == "workers":
        words.append(str(args.workers))
    if args.store != "memory":
        words.append(args.store)
    return " ".join(words)


def main() -> int:
    args = arguments()
    on_signals()
    try:
        results = kept()
        if args.part != "report":
            for program in ("engine", "streams"):
                native(program)
            here, before = facts(), now()
            measured = PARTS[args.part](args)
            result = {
                "machine": {**here, "others": others(before)},
                "options": {"rounds": args.rounds, "seconds": args.seconds},
                **measured,
            }
            results = merged(results, name_of(args), result)
            print(json.dumps({name_of(args): brief(args.part, result)}))
        if args.write or args.part == "report":
            keep(results)
    except (HarnessError, OSError, http.client.HTTPException) as exc:
        print(exc, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def kept() -> dict[str, Result]:
    """What was written before, by part. Raises HarnessError."""
    try:
        results: dict[str, Result] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    except ValueError as exc:
        raise HarnessError(f"{RESULTS} is not JSON ({exc}): check it out anew, or remove it") from None
    return results


def keep(results: dict[str, Result]) -> None:
    """All of them, and the report."""
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    REPORT.write_text(render(results))


def on_signals() -> None:
    """End as after an error, so that all servers end too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)


def _end(number: int, _: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
