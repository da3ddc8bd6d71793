"""Shapes of a request that would hurt an engine, refused before one is asked.

Figures are the deployment's `bounds`; why each matters is in vLLM's advisories (a schema or pattern that
takes the grammar compiler down, `n` of a billion, embeddings that are unpickled).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gateway.config import Bounds
from gateway.dialects.body import ANY, Body
from gateway.errors import InvalidRequest

Check = Callable[[str, Any, Body, Bounds], None]


def _at_most(name: str, what: str, value: int, most: int, setting: str) -> None:
    if value > most:
        raise InvalidRequest(f"{what} must be at most {most} (bounds.{setting})", param=name)


def _whole(name: str, value: Any) -> int:
    # Engines read 1e9 and "1000000000" as the integer too: what is no integer must not pass by the bound.
    if not isinstance(value, int) or value < 0:
        raise InvalidRequest(f"{name} must be an integer, and not negative", param=name)
    return value


def _answers(name: str, value: Any, _: Body, bounds: Bounds) -> None:
    _at_most(name, name, _whole(name, value), bounds.n, "n")


def _stops(name: str, value: Any, _: Body, bounds: Bounds) -> None:
    if isinstance(value, list):
        _at_most(name, f"the length of {name}", len(value), bounds.stop, "stop")


def _logprobs(name: str, value: Any, _: Body, bounds: Bounds) -> None:
    if not isinstance(value, bool):
        _at_most(name, name, _whole(name, value), bounds.logprobs, "logprobs")


def _prompts(name: str, value: Any, _: Body, bounds: Bounds) -> None:
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        _at_most(name, f"the length of {name}", len(value), bounds.prompts, "prompts")


def _schema(name: str, _value: Any, body: Body, bounds: Bounds) -> None:
    size = body.size(name)
    if size > bounds.schema:
        raise InvalidRequest(f"{name} is {size} bytes, at most {bounds.schema} (bounds.schema)", param=name)


def _refused(name: str, _value: Any, _body: Body, _bounds: Bounds) -> None:
    raise InvalidRequest(f"{name} is not accepted: send text", param=name)


CHECKS: Mapping[str, Check] = {
    "n": _answers,
    "best_of": _answers,
    "stop": _stops,
    "stop_sequences": _stops,
    "stop_token_ids": _stops,
    "logprobs": _logprobs,
    "top_logprobs": _logprobs,
    "prompt_logprobs": _logprobs,
    "prompt": _prompts,
    "response_format": _schema,
    "guided_json": _schema,
    "guided_regex": _schema,
    "guided_grammar": _schema,
    "structured_outputs": _schema,
    "text": _schema,
    "prompt_embeds": _refused,
}


def check(body: Body, bounds: Bounds) -> None:
    """Raises InvalidRequest naming the field."""
    for name in body.names & CHECKS.keys():
        CHECKS[name](name, body.get(name, ANY), body, bounds)
