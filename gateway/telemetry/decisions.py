"""The opt-in decision log: for each decided request one line of facts, no word of its prompt or its reply."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec

from gateway.telemetry.decision_log import DecisionLog
from gateway.telemetry.record import Record
from policies import logged
from policies.decision import Decision
from policies.facts import Facts
from policies.logged import Fields
from policies.signals import Memo

logger = logging.getLogger("dualgauge.decisions")

encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Decided:
    """What was known when a request was decided. `other` is what the policy that did not act decided."""

    fields: Fields
    facts: Facts
    memo: Memo
    decision: Decision
    other: Decision | None = None


class Decisions:
    """`measure_all` adds the signals that deciding did not need: another policy may ask for them."""

    def __init__(self, log: DecisionLog, *, measure_all: bool) -> None:
        self.log = log
        self._measure_all = measure_all
        self._failed = False

    def record(self, record: Record, decided: Decided) -> None:
        """Log one request that has ended. Never fails: what cannot be written down is told once."""
        try:
            line = self._line(record, decided)
        except Exception:
            if not self._failed:
                self._failed = True
                logger.exception("request %s cannot be put into the decision log", record.request_id)
            self.log.drop()
            return
        self.log.append(decided.fields, line)

    def _line(self, record: Record, decided: Decided) -> bytes:
        line = logged.line_of(
            decided.facts,
            decided.memo,
            decided.decision,
            decided.fields,
            id_=record.request_id,
            time=record.started_ns / 1e9,
            measure_all=self._measure_all,
        )
        line.served, line.engine, line.degraded = record.tier, record.engine, record.degraded
        line.because, line.outcome, line.status = record.moved_because, record.outcome, record.status
        usage, other = record.usage, decided.other
        if usage is not None:
            line.usage = logged.Usage(usage.prompt, usage.completion, usage.cached)
        if other is not None:
            line.other = logged.Other(other.policy_hash, other.tier, other.rule)
        return encode(line) + b"\n"
