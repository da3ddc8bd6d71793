"""Where a decided request may go, in order: its tier, or where the tier is busy or unavailable, what the
rule's contract allows. Nothing here can turn a `fail` into a less precise answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from engines.fleet import Fleet
from gateway.errors import GatewayError, NothingReady, TierNotAllowed
from gateway.identity import Tenant
from policies.decision import Decision

BUSY = "busy"
USE = "unavailable (use)"
DEGRADE = "unavailable (degrade)"
WAITED = "waited"


class Step(NamedTuple):
    """One tier to try; `because` is empty for the rule's own tier. `wait`: seconds to wait for it first."""

    tier: str
    because: str = ""
    wait: float = 0.0


def steps(decision: Decision, fleet: Fleet, tenant: Tenant) -> Iterator[Step]:
    """Tiers in the order in which they are to be tried; read lazily, since engines change meanwhile."""
    busy = decision.if_busy
    if (
        busy is not None
        and fleet.busy(decision.tier, busy.waiting, busy.kv)
        and tenant.may_use(busy.use)
        and fleet.pick(busy.use) is not None
    ):
        yield Step(busy.use, BUSY)
    allowed = tenant.may_use(decision.tier)
    if allowed:
        yield Step(decision.tier)
    contract = decision.contract
    if contract.kind == "use" and contract.use is not None and tenant.may_use(contract.use):
        yield Step(contract.use, USE)
    if contract.kind == "wait" and allowed:
        yield Step(decision.tier, WAITED, contract.wait)
    if contract.kind == "degrade" or (contract.kind == "wait" and contract.then == "degrade"):
        for tier in fleet.ready_below(decision.tier):
            if tenant.may_use(tier):
                yield Step(tier, DEGRADE)


def nowhere(decision: Decision, fleet: Fleet, tenant: Tenant, last: GatewayError | None) -> GatewayError:
    """The error for a request that found no engine: what the last one met, else what is missing."""
    if last is not None:
        return last
    tier = decision.tier
    if not tenant.may_use(tier):
        return TierNotAllowed(
            f"the rule `{decision.rule}` sends to tier `{tier}`, which this key may not use"
        )
    missing = fleet.missing().get(tier, "all engines were tried")
    return NothingReady(f"no engine of tier `{tier}` is ready ({missing})", retry_after=2)
