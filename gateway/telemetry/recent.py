"""The latest decisions, for the console: bounded, facts only, and next to free while nobody looks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from gateway.telemetry.record import Record
from policies.policy import Explanation, Policy

MOST = 200
"""Decisions that are kept for whoever looks."""
LATEST = 50
"""Decisions that are kept, without an explanation, while nobody looks."""
EACH_LOOK = 20
"""Decisions that are explained between one look and the next, about a second later."""
IDLE_SECONDS = 5.0


class Seen(NamedTuple):
    """A decision that is shown. `record` goes on changing until its request has ended."""

    record: Record
    explanation: Explanation | None = None
    policy: Policy | None = None


class Recent:
    """Each look pays for the next decisions to be explained: `left` is how many still are. However many look,
    and however many requests come, no more than `EACH_LOOK` a second cost more than being remembered."""

    __slots__ = ("_latest", "_looked", "_shown", "left")

    def __init__(self) -> None:
        self.left = 0
        self._latest: deque[Record] = deque(maxlen=LATEST)
        self._shown: deque[Seen] = deque(maxlen=MOST)
        self._looked = -IDLE_SECONDS

    def add(self, record: Record) -> None:
        """A decision that is not explained."""
        self._latest.append(record)

    def explain(self, record: Record, explanation: Explanation, policy: Policy) -> None:
        """A decision with all that `dualgauge explain` shows of it, under the policy that made it."""
        self.left -= 1
        self._shown.append(Seen(record, explanation, policy))

    def look(self, now: float) -> Sequence[Seen]:
        """What there is to show. `now` is in monotonic seconds: after a while without a look, the latest
        decisions are shown as they are; between two looks, those that were explained stand for all."""
        if now - self._looked >= IDLE_SECONDS:
            self._shown.extend(Seen(record) for record in self._latest)
        self._latest.clear()
        self._looked = now
        self.left = EACH_LOOK
        return self._shown

    def find(self, request_id: str) -> Seen | None:
        """A decision that is still shown."""
        return next((seen for seen in self._shown if seen.record.request_id == request_id), None)
