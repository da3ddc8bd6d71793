"""The outcome of a policy for one request: immutable, explainable, the same in a replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import msgspec

SignalValue = float | int | bool | str
NO_SIGNALS: Mapping[str, SignalValue] = MappingProxyType({})
PINNED_RULE = "pinned"
DEFAULT_WAITING = 8
DEFAULT_KV = 0.95


@dataclass(frozen=True, slots=True)
class Contract:
    """What may happen when no engine of the tier can take the request.

    `wait` is in seconds; what follows a wait that ran out is `then`. `use` names another tier.
    """

    kind: Literal["fail", "wait", "degrade", "use"] = "fail"
    wait: float = 0.0
    then: Literal["fail", "degrade"] = "fail"
    use: str | None = None


@dataclass(frozen=True, slots=True)
class Busy:
    """Where to go when every ready engine of the tier is over one of these figures.

    `waiting` counts requests queued at an engine, `kv` is the used share of its KV cache (0..1), `wait` the
    predicted wait in seconds, None where it does not matter.
    """

    use: str
    waiting: int = DEFAULT_WAITING
    kv: float = DEFAULT_KV
    wait: float | None = None


@dataclass(frozen=True, slots=True)
class Edits:
    """What a rule changes in the request: `max_tokens` is an upper bound, `temperature` is set."""

    max_tokens: int | None = None
    temperature: float | None = None


NO_EDITS = Edits()


class Decision(msgspec.Struct, frozen=True, eq=False):
    """Which tier, by which rule, why, and under which contract.

    `priority` is the engine's (lower is earlier), `trace` asks for a trace whatever the sampling. `measured`
    is all that was measured for it, as in a `policies.signals.Memo`.
    """

    tier: str
    rule: str
    contract: Contract
    policy_hash: str
    if_busy: Busy | None = None
    reasons: tuple[str, ...] = ()
    measured: Mapping[str, Any] = NO_SIGNALS
    priority: int = 0
    trace: bool = False
    edits: Edits = NO_EDITS

    @property
    def signals(self) -> Mapping[str, SignalValue]:
        """Signals that were measured, but for those that the request does not tell."""
        told = {name: value for name, value in self.measured.items() if name[0] != "." and value is not None}
        return MappingProxyType(told)

    def __eq__(self, other: object) -> bool:
        """By the signals, of what was measured: a replay has nothing else."""
        return isinstance(other, Decision) and _told(self) == _told(other)

    def __hash__(self) -> int:
        return hash((self.tier, self.rule, self.policy_hash))


def _told(decision: Decision) -> dict[str, Any]:
    return {**msgspec.structs.asdict(decision), "measured": decision.signals}


def pinned(tier: str, policy_hash: str) -> Decision:
    """The decision for a model name that names its tier: never another one."""
    return Decision(
        tier, PINNED_RULE, Contract("fail"), policy_hash, reasons=("the model name pins the tier",)
    )
