"""A candidate beside the policy in force: it decides live traffic too, and acts for a share of conversations.

It can do no harm: whatever goes wrong in it, the policy in force decides.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from policies.decision import Decision
from policies.facts import Facts
from policies.policy import Policy
from policies.signals import SIGNALS, Memo
from policies.signals.sample import place

logger = logging.getLogger("dualgauge.gateway")

_CONVERSATION = "sample"
_CLASS = ".class "


@dataclass(frozen=True, slots=True)
class Way:
    """The rule and tier of the policy in force, and those of the candidate."""

    rule: str
    tier: str
    candidate_rule: str
    candidate_tier: str


@dataclass(slots=True)
class Tally:
    """What a candidate decided since it was put beside a policy; at most one way for each pair of rules."""

    decided: int = 0
    acted: int = 0
    failed: int = 0
    ways: dict[Way, int] = field(default_factory=dict)


class Candidate:
    """`share` (0..1) of the conversations are decided by `policy`, beside `live`; all are counted.

    `named` is how the live policy names it, in full.
    """

    def __init__(self, named: str, policy: Policy, live: Policy, share: float) -> None:
        self.named = named
        self.policy = policy
        self.live = live.hash
        self.share = share
        self.tally = Tally()

    def beside(self, facts: Facts, memo: Memo, live: Decision) -> tuple[Decision, Decision | None]:
        """The decision that acts and the other one, None where the candidate failed.

        `memo` is what deciding `live` has measured; what the candidate measures is added.
        """
        tally = self.tally
        try:
            # Classes of two policies may share a name.
            for name in [name for name in memo if name.startswith(_CLASS)]:
                del memo[name]
            decision = self.policy.decide(facts, memo)
            acts = self.share > 0 and _place(facts, memo) < self.share
        except Exception:
            tally.failed += 1
            if tally.failed == 1:
                logger.exception("the candidate %s cannot decide: the policy in force does", self.policy.file)
            return live, None
        tally.decided += 1
        way = Way(live.rule, live.tier, decision.rule, decision.tier)
        tally.ways[way] = tally.ways.get(way, 0) + 1
        if acts:
            tally.acted += 1
            return decision, live
        return live, decision

    def status(self) -> Mapping[str, object]:
        """What `dualgauge status` shows: how often it decided otherwise, and by which rules."""
        tally = self.tally
        moved = sum(count for way, count in tally.ways.items() if way.tier != way.candidate_tier)
        ways = sorted(tally.ways.items(), key=lambda pair: -pair[1])
        return {
            "file": self.policy.file,
            "hash": self.policy.hash,
            "rollout": self.share,
            "decided": tally.decided,
            "acted": tally.acted,
            "failed": tally.failed,
            "moved": moved,
            "differences": [
                {
                    "rule": way.rule,
                    "tier": way.tier,
                    "candidate_rule": way.candidate_rule,
                    "candidate_tier": way.candidate_tier,
                    "requests": count,
                }
                for way, count in ways
                if way.tier != way.candidate_tier or way.rule != way.candidate_rule
            ],
        }


def _place(facts: Facts, memo: Memo) -> float:
    """Where the conversation falls between 0 and 1, by its tenant and its turns up to the user's first.

    Not where the signal `sample` puts it: a candidate that tests it must not be tried on one side only.
    """
    if _CONVERSATION not in memo:
        memo[_CONVERSATION] = SIGNALS[_CONVERSATION].read(facts, memo)
    return place("rollout", repr(memo[_CONVERSATION]))
