"""Fit the weights of the `code` and `math` signals, or measure what such a fit is worth on unseen sources.

    python bench/fit_classifier.py LABELLED.jsonl            writes policies/signals/weights.json
    python bench/fit_classifier.py LABELLED.jsonl --held-out writes nothing: each source of the file is
                                                             scored by weights that saw none of its rows

Fitted on: the rows whose licence allows it (LICENCES), the requests in bench/data/prompts.txt, and pieces of
the standard library's sources. Needs numpy.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from classifier import read_rows, report

from policies.signals.classifier import FILE, Model, Scores, score
from policies.signals.features import NAMES, VERSION, Features, measure

LICENCES = frozenset(
    (
        "Apache-2.0",
        "Apache-2.0 repo",
        "MIT",
        "MIT data",
        "MIT; issues from BSD/MIT repos",
        "MIT; patches from BSD/MIT repos",
        "CC0-1.0",
        "own",
    )
)
PROMPTS = Path(__file__).parent / "data" / "prompts.txt"
WEIGHTS = Path(__file__).parents[1] / "policies" / "signals" / FILE
RIDGE = 18.0
STEPS = 50


class Example(NamedTuple):
    features: Features
    code: bool
    math: bool
    weight: float
    source: str


def own_examples() -> Iterator[Example]:
    """The requests written for this, and pieces of source code without a request."""
    for line in PROMPTS.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            label, _, text = line.split(" ", 2)
            yield Example(measure(text.replace("\\n", "\n")), label == "c", label == "m", 1.0, "prompts")
    chosen = random.Random(7)
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[::3]:
        text = path.read_text(encoding="utf-8", errors="replace")
        if len(text) > 3000:
            begin = chosen.randrange(len(text) - 1500)
            piece = text[begin : begin + chosen.choice((300, 800, 1500))]
            yield Example(measure(piece), True, False, 0.3, "library")


def row_example(row: Mapping[str, Any]) -> Example:
    text = next(m["content"] for m in reversed(row["messages"]) if m["role"] == "user")
    return Example(measure(text), row["code_heavy"], row["math"], 1.0, row["source"])


def fit(examples: Sequence[Example]) -> Model:
    """Ridge logistic regression by Newton's method, on features scaled by their deviation."""
    values = np.zeros((len(examples), len(NAMES) + 1))
    values[:, -1] = 1.0
    for row, example in enumerate(examples):
        for column, value in example.features.items():
            values[row, column] = value
    scale = values.std(axis=0) + 0.05
    scale[-1] = 1.0
    values /= scale
    weight = np.array([example.weight for example in examples])
    ridge = np.full(values.shape[1], RIDGE)
    ridge[-1] = 1e-3

    def solve(labels: Sequence[bool]) -> tuple[float, ...]:
        wanted = np.array(labels, dtype=float)
        found = np.zeros(values.shape[1])
        for _ in range(STEPS):
            said = 1 / (1 + np.exp(-np.clip(values @ found, -30, 30)))
            slope = values.T @ (weight * (said - wanted)) + ridge * found
            curve = (values * (weight * said * (1 - said))[:, None]).T @ values + np.diag(ridge)
            step = np.linalg.solve(curve, slope)
            found -= step
            if np.abs(step).max() < 1e-7:
                break
        return tuple(float(number) for number in found / scale)

    return Model(solve([example.code for example in examples]), solve([example.math for example in examples]))


def held_out(rows: Sequence[Mapping[str, Any]], examples: Sequence[Example]) -> list[Scores]:
    """The scores of each row by a model that saw no row of its source."""
    allowed = [row["licence"] in LICENCES for row in rows]
    own = list(own_examples())
    models = {
        source: fit(own + [e for e, ok in zip(examples, allowed, strict=True) if ok and e.source != source])
        for source in {example.source for example in examples}
    }
    return [score(example.features, models[example.source]) for example in examples]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("file", type=Path)
    parser.add_argument("--held-out", action="store_true", help="measure on unseen sources")
    arguments = parser.parse_args()
    rows = read_rows(arguments.file)
    examples = [row_example(row) for row in rows]
    if arguments.held_out:
        report(rows, held_out(rows, examples))
        return
    kept = [e for row, e in zip(rows, examples, strict=True) if row["licence"] in LICENCES]
    model = fit([*own_examples(), *kept])
    named = {
        signal: {name: float(f"{number:.5g}") for name, number in zip((*NAMES, "bias"), weights, strict=True)}
        for signal, weights in model._asdict().items()
    }
    WEIGHTS.write_text(json.dumps({"features": VERSION, **named}, indent=1) + "\n", encoding="utf-8")
    print(f"{WEIGHTS}: {len(NAMES)} features, {len(kept)} rows of the file and {PROMPTS.name}")


if __name__ == "__main__":
    main()
