"""Measure the `code` and `math` signals on labelled requests.

    python bench/classifier.py LABELLED.jsonl [--errors SOURCE] [--most N]

One request a line: `messages`, `code_heavy`, `math`, `ambiguous`, `source`, `language`. Ambiguous rows are
left out. Prints precision, recall and F1 at 0.5, the errors by source, and the CPU time of a request.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from policies.facts import Conversation, Facts, Turn
from policies.signals import SIGNALS, Memo
from policies.signals.classifier import Scores

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


def read_rows(path: Path) -> list[Row]:
    """The labelled requests of a file, ambiguous ones left out."""
    with path.open(encoding="utf-8") as lines:
        return [row for row in map(json.loads, lines) if not row["ambiguous"]]


def report(rows: Sequence[Row], scores: Sequence[Scores]) -> None:
    """Print precision, recall and F1 at 0.5, and the errors by source."""

    def show(what: str, label: str, said: Sequence[bool], chosen: Iterable[int]) -> None:
        pairs = [(said[i], bool(rows[i][label])) for i in chosen]
        precision, recall, figure = f1(pairs)
        print(f"{what:<22} {len(pairs):5}  P {precision:.3f}  R {recall:.3f}  F1 {figure:.3f}")

    everything = range(len(rows))
    code = [one.code >= 0.5 for one in scores]
    maths = [one.math >= 0.5 for one in scores]
    show("code", "code_heavy", code, everything)
    show("code, English", "code_heavy", code, [i for i in everything if rows[i]["language"] == "en"])
    show("code, other languages", "code_heavy", code, [i for i in everything if rows[i]["language"] != "en"])
    show("math", "math", maths, everything)
    sources: dict[str, list[int]] = defaultdict(list)
    for i in everything:
        sources[rows[i]["source"]].append(i)
    mathematical = {s for s, of in sources.items() if sum(rows[i]["math"] for i in of) * 2 > len(of)}
    recalled = [maths[i] for i in everything if rows[i]["source"] in mathematical and rows[i]["math"]]
    alarms = [maths[i] for i in everything if rows[i]["source"] not in mathematical and not rows[i]["math"]]
    print(
        f"math: recall on its sources {sum(recalled) / max(1, len(recalled)):.3f},"
        f" false alarms elsewhere {sum(alarms) / max(1, len(alarms)):.3f}"
    )
    print("\nfalse code, missed code, false math, missed math / rows, by source")
    for source, of in sorted(sources.items(), key=lambda item: -len(item[1])):
        counts = [
            sum(code[i] and not rows[i]["code_heavy"] for i in of),
            sum(not code[i] and rows[i]["code_heavy"] for i in of),
            sum(maths[i] and not rows[i]["math"] for i in of),
            sum(not maths[i] and rows[i]["math"] for i in of),
        ]
        print("  " + " ".join(f"{count:3}" for count in counts), f"/ {len(of):3}  {source}")


def show_errors(rows: Sequence[Row], scores: Sequence[Scores], source: str, most: int) -> None:
    """Print misread requests of a source."""
    for row, one in zip(rows, scores, strict=True):
        right = (one.code >= 0.5) == row["code_heavy"] and (one.math >= 0.5) == row["math"]
        if source not in row["source"] or right:
            continue
        print(f"code {one.code:.2f} {row['code_heavy']}  math {one.math:.2f} {row['math']}")
        print("  " + row["messages"][-1]["content"][:300].replace("\n", "\n  "))
        most -= 1
        if most <= 0:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("file", type=Path)
    parser.add_argument("--errors", metavar="SOURCE", help="print misread requests of a source")
    parser.add_argument("--most", type=int, default=40, help="at most so many of them")
    arguments = parser.parse_args()
    rows = read_rows(arguments.file)
    requests = [facts(row) for row in rows]
    begun = time.process_time()
    memos: list[Memo] = [{} for _ in rows]
    scores = [
        Scores(*(float(SIGNALS[name].read(request, memo) or 0) for name in Scores._fields))
        for request, memo in zip(requests, memos, strict=True)
    ]
    spent = (time.process_time() - begun) / len(rows)
    report(rows, scores)
    print(f"\n{spent * 1e6:.0f} us of CPU a request for code and math")
    if arguments.errors:
        show_errors(rows, scores, arguments.errors, arguments.most)


if __name__ == "__main__":
    main()
