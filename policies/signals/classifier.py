"""How far a text asks for code or maths, 0..1: two logistic regressions over the same features.

The weights are data (`weights.json`), fitted by `bench/fit_classifier.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from math import exp
from typing import NamedTuple

from policies.signals.features import NAMES, VERSION, Features, measure

Weights = tuple[float, ...]
FILE = "weights.json"


class Scores(NamedTuple):
    """Both 0..1; 0.5 and more reads as yes."""

    code: float
    math: float


class Model(NamedTuple):
    """A weight for each of NAMES, then the bias."""

    code: Weights
    math: Weights


def read_model(text: str) -> Model:
    """The weights in a text; ValueError where they were fitted to other features than these."""
    data = json.loads(text)
    if data.get("features") != VERSION:
        raise ValueError(
            f"the weights are for features {data.get('features')}, these are {VERSION}: fit anew"
        )
    return Model(_weights(data["code"]), _weights(data["math"]))


def _weights(named: Mapping[str, float]) -> Weights:
    if named.keys() != {*NAMES, "bias"}:
        odd = sorted(named.keys() ^ {*NAMES, "bias"})
        raise ValueError(f"the weights do not fit the features, see {', '.join(odd[:5])}: fit anew")
    return (*(float(named[name]) for name in NAMES), float(named["bias"]))


@cache
def shipped_model() -> Model:
    """The weights that come with the package."""
    return read_model((resources.files("policies.signals") / FILE).read_text(encoding="utf-8"))


def score(features: Features, model: Model) -> Scores:
    """Both scores of measured features."""
    code_weights, math_weights = model
    code, math = code_weights[-1], math_weights[-1]
    for index, value in features.items():
        code += code_weights[index] * value
        math += math_weights[index] * value
    return Scores(_logistic(code), _logistic(math))


def scores(text: str) -> Scores:
    """How far a text asks for code and for maths."""
    return score(measure(text), shipped_model())


def _logistic(value: float) -> float:
    return 1 / (1 + exp(-value)) if value > -30 else 0.0
