"""What an operator may allow: contents of a model's folder, and differences of two engines of a pair.

A module of its own, since a configuration names these and is read by processes that start no engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Allowed = Literal["pickle", "code", "template"]
"""Kinds of contents that are refused where nobody allows them."""

Aspect = Literal[
    "model", "tokenizer", "chat_template", "special_tokens", "eos", "max_length", "tool_parser", "sampling"
]
ASPECTS: tuple[Aspect, ...] = get_args(Aspect)


@dataclass(frozen=True, slots=True)
class Difference:
    """One aspect in which two engines differ; `details` are lines that show where. `digest`, `sha256:…`,
    stands for both values of all that differs, whichever engine has which: another difference has another."""

    aspect: Aspect
    one: str
    other: str
    details: tuple[str, ...]
    digest: str

    def __str__(self) -> str:
        return "\n".join(
            [f"{self.aspect}: {self.one} and {self.other} differ", *(f"    {line}" for line in self.details)]
        )


@dataclass(frozen=True, slots=True)
class Allowance:
    """What an operator has allowed: whole aspects, whatever differs in them, and single differences by their
    digests."""

    aspects: frozenset[str] = frozenset()
    accepted: frozenset[str] = frozenset()

    def covers(self, difference: Difference) -> bool:
        return difference.aspect in self.aspects or difference.digest in self.accepted


NOTHING = Allowance()
