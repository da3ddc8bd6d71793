"""Shapes that hurt engines: a 400 that names the field, and the engine is never asked."""

from __future__ import annotations

import json

import pytest

from gateway.config import Bounds
from gateway.dialects.body import Body
from gateway.dialects.bounds import check
from gateway.errors import InvalidRequest

BIG = {"type": "json_schema", "json_schema": {"schema": {"description": "x" * (64 << 10)}}}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 1_000_000_000),
        ("best_of", 5),
        ("stop", ["x"] * 17),
        ("stop_sequences", ["x"] * 17),
        ("logprobs", 21),
        ("top_logprobs", 21),
        ("prompt_logprobs", 21),
        ("prompt", ["x"] * 1024),
        ("prompt", [[1, 2]] * 9),
        ("response_format", BIG),
        ("guided_json", BIG),
        ("structured_outputs", BIG),
        ("prompt_embeds", "gASVAAAA"),
        ("best_of", 1e9),
        ("best_of", "1000000000"),
        ("top_logprobs", 1000.0),
        ("prompt_logprobs", "1000"),
        ("prompt_logprobs", -1),
    ],
)
def test_too_much_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(Body(json.dumps({field: value}).encode()), Bounds())
    assert caught.value.param == field
    assert field in caught.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 4),
        ("stop", ["x"] * 16),
        ("stop", "x"),
        ("logprobs", True),
        ("logprobs", 20),
        ("prompt", [1] * 5000),
        ("prompt", "x" * 5000),
        ("response_format", {"type": "json_object"}),
    ],
)
def test_what_is_within_bounds_passes(field: str, value: object) -> None:
    check(Body(json.dumps({field: value}).encode()), Bounds())
