"""What the console's page shows live: one answer that all consoles share, made once a second at most."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from gateway.runtime import Gateway
from gateway.surface import status_body
from gateway.telemetry.history import History
from gateway.telemetry.recent import Seen
from policies.decision import PINNED_RULE

EVERY_SECONDS = 1.0
FRESH_SECONDS = 0.9
AT_ONCE = 20
"""Consoles that may ask once a second; more of them are told to ask as much more rarely."""
NOT_DECIDED = "none"

encode = msgspec.json.Encoder().encode


class Live:
    """A cursor, opaque to the page, names what it has: it is sent what has changed since, all of it where the
    cursor is another process's or too old. `process` is a name that no other has."""

    def __init__(self, process: str, clock: Callable[[], float], history: History) -> None:
        self._process = process
        self._clock = clock
        self._history = history
        self._made_at = -FRESH_SECONDS
        self._looks = 0
        self._every = EVERY_SECONDS
        self._tick = 0
        self._state = b""
        # By request id: the tick of its last change, its JSON, and whether it has ended.
        self._decisions: dict[str, tuple[int, bytes, bool]] = {}

    def due(self) -> bool:
        """Count a look; whether what is shown is too old for it."""
        self._looks += 1
        now = self._clock()
        passed = now - self._made_at
        if passed < FRESH_SECONDS:
            return False
        consoles = self._looks * self._every / passed
        self._every = round(max(EVERY_SECONDS, consoles / AT_ONCE), 1)
        self._looks = 0
        self._made_at = now
        return True

    def show(self, state: bytes, names: Iterable[str], row: Callable[[str], tuple[bytes, bool]]) -> None:
        """What there is now. `row` gives a decision's JSON and whether it has ended; then it is not asked for
        again."""
        self._tick += 1
        self._state = state
        decisions: dict[str, tuple[int, bytes, bool]] = {}
        for name in names:
            before = self._decisions.get(name)
            if before is None or not before[2]:
                made, ended = row(name)
                if before is None or before[1] != made:
                    before = self._tick, made, ended
            decisions[name] = before
        self._decisions = decisions

    def body(self, cursor: str) -> bytes:
        """The answer to a console that has what `cursor` names."""
        tick, made = self._position(cursor)
        history = self._history
        parts = {
            "cursor": f"{self._form}.{self._tick}.{history.made}",
            "every": self._every,
            "state": msgspec.Raw(self._state),
            "decisions": [msgspec.Raw(row) for at, row, _ in self._decisions.values() if at > tick],
            "history": history.since(made),
        }
        if made < 0:
            parts["columns"] = history.columns
        return encode(parts)

    @property
    def _form(self) -> str:
        """What a cursor's figures belong to: this process, and the columns that rows have now."""
        return f"{self._process}-{self._history.form}"

    def _position(self, cursor: str) -> tuple[int, int]:
        form, _, numbers = cursor.partition(".")
        tick, _, made = numbers.partition(".")
        if form != self._form or not (tick + made).isdecimal():
            return -1, -1
        return int(tick), int(made)


def state(gateway: Gateway) -> dict[str, Any]:
    """`/admin/status`, and what the page shows besides: rules with their counts, and the store of limits."""
    totals = gateway.metrics.rule_totals()
    sends = {rule.name: rule.send for rule in gateway.snapshot.policy.rules}
    # Those of a policy that was reloaded since keep their counts.
    names = [*sends, *(name for name in totals if name not in sends and name != NOT_DECIDED)]
    rules = []
    for name in names:
        requests, degraded = totals.get(name, (0.0, 0.0))
        rules.append(
            {
                "name": name,
                "send": sends.get(name, ""),
                "requests": int(requests),
                "degraded": int(degraded),
                "in_policy": name in sends or name == PINNED_RULE,
            }
        )
    return {
        **status_body(gateway),
        "now": round(gateway.wall(), 1),
        "rules": rules,
        "undecided": int(totals.get(NOT_DECIDED, (0.0, 0.0))[0]),
        "store": {"kind": gateway.config.limits.store.partition(":")[0], "up": gateway.store.up()},
    }


def decision_row(seen: Seen) -> dict[str, Any]:
    """One decision, facts only. Seconds count from the request's arrival; `done` is whether it has ended."""
    record = seen.record
    decision = record.decision
    done = record.ended > 0
    return {
        "id": record.request_id,
        "time": round(record.started_ns / 1e9, 3),
        "tenant": record.tenant,
        "dialect": record.dialect,
        "model": record.model,
        "stream": record.stream,
        "decided": "" if decision is None else decision.tier,
        "rule": record.rule,
        "reasons": () if decision is None else decision.reasons,
        "tier": record.tier,
        "engine": record.engine,
        "precision": record.precision,
        "degraded": record.degraded,
        "because": record.moved_because,
        "edits": record.edits,
        "done": done,
        "outcome": record.outcome if done else "",
        "status": record.status,
        "error": record.error_code,
        "attempts": record.attempts,
        "queued": round(record.queue_seconds, 3),
        "first_token": None if record.first_token is None else round(record.first_token - record.started, 4),
        "seconds": round(record.ended - record.started, 4) if done else None,
        "usage": record.usage,
        "explained": seen.explanation is not None,
    }
