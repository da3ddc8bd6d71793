"""Logged decisions decided again under another policy: what moves between tiers. Pure, in flat memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from policies.decision import PINNED_RULE
from policies.logged import DecisionLine, FieldsLine, Line, NotRecordedError, Reader
from policies.policy import Policy
from policies.signals import SIGNALS

MAX_NAMES = 10_000
"""Names that are told apart, more than any policy has: whatever a log holds, memory stays flat."""

ELSEWHERE = "(others)"

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(slots=True)
class Load:
    """Requests, and their prompt and completion tokens."""

    requests: int = 0
    tokens: int = 0

    def add(self, tokens: int) -> None:
        self.requests += 1
        self.tokens += tokens

    def __add__(self, other: Load) -> Load:
        return Load(self.requests + other.requests, self.tokens + other.tokens)


class Way(NamedTuple):
    """From what was decided to what the policy decides."""

    rule: str
    tier: str
    new_rule: str
    new_tier: str


class Membership(NamedTuple):
    """A class of the policy, the tier that was decided, and the one that the policy decides."""

    name: str
    tier: str
    new_tier: str


class Replay:
    """A tally of logged decisions beside those of `policy`; feed it every line, in order.

    `ways` are the decisions that could be made again and `classes` those of them that are in a class.
    `pinned` named their tier themselves, no policy moves them. `undecided` are those that cannot be made
    again, `lacking` says by what the log does not have of them. `unknown` counts, by class, the requests of
    which it cannot be told whether they are in it. `policies` are the hashes under which the log was written;
    `first` and `last` are Unix times.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.decisions = 0
        self.first = float("inf")
        self.last = float("-inf")
        self.pinned = Load()
        self.undecided = Load()
        self.ways: dict[Way, Load] = {}
        self.classes: dict[Membership, Load] = {}
        self.lacking: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        self.policies: Counter[str] = Counter()
        self._reader = Reader(policy)
        self._tests = tuple((name, one.test) for name, one in sorted(policy.classes.items()))

    def feed(self, line: Line) -> None:
        """One line of a log."""
        if isinstance(line, FieldsLine):
            self._reader.fields(line)
            return
        self.decisions += 1
        self.first, self.last = min(self.first, line.time), max(self.last, line.time)
        self.policies[_bounded(self.policies, line.policy, ELSEWHERE)] += 1
        tokens = line.tokens
        if line.rule == PINNED_RULE:
            self.pinned.add(tokens)
            return
        facts, memo = self._reader.facts(line)
        try:
            rule = self.policy.rule_for(facts, memo)
        except NotRecordedError as error:
            what = self._what(line, error)
            self.lacking[_bounded(self.lacking, what, ELSEWHERE)] += 1
            self.undecided.add(tokens)
            return
        way = Way(line.rule, line.tier, rule.name, rule.send)
        _load(self.ways, way, Way(ELSEWHERE, line.tier[:64], rule.name, rule.send)).add(tokens)
        for name, test in self._tests:
            try:
                held = test(facts, memo)
            except NotRecordedError:
                self.unknown[name] += 1
                continue
            if held:
                inside = Membership(name, line.tier, rule.send)
                _load(self.classes, inside, Membership(name, ELSEWHERE, rule.send)).add(tokens)

    def _what(self, line: DecisionLine, error: NotRecordedError) -> str:
        """What a line lacks; where that is the text, the signals that would be measured from it."""
        if error.text:
            read = [name for name in self.policy.signals if SIGNALS[name].reads_text]
            return ", ".join(sorted({*read, *self.policy.patterns} - line.signals.keys()))
        return str(error)

    @property
    def compared(self) -> Load:
        """What the policy could decide, pinned requests left out."""
        return sum(self.ways.values(), Load())

    @property
    def moved(self) -> Load:
        """What the policy sends to another tier."""
        return sum((load for way, load in self.ways.items() if way.tier != way.new_tier), Load())

    @property
    def moved_share(self) -> float:
        """The part of all requests that move, or of which it cannot be told; 0..1, 0 where there are none."""
        moved = self.moved.requests + self.undecided.requests
        return moved / self.decisions if self.decisions else 0.0


def _bounded(known: Counter[str], name: str, otherwise: str) -> str:
    return name if name in known or len(known) < MAX_NAMES else otherwise


def _load(loads: dict[_Key, Load], key: _Key, otherwise: _Key) -> Load:
    found = loads.get(key)
    if found is None:
        if len(loads) >= MAX_NAMES:
            key = otherwise
        found = loads.setdefault(key, Load())
    return found
