"""A decision log of many made-up requests, and what a replay of it costs.

    python bench/decision_log.py write FOLDER [--decisions 1000000] [--policy default]
    python bench/decision_log.py record [--policy default]

`write` makes FOLDER/decisions.jsonl and its older files, decided by the policy from signals drawn at random.
Then time a replay on one core:

    /usr/bin/time -v taskset -c 0 dualgauge policy replay --log FOLDER/decisions.jsonl --policy strict

`record` prints the CPU microseconds that one line of the log costs a gateway, for a short prompt.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import msgspec

from gateway.relay.sse import Usage
from gateway.telemetry.decision_log import MAX_QUEUE, DecisionLog
from gateway.telemetry.decisions import Decided, Decisions
from gateway.telemetry.record import Record
from policies.compile import compile_policy
from policies.facts import Conversation, Facts, Turn
from policies.logged import Fields, line_of
from policies.logged import Usage as LoggedUsage
from policies.policy import Policy
from policies.shipped import policy_text
from policies.signals import SIGNALS, Memo

PROMPT = "Summarise the plot of Hamlet in three sentences and say which character interests you most."
encode = msgspec.json.Encoder().encode


def memo(rand: random.Random) -> Memo:
    """Signals of a request that never was."""
    draw: dict[str, Any] = {
        "score": lambda _: rand.random() ** 3,
        "share": lambda _: rand.random(),
        "count": lambda s: int(rand.lognormvariate(6, 1.5)) if "tokens" in s.name else rand.randrange(4),
        "number": lambda _: round(rand.random(), 2),
        "flag": lambda _: rand.random() < 0.2,
        "text": lambda s: rand.choice([*s.values[:1] * 40, *s.values, "smollm2"]),
    }
    return {name: draw[signal.kind](signal) for name, signal in SIGNALS.items()}


def no_text() -> Conversation:
    raise AssertionError("every signal is drawn")


def write(folder: Path, policy: Policy, decisions: int) -> None:
    rand = random.Random(1)
    fields = Fields([policy])
    lost: list[int] = []
    log = DecisionLog(folder / "decisions.jsonl", 64 << 20, 1000, lost.append)
    log.start()
    for number in range(decisions):
        headers = {"x-criticality": "high"} if rand.random() < 0.02 else {}
        facts = Facts(
            dialect="openai.chat",
            model="smollm2",
            read=no_text,
            headers=headers,
            tenant=f"t{number % 50}",
            time=1_790_000_000 + number / 10,
        )
        measured = memo(rand)
        line = line_of(
            facts,
            measured,
            policy.decide(facts, measured),
            fields,
            id_=f"req_{number:032x}",
            time=0,
            measure_all=True,
        )
        line.served, line.engine, line.status = line.tier, f"{line.tier}-0", 200
        line.usage = LoggedUsage(measured["prompt_tokens"], rand.randrange(1, 500))
        log.append(fields, encode(line) + b"\n")
        while number % 1000 == 0 and len(log._queue) > MAX_QUEUE // 2:
            time.sleep(0.01)
    log.close(60)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{decisions:,} decisions, {size / 1e6:,.0f} MB, {sum(lost)} lost")


def record(policy: Policy) -> None:
    class Kept:
        def append(self, _fields: Fields, line: bytes) -> None:
            self.line = line

    fields = Fields([policy])
    kept = Kept()
    for measure_all in (True, False):
        decisions = Decisions(kept, measure_all=measure_all)  # type: ignore[arg-type]
        best = 1e9
        for _ in range(20):
            spent = 0
            for number in range(500):
                conversation = Conversation(
                    (Turn("system", "You are helpful."), Turn("user", f"{number} {PROMPT}"))
                )
                facts = Facts(dialect="openai.chat", model="m", headers={}, read=lambda c=conversation: c)
                measured: Memo = {}
                decision = policy.decide(facts, measured)
                done = Record("req_" + "0" * 32, 0.0, 0, tier="fast", engine="fast-0", status=200)
                done.usage = Usage(24, 64)
                begun = time.thread_time_ns()
                decisions.record(done, Decided(fields, facts, measured, decision))
                spent += time.thread_time_ns() - begun
            best = min(best, spent / 500 / 1000)
        print(f"a line, signals: {'all' if measure_all else 'used'}  {best:6.1f} us, {len(kept.line)} bytes")
    begun = time.thread_time_ns()
    for _ in range(1000):
        sum(range(1000))
    print(f"sum(range(1000))     {(time.thread_time_ns() - begun) / 1e6:6.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["write", "record"])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--decisions", type=int, default=1_000_000)
    parser.add_argument("--policy", default="default")
    args = parser.parse_args()
    policy = compile_policy(*policy_text(args.policy))
    if args.what == "record":
        record(policy)
    elif args.folder is None:
        parser.error("write needs a FOLDER")
    else:
        write(args.folder, policy, args.decisions)


if __name__ == "__main__":
    main()
