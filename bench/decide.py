"""CPU time of deciding by a shipped policy, for prompts that were not seen before.

    python bench/decide.py [POLICY]

Prints the median and the 99th percentile in microseconds of thread CPU time, beside the time of a fixed loop,
so that figures of two machines can be compared. All are measured in slices, one after the other, and of each
the quickest slice counts: what else runs on a shared machine makes the others slower.
"""

from __future__ import annotations

import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from policies.compile import compile_policy
from policies.facts import Conversation, Facts, Turn
from policies.policy import Policy
from policies.shipped import policy_text

SLICES = 12
ROUNDS = 400
"""Requests in a slice."""

PROMPTS = Path(__file__).parent / "data" / "prompts.txt"


def requests(texts: Sequence[str], size: int, turns: int) -> Callable[[int], Facts]:
    """Requests whose user turns are pieces of the texts; no two are alike."""
    whole = "\n".join(texts)

    def piece(number: int) -> str:
        begin = (number * 7919) % max(1, len(whole) - size)
        return f"{number} {whole[begin : begin + size]}"

    def make(number: int) -> Facts:
        said: list[Turn] = []
        for turn in range(turns):
            said.append(Turn("user", piece(turn)))
            said.append(Turn("assistant", piece(turn + 1000)))
        # Not the turn of a case with fewer before it: that one was seen.
        said.append(Turn("user", piece(number + 10_000 * (1 + turns))))
        conversation = Conversation(tuple(said))
        return Facts(dialect="openai.chat", model="m", headers={}, read=lambda: conversation)

    return make


def spent(policy: Policy, make: Callable[[int], Facts], numbers: range) -> tuple[float, float]:
    """Median and 99th percentile of the microseconds of a decision."""
    times = []
    for number in numbers:
        facts = make(number)
        begun = time.thread_time_ns()
        policy.decide(facts)
        times.append((time.thread_time_ns() - begun) / 1000)
    times.sort()
    return times[len(times) // 2], times[len(times) * 99 // 100]


def fixed_loop() -> float:
    """Microseconds of a loop that is the same everywhere."""
    begun = time.thread_time_ns()
    for _ in range(200):
        sum(range(1000))
    return (time.thread_time_ns() - begun) / 200_000


def main() -> None:
    policy = compile_policy(*policy_text(sys.argv[1] if len(sys.argv) > 1 else "default"))
    lines = [
        line.split(" ", 2) for line in PROMPTS.read_text(encoding="utf-8").splitlines() if line[:1] in "cmn"
    ]
    english = [text for label, language, text in lines if language == "en" and label == "n"]
    others = {name: [text for _, language, text in lines if language == name] for name in ("de", "ru", "zh")}
    code = [
        path.read_text(encoding="utf-8") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("a*.py"))
    ]
    cases = {
        "prose, 140 characters": requests(english, 140, 0),
        "prose, 2 kB": requests(english, 2000, 0),
        "code, 2 kB": requests(code, 2000, 0),
        "German, 2 kB": requests(others["de"], 1950, 0),
        "Russian, 2 kB": requests(others["ru"], 1080, 0),
        "Chinese, 2 kB": requests(others["zh"], 740, 0),
        "code, 20 kB": requests(code, 20_000, 0),
        "code, 200 kB": requests(code, 200_000, 0),
        "prose, 2 kB after 20 turns": requests(english, 2000, 10),
    }
    times: dict[str, list[tuple[float, float]]] = {what: [] for what in cases}
    loops = []
    for numbers in (range(at, at + ROUNDS) for at in range(0, SLICES * ROUNDS, ROUNDS)):
        for what, make in cases.items():
            times[what].append(spent(policy, make, numbers))
        loops.append(fixed_loop())
    for what, found in times.items():
        median, high = (min(figures) for figures in zip(*found, strict=True))
        print(f"{what:<28} median {median:6.1f} us   p99 {high:6.1f} us")
    print(f"{'sum(range(1000))':<28} {min(loops):13.1f} us")


if __name__ == "__main__":
    main()
