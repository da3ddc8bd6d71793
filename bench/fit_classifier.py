"""Fit the weights of the `code` and `math` signals, or measure what such a fit is worth on unseen sources.

    python bench/fit_classifier.py LABELLED.jsonl            writes policies/signals/weights.json
    python bench/fit_classifier.py LABELLED.jsonl --held-out writes nothing: each source of the file is
                                                             scored by a fit that saw none of its rows
    python bench/fit_classifier.py LABELLED.jsonl --held-out --own-words
                                                             the same, by word lists without the terms that
                                                             nothing else holds: a lower bound

Fitted on: the rows whose licence allows it (LICENCES), the requests in bench/data/prompts.txt, and pieces of
the standard library's sources. Needs numpy and scipy.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from classifier import read_rows, report
from scipy.optimize import minimize
from scipy.sparse import csr_matrix

from policies.signals.classifier import BIAS, FILE, Model, Scores, Weights, score
from policies.signals.features import NAMES, VERSION, WORDS, Features, Words, excerpt, measure, words_of
from policies.signals.lexicon import Lexicon, build, shipped_terms

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
WORD_SCALE = 2.0
"""How much easier a word gets a weight than a feature, whose values are divided by their deviation."""

WORD_LEAST = 3
"""Texts that a word must be in to get a weight."""

WORD_WEIGHT_LEAST = 0.07
"""Words with less weight than this for both are left out."""

PRIORS = (0.33, 0.15)
"""The shares of code and of maths that the examples are weighed to."""

OWN = "own"


class Text(NamedTuple):
    text: str
    code: bool
    math: bool
    weight: float
    source: str


class Example(NamedTuple):
    features: Features
    code: bool
    math: bool
    weight: float


def own_texts() -> Iterator[Text]:
    """The requests written for this, and pieces of source code without a request."""
    for line in PROMPTS.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            label, _, text = line.split(" ", 2)
            yield Text(text.replace("\\n", "\n"), label == "c", label == "m", 1.0, OWN)
    chosen = random.Random(7)
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[::3]:
        text = path.read_text(encoding="utf-8", errors="replace")
        if len(text) > 3000:
            begin = chosen.randrange(len(text) - 1500)
            yield Text(text[begin : begin + chosen.choice((300, 800, 1500))], True, False, 0.3, OWN)


def row_text(row: Mapping[str, Any]) -> Text:
    text = next(m["content"] for m in reversed(row["messages"]) if m["role"] == "user")
    return Text(text, row["code_heavy"], row["math"], 1.0, row["source"])


def examples_of(texts: Iterable[Text], words: Words = WORDS) -> list[Example]:
    return [Example(measure(excerpt(one.text), words), one.code, one.math, one.weight) for one in texts]


def fit(examples: Sequence[Example]) -> Model:
    """Ridge logistic regression, on features scaled by their deviation and on the words that occur often."""
    uses = Counter(word for example in examples for word in example.features.words)
    vocabulary = sorted(
        word
        for word, count in uses.items()
        if count >= WORD_LEAST and len(word) > 1 and word.decode().isalpha()
    )
    columns = {word: len(NAMES) + index for index, word in enumerate(vocabulary)}
    dense = np.zeros((len(examples), len(NAMES)))
    for row, example in enumerate(examples):
        for column, value in example.features.values.items():
            dense[row, column] = value
    scale = np.concatenate((1 / (dense.std(axis=0) + 0.05), np.full(len(vocabulary), WORD_SCALE)))
    cells: dict[str, list[Any]] = {"row": [], "column": [], "value": []}
    for row, example in enumerate(examples):
        held = {columns[word]: 1.0 for word in example.features.words & columns.keys()}
        for column, value in (example.features.values | held).items():
            cells["row"].append(row)
            cells["column"].append(column)
            cells["value"].append(value * scale[column])
    values = csr_matrix(
        (cells["value"], (cells["row"], cells["column"])), shape=(len(examples), len(NAMES) + len(vocabulary))
    )
    given = np.array([example.weight for example in examples])

    def solve(labels: Sequence[bool], prior: float) -> np.ndarray:
        wanted = np.array(labels, dtype=float)
        share = float(given @ wanted / given.sum())
        weight = given * np.where(wanted, prior / share, (1 - prior) / (1 - share))

        def loss(at: np.ndarray) -> tuple[float, np.ndarray]:
            reached = values @ at[:-1] + at[-1]
            missed = weight * (1 / (1 + np.exp(-np.clip(reached, -30, 30))) - wanted)
            cost = weight @ (np.logaddexp(0, reached) - wanted * reached) + RIDGE / 2 * at[:-1] @ at[:-1]
            return float(cost), np.append(values.T @ missed + RIDGE * at[:-1], missed.sum())

        found = minimize(loss, np.zeros(values.shape[1] + 1), jac=True, method="L-BFGS-B")
        return np.append(found.x[:-1] * scale, found.x[-1])

    code = solve([example.code for example in examples], PRIORS[0])
    maths = solve([example.math for example in examples], PRIORS[1])
    heard = [word for word, at in columns.items() if max(abs(code[at]), abs(maths[at])) >= WORD_WEIGHT_LEAST]
    return Model(
        *(
            Weights(
                tuple(map(_rounded, found[: len(NAMES)])),
                {word: _rounded(found[columns[word]]) for word in heard},
                _rounded(found[-1]),
            )
            for found in (code, maths)
        ),
        frozenset(heard),
    )


def _rounded(weight: float) -> float:
    return float(f"{weight:.4g}")


def held_out(rows: Sequence[Mapping[str, Any]], *, own_words: bool) -> list[Scores]:
    """The scores of each row by a model that saw no row of its source."""
    own, given = list(own_texts()), [row_text(row) for row in rows]
    usable = [row["licence"] in LICENCES for row in rows]
    holders = _holders([*own, *given]) if own_words else {}
    scores: dict[int, Scores] = {}
    shipped = examples_of([*own, *given])
    for source in {text.source for text in given}:
        unseen = {term for term, sources in holders.items() if sources == {source}}
        examples = examples_of([*own, *given], words_of(_without(unseen))) if unseen else shipped
        mine, theirs = examples[: len(own)], examples[len(own) :]
        others = [
            e for e, text, ok in zip(theirs, given, usable, strict=True) if ok and text.source != source
        ]
        model = fit([*mine, *others])
        for index, text in enumerate(given):
            if text.source == source:
                scores[index] = score(theirs[index].features, model)
    return [scores[index] for index in range(len(given))]


def _holders(texts: Iterable[Text]) -> Mapping[tuple[str, str], set[str]]:
    """The sources in whose texts a term of the word lists is found, by (subject, term)."""
    terms = dict(enumerate(shipped_terms()))
    single = build((str(number), term) for number, (_, term) in terms.items())
    numbers = [int(subject) for subject in single.subjects]
    holders: dict[tuple[str, str], set[str]] = defaultdict(set)
    for one in texts:
        counts, _, _ = single.count(excerpt(one.text))
        for number, count in zip(numbers, counts, strict=True):
            if count:
                holders[terms[number]].add(one.source)
    return holders


def _without(unseen: set[tuple[str, str]]) -> Lexicon:
    lexicon = build(term for term in shipped_terms() if term not in unseen)
    assert lexicon.subjects == WORDS.lexicon.subjects
    return lexicon


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("file", type=Path)
    parser.add_argument("--held-out", action="store_true", help="measure on unseen sources")
    parser.add_argument("--own-words", action="store_true", help="without a source's own words too")
    arguments = parser.parse_args()
    rows = read_rows(arguments.file)
    if arguments.held_out:
        report(rows, held_out(rows, own_words=arguments.own_words))
        return
    kept = [row_text(row) for row in rows if row["licence"] in LICENCES]
    model = fit(examples_of([*own_texts(), *kept]))
    code, math, _ = model
    names = (BIAS, *NAMES)
    pairs = zip((code.bias, *code.features), (math.bias, *math.features), strict=True)
    weights = dict(zip(names, pairs, strict=True))
    words = {word.decode(): (code.words[word], math.words[word]) for word in sorted(code.words)}
    lines = ",\n".join(
        f'"{key}": {{\n'
        + ",\n".join(
            f"{json.dumps(name, ensure_ascii=False)}: {json.dumps(pair)}" for name, pair in part.items()
        )
        + "\n}"
        for key, part in (("weights", weights), ("words", words))
    )
    WEIGHTS.write_text(f'{{\n"features": {VERSION},\n{lines}\n}}\n', encoding="utf-8")
    print(f"{WEIGHTS}: {len(NAMES)} features, {len(words)} words, {len(kept)} rows and {PROMPTS.name}")


if __name__ == "__main__":
    main()
