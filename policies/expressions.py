"""Conditions as values: hashable trees, so that equal conditions are equal however they were written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from policies import units
from policies.document import unknown
from policies.signals import Signal
from policies.times import Window

COMPARISONS = {"at_least": ">=", "above": ">", "at_most": "<=", "below": "<", "equals": "", "in": "one of"}
PAIRS = ("header", "metadata")
NAMES = ("tenant_tag", "tenant", "model", "dialect")
TESTS = ("signal", *PAIRS, *NAMES, "matches", "time", "all", "any", "not")

FieldKind: TypeAlias = Literal["header", "metadata", "tenant_tag", "tenant", "model", "dialect"]
Operand: TypeAlias = float | int | bool | str | frozenset[float | int | str]


@dataclass(frozen=True, slots=True)
class AllOf:
    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Not:
    part: Expression


@dataclass(frozen=True, slots=True)
class ClassName:
    name: str


@dataclass(frozen=True, slots=True)
class SignalTest:
    """`op` is a key of COMPARISONS."""

    signal: str
    op: str
    operand: Operand


@dataclass(frozen=True, slots=True)
class FieldTest:
    """`key` names the header or metadata entry; no `values` means that it need only be there."""

    kind: FieldKind
    key: str
    values: frozenset[str] | None


@dataclass(frozen=True, slots=True)
class PatternTest:
    """`place` is one of `policies.patterns.PLACES`."""

    place: str
    pattern: str


Expression: TypeAlias = AllOf | AnyOf | Not | ClassName | SignalTest | FieldTest | PatternTest | Window


def operand_of(signal: Signal, op: str, value: Any) -> Operand:
    """What a signal is compared with; ValueError where the signal has no such comparison or value."""
    if op == "in":
        if not isinstance(value, list) or not value:
            raise ValueError("`in` is a list of at least one value")
        return frozenset(_scalar(signal, item) for item in value)
    if op != "equals" and signal.kind in ("text", "flag"):
        raise ValueError(f"the signal `{signal.name}` has no order: use `equals` or `in`")
    return _scalar(signal, value)


def _scalar(signal: Signal, value: Any) -> float | int | bool | str:
    if signal.kind == "flag":
        if not isinstance(value, bool):
            raise ValueError(f"the signal `{signal.name}` is true or false")
        return value
    if signal.kind == "text":
        if not isinstance(value, str):
            raise ValueError(f"the signal `{signal.name}` is a text")
        if signal.values and value not in signal.values:
            raise ValueError(unknown(signal.name, value, signal.values))
        return value
    if signal.kind == "count":
        return units.count(value)
    if signal.kind == "share":
        return units.share(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"the signal `{signal.name}` is a number")
    if signal.kind == "score" and not 0 <= value <= 1:
        raise ValueError(f"the signal `{signal.name}` lies between 0 and 1")
    return value


# A union of types would be made anew by each test.
SCALARS = (str, bool, int, float)


def folded(value: object) -> str | None:
    """The value of a header or metadata entry as it is compared; None for one that is not, as a list."""
    return text_of(value).strip().casefold() if isinstance(value, SCALARS) else None


def text_of(value: object) -> str:
    """A scalar as the text that it is compared by: booleans as JSON spells them."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
