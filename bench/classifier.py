"""Measure the `code` and `math` signals on labelled requests.

    python bench/classifier.py LABELLED.jsonl [--errors SOURCE] [--lines N]

One request a line: `messages`, `code_heavy`, `math`, `ambiguous`, `source`, `language`. Ambiguous rows are
left out. Prints precision, recall and F1 at 0.5, the errors by source, and the CPU time of a request.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from policies.facts import Conversation, Facts, Turn
from policies.signals import SIGNALS

Row = Mapping[str, Any]


def facts(row: Row) -> Facts:
    turns = tuple(Turn(message["role"], message["content"]) for message in row["messages"])
    return Facts(dialect="openai.chat", model="any", headers={}, read=lambda: Conversation(turns))


def f1(pairs: Iterable[tuple[bool, bool]]) -> tuple[float, float, float]:
    """Precision, recall and F1 of (said, true) pairs."""
    counted = list(pairs)
    hits = sum(said and true for said, true in counted)
    said = sum(said for said, _ in counted) or 1
    true = sum(true for _, true in counted) or 1
    precision, recall = hits / said, hits / true
    return precision, recall, 2 * precision * recall / ((precision + recall) or 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("file", type=Path)
    parser.add_argument("--errors", metavar="SOURCE", help="print the misread requests of a source")
    parser.add_argument("--lines", type=int, default=40, help="at most so many of them")
    arguments = parser.parse_args()
    with arguments.file.open(encoding="utf-8") as lines:
        rows = [row for row in map(json.loads, lines) if not row["ambiguous"]]
    scores = [
        {name: float(SIGNALS[name].read(facts(row), {}) or 0) for name in ("code", "math")} for row in rows
    ]

    def show(what: str, signal: str, label: str, chosen: Iterable[int]) -> None:
        pairs = [(scores[i][signal] >= 0.5, bool(rows[i][label])) for i in chosen]
        precision, recall, figure = f1(pairs)
        print(f"{what:<28} {len(pairs):5}  P {precision:.3f}  R {recall:.3f}  F1 {figure:.3f}")

    everything = range(len(rows))
    english = [i for i in everything if rows[i]["language"] == "en"]
    others = [i for i in everything if rows[i]["language"] != "en"]
    show("code", "code", "code_heavy", everything)
    show("code, English", "code", "code_heavy", english)
    show("code, other languages", "code", "code_heavy", others)
    show("math", "math", "math", everything)
    sources: dict[str, list[int]] = defaultdict(list)
    for i in everything:
        sources[rows[i]["source"]].append(i)
    maths = [i for of in sources.values() if sum(rows[i]["math"] for i in of) * 2 > len(of) for i in of]
    rest = [i for i in everything if i not in set(maths)]
    recalled = [scores[i]["math"] >= 0.5 for i in maths if rows[i]["math"]]
    alarms = [scores[i]["math"] >= 0.5 for i in rest if not rows[i]["math"]]
    print(
        f"math: recall on its sources {sum(recalled) / max(1, len(recalled)):.3f},"
        f" false alarms elsewhere {sum(alarms) / max(1, len(alarms)):.3f}"
    )
    print("\nmisread as code / missed code / false math / missed math, of rows, by source")
    for source, of in sorted(sources.items(), key=lambda item: -len(item[1])):
        counts = [
            sum(scores[i]["code"] >= 0.5 and not rows[i]["code_heavy"] for i in of),
            sum(scores[i]["code"] < 0.5 and rows[i]["code_heavy"] for i in of),
            sum(scores[i]["math"] >= 0.5 and not rows[i]["math"] for i in of),
            sum(scores[i]["math"] < 0.5 and rows[i]["math"] for i in of),
        ]
        print("  " + " ".join(f"{count:3}" for count in counts), f"/ {len(of):3}  {source}")
    if arguments.errors:
        print()
        wrong = [
            i
            for i in everything
            if arguments.errors in rows[i]["source"]
            and (
                (scores[i]["code"] >= 0.5) != rows[i]["code_heavy"]
                or (scores[i]["math"] >= 0.5) != rows[i]["math"]
            )
        ]
        for i in wrong[: arguments.lines]:
            row, score = rows[i], scores[i]
            print(f"code {score['code']:.2f} {row['code_heavy']}  math {score['math']:.2f} {row['math']}")
            print("  " + row["messages"][-1]["content"][:300].replace("\n", "\n  "))
    begun = time.process_time()
    for row in rows:
        one = facts(row)
        memo: dict[str, Any] = {}
        for name in ("code", "math"):
            SIGNALS[name].read(one, memo)
    spent = (time.process_time() - begun) / len(rows)
    print(f"\n{spent * 1e6:.0f} us of CPU a request (code and math)")


if __name__ == "__main__":
    main()
