"""Where a decided request may go, in order: its tier, or where the tier is busy or unavailable, what the
rule's contract allows. Nothing here can turn a `fail` into a less precise answer."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import msgspec

from engines.fleet import Engine, Fleet
from gateway.errors import GatewayError, ModelNotFound, NothingReady, TierNotAllowed
from gateway.identity import Tenant
from policies.decision import PINNED_RULE, Busy, Decision
from policies.facts import Facts
from policies.signals import SIGNALS
from policies.signals.prompt import estimate

BUSY = "busy"
USE = "unavailable (use)"
DEGRADE = "unavailable (degrade)"
WAITED = "waited"
CONVERSATION = "conversation"
KEY_BITS = 48


class Step(NamedTuple):
    """One tier to try; `because` is empty for the rule's own tier. `wait`: seconds to wait for it first."""

    tier: str
    because: str = ""
    wait: float = 0.0


class Past:
    """What a request goes on with, measured only when somebody asks. `holder` is the engine that made the
    reply which it continues: no other one has it. Else its conversation (`facts`) has an engine of its own in
    each tier; `sample` is where the signal of that name puts it, None while nobody has asked."""

    __slots__ = ("_facts", "holder", "sample")

    def __init__(self, holder: Engine | None, facts: Facts | None, sample: float | None) -> None:
        self._facts = facts
        self.holder = holder
        self.sample = sample

    def pick(self, fleet: Fleet, tier: str, tried: Collection[Engine]) -> Engine | None:
        """The engine of a tier for this request, None where there is none left."""
        holder = self.holder
        if holder is not None:
            return holder if holder.spec.tier == tier and holder.usable and holder not in tried else None
        key = self._key(self._facts) if self._facts is not None and tier in fleet.several else None
        return fleet.pick(tier, tried, key)

    def _key(self, facts: Facts) -> int:
        """By tenant and the turns up to the first of the user's, which stay while a conversation grows."""
        if self.sample is None:
            sample = SIGNALS["sample"].read(facts, {})
            assert isinstance(sample, float)
            self.sample = sample
        return int(self.sample * (1 << KEY_BITS))

    def stays(self, fleet: Fleet, tier: str, busy: Busy) -> bool:
        """Whether to queue at a busy tier costs a conversation less than to move.

        Counted are the wait that is predicted there, against the wait where it would go and the time in which
        that engine computes the prompt up to the last reply, which the busy one may have in its prefix cache.
        Without earlier turns there is nothing to lose, and what is not known decides nothing.
        """
        if self._facts is None:
            return False
        stay, prefill = fleet.predicted_wait(tier, busy.kv), fleet.prefill(busy.use)
        if stay is None or prefill is None:
            return False
        return stay < (fleet.predicted_wait(busy.use) or 0.0) + _earlier(self._facts) * prefill


def _earlier(facts: Facts) -> int:
    """Tokens of a conversation up to its last reply, estimated."""
    turns = facts.turns
    last = max((index for index, turn in enumerate(turns) if turn.role == "assistant"), default=None)
    if last is None:
        return 0
    return estimate(msgspec.structs.replace(facts.conversation, turns=tuple(turns[: last + 1])))


def steps(decision: Decision, fleet: Fleet, tenant: Tenant, past: Past | None = None) -> Iterator[Step]:
    """Tiers in the order in which they are to be tried; read lazily, since engines change meanwhile."""
    holder = None if past is None else past.holder
    if (
        holder is not None
        and decision.rule != PINNED_RULE
        and fleet.less_precise(decision.tier, holder.spec.tier)
        and tenant.may_use(holder.spec.tier)
    ):
        yield Step(holder.spec.tier, CONVERSATION)
    busy = decision.if_busy
    if (
        busy is not None
        and fleet.busy(decision.tier, busy.waiting, busy.kv, busy.wait)
        and tenant.may_use(busy.use)
        and fleet.pick(busy.use) is not None
        and (past is None or not past.stays(fleet, decision.tier, busy))
    ):
        yield Step(busy.use, BUSY)
    allowed = tenant.may_use(decision.tier)
    if allowed:
        yield Step(decision.tier)
    contract = decision.contract
    turn = fleet.turns.get(decision.tier, 0.0)
    if turn and allowed and not _now_elsewhere(decision, fleet, tenant):
        yield Step(decision.tier, WAITED, turn)
    if contract.kind == "use" and contract.use is not None and tenant.may_use(contract.use):
        yield Step(contract.use, USE)
    if contract.kind == "wait" and allowed:
        yield Step(decision.tier, WAITED, contract.wait)
    if contract.kind == "degrade" or (contract.kind == "wait" and contract.then == "degrade"):
        for tier in fleet.ready_below(decision.tier):
            if tenant.may_use(tier):
                yield Step(tier, DEGRADE)


def _now_elsewhere(decision: Decision, fleet: Fleet, tenant: Tenant) -> bool:
    """Whether the tier has its turn, or the contract names another that is no less precise and has."""
    if any(engine.usable for engine in fleet.tiers[decision.tier]):
        return True
    use = decision.contract.use if decision.contract.kind == "use" else None
    return (
        use is not None
        and tenant.may_use(use)
        and not fleet.less_precise(use, decision.tier)
        and fleet.pick(use) is not None
    )


def nowhere(
    decision: Decision, fleet: Fleet, tenant: Tenant, last: GatewayError | None, past: Past | None = None
) -> GatewayError:
    """The error for a request that found no engine: what the last one met, else what is missing."""
    if last is not None:
        return last
    tier = decision.tier
    if not tenant.may_use(tier):
        return TierNotAllowed(
            f"the rule `{decision.rule}` sends to tier `{tier}`, which this key may not use"
        )
    if past is not None and past.holder is not None:
        return _not_held(decision, past.holder)
    missing = fleet.missing().get(tier, "all engines were tried")
    return NothingReady(f"no engine of tier `{tier}` is ready ({missing})", retry_after=2)


def _not_held(decision: Decision, holder: Engine) -> GatewayError:
    if holder.usable and holder.spec.tier != decision.tier:
        return ModelNotFound(
            f"tier `{holder.spec.tier}` has the reply before this one, and the rule `{decision.rule}` sends "
            f"to `{decision.tier}`: send the conversation itself, without `previous_response_id`",
            param="previous_response_id",
            code="response_not_found",
        )
    reason = holder.held or f"{holder.state}, {holder.reason}"
    text = f"engine {holder.spec.name}, which has the reply before this one, is not ready ({reason})"
    return NothingReady(text, retry_after=2)
