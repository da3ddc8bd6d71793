"""One decision as a line of the decision log, and back: facts only, enough to decide it under another policy.

Of headers and metadata a line has those that the policies in force read, and of their values only what these
policies compare: one of them, `true` for any other, null where there is none. What a line does not have is an
error when it is asked for (`NotRecordedError`), never a guess.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from policies.decision import PINNED_RULE, Decision, SignalValue, pinned
from policies.expressions import folded
from policies.facts import Conversation, Facts
from policies.policy import Explanation, Policy
from policies.signals import SIGNALS, Memo

Logged = str | bool | None
_OTHER = "\0"
"""Stands for a value that equals none of those compared: no policy can compare with it."""


class NotRecordedError(Exception):
    """A policy asks for what a line of the log does not have, which the message names. `text`: the prompt."""

    def __init__(self, what: str, *, text: bool = False) -> None:
        super().__init__(what)
        self.text = text


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokens of one request, as the engine counted them."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0


class Other(msgspec.Struct, frozen=True):
    """What the policy that did not act would have done."""

    policy: str
    tier: str
    rule: str


class FieldsLine(msgspec.Struct, frozen=True, tag="fields", tag_field="kind"):
    """Which headers and metadata entries the decisions that name this `id` have, and the values that were
    compared. It stands in each file before the first of them."""

    id: str
    headers: dict[str, list[str]]
    metadata: dict[str, list[str]]


class DecisionLine(msgspec.Struct, tag="decision", tag_field="kind", omit_defaults=True):
    """`time` is Unix time in seconds, when the request arrived; `id` is its `x-request-id`.

    `tier` and `rule` were decided, `served` and `engine` are where it went (empty: it got no engine), and
    `because` says why where the two differ. `unavailable` is the contract's kind. `signals`, with patterns
    among them, has null where the request does not say.
    """

    time: float
    id: str
    policy: str
    fields: str
    dialect: str
    model: str
    tenant: str
    tier: str
    rule: str
    unavailable: str
    tags: list[str] = []
    headers: dict[str, Logged] = {}
    metadata: dict[str, Logged] = {}
    signals: dict[str, SignalValue | None] = {}
    reasons: tuple[str, ...] = ()
    served: str = ""
    engine: str = ""
    degraded: bool = False
    because: str = ""
    outcome: str = "ok"
    status: int = 0
    usage: Usage | None = None
    other: Other | None = None

    @property
    def tokens(self) -> int:
        """Prompt and completion; the estimated prompt where no engine counted."""
        if self.usage is not None:
            return self.usage.prompt + self.usage.completion
        estimated = self.signals.get("prompt_tokens")
        return estimated if isinstance(estimated, int) else 0


Line = FieldsLine | DecisionLine
decode = msgspec.json.Decoder(Line).decode
"""Raises msgspec.DecodeError (msgspec.ValidationError is one) for what is no line of a decision log."""


class Fields:
    """The headers and metadata entries that some policies read, with every value that they compare.

    `signals` are all that there are, the patterns of these policies among them.
    """

    def __init__(self, policies: Sequence[Policy]) -> None:
        patterns = {name: signal for policy in policies for name, signal in policy.patterns.items()}
        self.signals = (*SIGNALS.values(), *patterns.values())
        compared: dict[tuple[str, str], frozenset[str]] = {}
        for policy in policies:
            for at, values in policy.fields.items():
                compared[at] = compared.get(at, frozenset()) | values
        self._headers = _of_kind(compared, "header")
        self._metadata = _of_kind(compared, "metadata")
        told = [{name: sorted(values) for name, values in kind} for kind in (self._headers, self._metadata)]
        self.id = hashlib.sha256(msgspec.json.encode(told)).hexdigest()[:8]
        self.line = msgspec.json.encode(FieldsLine(self.id, told[0], told[1])) + b"\n"

    def headers(self, facts: Facts) -> dict[str, Logged]:
        """What a line may say of the headers of a request."""
        return {name: _logged(facts.headers.get(name), values) for name, values in self._headers}

    def metadata(self, facts: Facts) -> dict[str, Logged]:
        """What a line may say of the metadata of a request."""
        entries = facts.metadata
        return {
            name: _logged(entries[name], values) or True if name in entries else None
            for name, values in self._metadata
        }


def _of_kind(
    compared: Mapping[tuple[str, str], frozenset[str]], kind: str
) -> tuple[tuple[str, frozenset[str]], ...]:
    return tuple((name, values) for (one, name), values in sorted(compared.items()) if one == kind)


def _logged(value: object, values: frozenset[str]) -> Logged:
    if value is None:
        return None
    text = folded(value)
    return text if text in values else True


def line_of(
    facts: Facts, memo: Memo, decision: Decision, fields: Fields, *, id_: str, time: float, measure_all: bool
) -> DecisionLine:
    """What can be said of a decision at once; how it ended is for the caller to add.

    `memo` is what deciding has measured; with `measure_all`, the other signals are measured now. `time` is
    for facts that have none.
    """
    line = DecisionLine(
        time=time if facts.time is None else facts.time,
        id=id_,
        policy=decision.policy_hash,
        fields=fields.id,
        dialect=facts.dialect,
        model=facts.model,
        tenant=facts.tenant,
        tier=decision.tier,
        rule=decision.rule,
        unavailable=decision.contract.kind,
        tags=sorted(facts.tags),
        reasons=decision.reasons,
    )
    if decision.rule != PINNED_RULE:
        line.headers, line.metadata = fields.headers(facts), fields.metadata(facts)
        for signal in fields.signals if measure_all else ():
            if signal.name not in memo:
                memo[signal.name] = signal.read(facts, memo)
        line.signals = {name: value for name, value in memo.items() if name[0] != "."}
    return line


class RecordedFacts(Facts):
    """A request as a line has it. Whatever the line lacks raises NotRecordedError when it is asked for."""

    __slots__ = ()

    def __init__(self, line: DecisionLine, blind: Blind, lacking: set[str] | None) -> None:
        self.dialect = line.dialect
        self.model = line.model
        self.tenant = line.tenant
        self.tags = frozenset(line.tags)
        self.headers = _Entries("header", line.headers, blind, lacking)
        self.metadata = _Entries("metadata", line.metadata, blind, lacking)
        self.time = line.time
        self.tokens = None
        self._conversation = None
        self._read = _no_text

    def __getattr__(self, name: str) -> Any:
        raise NotRecordedError(name)


def _no_text() -> Conversation:
    raise NotRecordedError("the text", text=True)


Blind = frozenset[tuple[str, str]]
"""Fields of which a policy compares values that were not compared when the line was written."""


class _Entries(Mapping[str, str]):
    __slots__ = ("_blind", "_kind", "_lacking", "_logged")

    def __init__(
        self, kind: str, logged: Mapping[str, Logged], blind: Blind, lacking: set[str] | None
    ) -> None:
        self._kind = kind
        self._logged = logged
        self._blind = blind
        self._lacking = lacking

    def _lacks(self, what: str) -> None:
        if self._lacking is None:
            raise NotRecordedError(f"{self._kind} {what}")
        self._lacking.add(f"{self._kind} {what}")

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self._logged:
            self._lacks(name)
        value = self._logged.get(name)
        if value is None:
            return default
        if value is True:
            if (self._kind, name) in self._blind:
                self._lacks(f"{name}: other values")
            return _OTHER
        return value

    def __getitem__(self, name: str) -> str:
        value = self.get(name)
        if value is None:
            raise KeyError(name)
        return str(value)

    def __contains__(self, name: object) -> bool:
        if name not in self._logged:
            self._lacks(str(name))
        return self._logged.get(str(name)) is not None

    def __iter__(self) -> Iterator[str]:
        return (name for name, value in self._logged.items() if value is not None)

    def __len__(self) -> int:
        return sum(value is not None for value in self._logged.values())


class Reader:
    """Makes facts of the lines of a log for one policy. Feed it the lines in their order."""

    MAX_FIELDS = 1000

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._unknown: Blind = frozenset(policy.fields)
        self._blind: dict[str, Blind] = {}

    def fields(self, line: FieldsLine) -> None:
        """Remember what the lines of this id can tell the policy."""
        if len(self._blind) >= self.MAX_FIELDS:
            self._blind.clear()
        compared = {("header", name): values for name, values in line.headers.items()}
        compared |= {("metadata", name): values for name, values in line.metadata.items()}
        self._blind[line.id] = frozenset(
            at for at, values in self._policy.fields.items() if not values.issubset(compared.get(at, ()))
        )

    def facts(self, line: DecisionLine) -> tuple[RecordedFacts, Memo]:
        """The request, and what was measured of it."""
        return self._facts(line, None), dict(line.signals)

    def _facts(self, line: DecisionLine, lacking: set[str] | None) -> RecordedFacts:
        return RecordedFacts(line, self._blind.get(line.fields, self._unknown), lacking)

    def explain(self, line: DecisionLine) -> tuple[Explanation, set[str]]:
        """How the policy decides it, and what the line lacks; that is taken for not given."""
        lacking: set[str] = set()
        facts, memo = self._facts(line, lacking), dict(line.signals)
        patterns = self._policy.patterns
        for name, signal in (*SIGNALS.items(), *patterns.items()):
            if name not in memo:
                try:
                    memo[name] = signal.read(facts, memo)
                except NotRecordedError:
                    memo[name] = False if name in patterns else None
                    if name in patterns or name in self._policy.signals:
                        lacking.add(name)
        explanation = self._policy.explain(facts, memo)
        if line.rule == PINNED_RULE:
            explanation = replace(explanation, decision=pinned(line.tier, self._policy.hash))
        return explanation, lacking
