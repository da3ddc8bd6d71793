"""How far a text asks for code or maths, 0..1: two logistic regressions over the same features and words.

The weights are data (`weights.json`), fitted by `bench/fit_classifier.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from math import exp
from typing import NamedTuple

from policies.signals.features import NAMES, VERSION, Features, excerpt, measure

FILE = "weights.json"
BIAS = "bias"


class Scores(NamedTuple):
    """Both 0..1; 0.5 and more reads as yes."""

    code: float
    math: float


class Weights(NamedTuple):
    """Of one score: for each of NAMES, for words that speak for themselves (in UTF-8), and the bias."""

    features: tuple[float, ...]
    words: Mapping[bytes, float]
    bias: float


class Model(NamedTuple):
    """The weights of both scores; those of words are for the same `vocabulary`."""

    code: Weights
    math: Weights
    vocabulary: frozenset[bytes]


def read_model(text: str) -> Model:
    """The weights in a text; ValueError where they were fitted to other features than these."""
    data = json.loads(text)
    if data.get("features") != VERSION:
        raise ValueError(
            f"the weights are for features {data.get('features')}, these are {VERSION}: fit anew"
        )
    weights, words = data["weights"], data["words"]
    if weights.keys() != {*NAMES, BIAS}:
        odd = sorted(weights.keys() ^ {*NAMES, BIAS})
        raise ValueError(f"the weights do not fit the features, see {', '.join(odd[:5])}: fit anew")
    code, math = (
        Weights(
            tuple(float(weights[name][at]) for name in NAMES),
            {word.encode(): float(pair[at]) for word, pair in words.items()},
            float(weights[BIAS][at]),
        )
        for at in (0, 1)
    )
    return Model(code, math, frozenset(code.words))


@cache
def shipped_model() -> Model:
    """The weights that come with the package."""
    return read_model((resources.files("policies.signals") / FILE).read_text(encoding="utf-8"))


def score(features: Features, model: Model) -> Scores:
    """Both scores of measured features."""
    (for_code, code_words, code), (for_math, math_words, math), vocabulary = model
    values, known = features
    for index, value in values.items():
        code += for_code[index] * value
        math += for_math[index] * value
    if words := known & vocabulary:
        code += sum(map(code_words.__getitem__, words))
        math += sum(map(math_words.__getitem__, words))
    return Scores(_logistic(code), _logistic(math))


def scores(text: str) -> Scores:
    """How far a text asks for code and for maths; a long one is read at its head and its tail."""
    return score(measure(excerpt(text)), shipped_model())


def _logistic(value: float) -> float:
    return 1 / (1 + exp(-value)) if value > -30 else 0.0
