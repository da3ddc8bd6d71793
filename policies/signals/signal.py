"""What a signal is: a fact measured from one request, by a pure function of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from policies.decision import SignalValue
from policies.facts import Facts

Memo: TypeAlias = dict[str, Any]
"""What was measured of one request so far: signals by name, shared work under names that start with a dot."""

Kind: TypeAlias = Literal["score", "share", "count", "number", "flag", "text"]


@dataclass(frozen=True, slots=True)
class Signal:
    """`read` gives the value, None where the request does not say (no comparison holds for None).

    `kind`: score and share are 0..1 (a share may be written `10%`), count a whole number from 0, number any,
    flag yes or no, text one of `values` (any where that is empty). `reads_text`: whether the conversation is
    needed.
    """

    name: str
    kind: Kind
    about: str
    read: Callable[[Facts, Memo], SignalValue | None]
    reads_text: bool = False
    values: tuple[str, ...] = ()
