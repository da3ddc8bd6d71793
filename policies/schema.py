"""The JSON Schema of a policy file, made from the same tables that the reader uses; for editors.

What it cannot say (names that exist, cycles, the order of rules) `dualgauge policy check` says.
"""

from __future__ import annotations

from typing import Any

from policies.expressions import COMPARISONS, NAMES, PAIRS
from policies.patterns import MAX_PATTERN, PLACES
from policies.plan import MAX_WEIGHT
from policies.signals import DIALECTS, SIGNALS, Signal
from policies.times import DAYS
from policies.units import PERIODS, SECONDS

Schema = dict[str, Any]

_DURATION = rf"^[0-9]+(\.[0-9]+)?\s*({'|'.join(SECONDS)})$"
_RATE = rf"^[0-9]+(\.[0-9]+)?\s*[kKMG]?\s*/\s*[0-9]{{0,6}}\s*({'|'.join(PERIODS)})$"
_SHARE = r"^[0-9]{1,3}(\.[0-9]+)?\s*%$"
_COUNT = r"^[0-9]+(\.[0-9]+)?\s*[kKMG]?$"


def policy_schema() -> Schema:
    """JSON Schema (draft 2020-12) of version 1 of the policy language."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Dualgauge policy",
        "type": "object",
        "additionalProperties": False,
        "required": ["version", "rules"],
        "properties": {
            "version": {"const": 1, "description": "Version of the policy language."},
            "classes": {
                "type": "object",
                "description": "Named conditions, for rules and other classes to use.",
                "additionalProperties": _ref("condition"),
            },
            "rules": {
                "type": "array",
                "minItems": 1,
                "description": "The first rule that holds decides; the last one has no `when`.",
                "items": _ref("rule"),
            },
            "affinity": {
                "enum": ["conversation", None],
                "description": "Keep a conversation on one engine while that is good for its prefix cache.",
            },
            "plans": {
                "type": "object",
                "description": "What tenants may use, by plan name.",
                "additionalProperties": _ref("plan"),
            },
            "shadow": {
                "type": "string",
                "minLength": 1,
                "description": "A candidate that decides beside this policy, without acting.",
                "examples": ["candidate.yaml", "strict"],
            },
            "rollout": {
                **_ref("share"),
                "description": "The share of conversations that the candidate decides.",
                "default": 0,
                "examples": ["10%"],
            },
        },
        "dependentRequired": {"rollout": ["shadow"]},
        "$defs": {
            "condition": _condition(),
            "rule": _rule(),
            "tier": {"type": "string", "minLength": 1, "examples": ["fast", "exact"]},
            "contract": _contract(),
            "busy": _busy(),
            "duration": {"type": "string", "pattern": _DURATION, "examples": ["20s"]},
            "rate": {"type": "string", "pattern": _RATE, "examples": ["600/min", "200k/min"]},
            "count": _either({"type": "integer", "minimum": 0}, {"type": "string", "pattern": _COUNT}),
            "share": _either(
                {"type": "string", "pattern": _SHARE}, {"type": "number", "minimum": 0, "maximum": 1}
            ),
            "texts": _texts(),
            "plan": _plan(),
        },
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def _object(properties: Schema, required: list[str], description: str = "") -> Schema:
    schema = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    return {**schema, "description": description} if description else schema


def _condition() -> Schema:
    conditions = {"type": "array", "items": _ref("condition"), "minItems": 1}
    return _either(
        {"type": "string", "description": "The name of a class."},
        _object({"all": conditions}, ["all"], "Holds where every condition holds."),
        _object({"any": conditions}, ["any"], "Holds where one condition holds."),
        _object({"not": _ref("condition")}, ["not"], "Holds where the condition does not."),
        *(_pair(name) for name in PAIRS),
        *(_name(name) for name in NAMES),
        _matches(),
        _time(),
        *(_signal(signal) for signal in SIGNALS.values()),
    )


def _texts() -> Schema:
    one = {"type": ["string", "number", "boolean"]}
    return _either(one, {"type": "array", "items": one, "minItems": 1})


def _pair(name: str) -> Schema:
    values = {"type": "object", "additionalProperties": _ref("texts"), "minProperties": 1}
    present = {"type": "string", "description": "A name that need only be there."}
    return _object({name: _either(values, present)}, [name], f"A {name} entry, compared without case.")


def _name(name: str) -> Schema:
    if name != "dialect":
        return _object({name: _ref("texts")}, [name])
    one = {"enum": list(DIALECTS)}
    return _object({name: _either(one, {"type": "array", "items": one, "minItems": 1})}, [name])


def _matches() -> Schema:
    one = {"type": "string", "minLength": 1, "maxLength": MAX_PATTERN}
    patterns = _either(one, {"type": "array", "items": one, "minItems": 1})
    places = {place: {**patterns, "description": f"In {what}."} for place, what in PLACES.items()}
    both = {**_object(places, []), "minProperties": 1}
    about = "Holds where a pattern (RE2) is found in the last user turn, or in the system prompt."
    return _object({"matches": _either(*patterns["anyOf"], both)}, ["matches"], about)


def _time() -> Schema:
    clock = {"type": "string", "pattern": "^([01]?[0-9]|2[0-3]):[0-5][0-9]$|^24:00$"}
    day = "|".join(DAYS)
    span = {"type": "string", "pattern": f"^({day})(-({day}))?$", "examples": ["mon-fri"]}
    window = _object(
        {
            "from": {**clock, "default": "00:00"},
            "to": {**clock, "default": "24:00", "description": "Before `from`: on the next day."},
            "days": {
                **_either(span, {"type": "array", "items": span, "minItems": 1}),
                "default": "mon-sun",
                "description": "The days on which the window begins.",
            },
            "zone": {"type": "string", "default": "UTC", "examples": ["Europe/Berlin"]},
        },
        [],
    )
    return _object({"time": {**window, "minProperties": 1}}, ["time"], "Holds within these hours and days.")


def _signal(signal: Signal) -> Schema:
    value: Schema
    if signal.kind == "flag":
        value = {"type": "boolean"}
    elif signal.kind == "text":
        value = {"enum": list(signal.values)} if signal.values else {"type": "string"}
    elif signal.kind == "count":
        value = _ref("count")
    elif signal.kind == "share":
        value = _ref("share")
    elif signal.kind == "score":
        value = {"type": "number", "minimum": 0, "maximum": 1}
    else:
        value = {"type": "number"}
    ordered = signal.kind not in ("flag", "text")
    properties: Schema = {"signal": {"const": signal.name}}
    for comparison in COMPARISONS:
        if comparison == "in":
            properties["in"] = {"type": "array", "items": value, "minItems": 1}
        elif comparison == "equals" or ordered:
            properties[comparison] = value
    schema = _object(properties, ["signal"], f"{signal.about[0].upper()}{signal.about[1:]}.")
    return schema if signal.kind in ("flag", "count") else {**schema, "minProperties": 2}


def _rule() -> Schema:
    name = {
        "type": "string",
        "minLength": 1,
        "maxLength": 80,
        "pattern": "^[!-~]([ -~]*[!-~])?$",
        "not": {"const": "pinned"},
        "description": "What headers, traces and metrics show.",
    }
    max_tokens = {"type": "integer", "minimum": 1, "maximum": 10_000_000}
    temperature = {"type": "number", "minimum": 0, "maximum": 2}
    return _object(
        {
            "name": name,
            "when": {**_ref("condition"), "description": "Left out in the last rule only."},
            "send": {**_ref("tier"), "description": "The tier that takes the request."},
            "if_busy": _ref("busy"),
            "if_unavailable": _ref("contract"),
            "priority": {"type": "integer", "default": 0, "description": "Lower is served earlier."},
            "trace": {"const": "always", "description": "Trace these requests whatever the sampling."},
            "cap": _object({"max_tokens": max_tokens}, ["max_tokens"], "Upper bounds put on the request."),
            "set": _object({"temperature": temperature}, ["temperature"], "Values set in the request."),
        },
        ["name", "send"],
    )


def _contract() -> Schema:
    then = {"enum": ["fail", "degrade"], "default": "fail"}
    return {
        "description": "What may happen when no engine of the tier is ready.",
        "default": "fail",
        **_either(
            {"enum": ["fail", "degrade"]},
            _object({"wait": _ref("duration"), "then": then}, ["wait"]),
            _object({"use": _ref("tier")}, ["use"]),
        ),
    }


def _busy() -> Schema:
    waiting = {"type": "integer", "minimum": 0, "default": 8}
    kv = {"type": "number", "exclusiveMinimum": 0, "maximum": 1, "default": 0.95}
    wait = {**_ref("duration"), "description": "The wait that is predicted there."}
    return {
        "description": "Where to go when every ready engine of the tier is over one of these figures.",
        **_either(
            _ref("tier"),
            _object({"use": _ref("tier"), "waiting": waiting, "kv": kv, "wait": wait}, ["use"]),
        ),
    }


def _plan(*, of_a_model: bool = False) -> Schema:
    rates = _either(_ref("rate"), {"type": "array", "items": _ref("rate"), "minItems": 1})
    properties: Schema = {
        "requests": rates,
        "tokens": {**rates, "description": "Prompt and completion tokens over all tiers."},
        "concurrent": {**_ref("count"), "description": "Requests in flight."},
    }
    if not of_a_model:
        weight = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_WEIGHT}
        properties |= {
            "output": {
                **_ref("count"),
                "description": "Completion tokens reserved where none are asked for.",
                "default": 1024,
            },
            "wait": {**_ref("duration"), "description": "How long a request may wait for `concurrent`."},
            "weights": {
                "type": "object",
                "description": "What a token of a tier counts in `tokens`.",
                "additionalProperties": weight,
                "examples": [{"exact": 4}],
            },
            "cached": {
                **_ref("share"),
                "description": "What a prompt token counts that came from the prefix cache.",
                "default": 1,
            },
            "models": {
                "type": "object",
                "description": "Limits of single model names, beside those of the plan.",
                "additionalProperties": _plan(of_a_model=True),
            },
        }
    return {
        "type": "object",
        "properties": properties,
        "patternProperties": {"^.+_tokens$": {**rates, "description": "Tokens of one tier."}},
        "additionalProperties": False,
    }
