"""What is known of one request when it ends. Facts only: no prompt, no reply, no key."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from engines.fleet import Engine
from gateway.relay.sse import Usage
from gateway.telemetry.content import ReplyCopy
from policies.decision import Decision

Outcome = Literal[
    "ok", "client_error", "limited", "unavailable", "engine_error", "timeout", "cancelled", "internal_error"
]
GOOD: frozenset[Outcome] = frozenset({"ok", "cancelled", "client_error", "limited"})
"""Outcomes that are no failure of the gateway's or of its engines."""


class TraceIds(msgspec.Struct, gc=False):
    """W3C trace context of one request, in the hexadecimal of `traceparent`: the span that engines hear of,
    and the caller's where it sent one; `state` is its `tracestate`."""

    trace: bytes
    client_span: bytes
    parent_span: bytes | None
    sampled: bool
    state: bytes | None = None


class Wait(NamedTuple):
    """One wait for a tier to have a ready engine; times are monotonic seconds."""

    tier: str
    started: float
    ended: float


class Retry(NamedTuple):
    """One attempt that led nowhere; `at` is in monotonic seconds, `why` the engine's way to fail."""

    engine: str
    at: float
    why: str


class Record(msgspec.Struct):
    """Filled in on the way, read once at the end. Times are monotonic seconds; `started_ns` is Unix time in
    nanoseconds. An empty tier means that the request ended before it had one. `target` is the engine that was
    asked last, `limit` the kind of limit that refused, `copy` the reply where traces may hold it."""

    request_id: str
    started: float
    started_ns: int
    method: str = ""
    route: str = ""
    dialect: str = "none"
    tenant: str = ""
    model: str = ""
    stream: bool = False
    tier: str = ""
    engine: str = ""
    precision: str = ""
    rule: str = ""
    reason: str = ""
    policy_hash: str = ""
    degraded: bool = False
    moved_because: str = ""
    edits: str = ""
    status: int = 0
    outcome: Outcome = "ok"
    error_code: str = ""
    attempts: int = 0
    usage: Usage | None = None
    decision: Decision | None = None
    decide_began: float = 0.0
    decide_seconds: float | None = None
    reserve_began: float | None = None
    reserved: float | None = None
    limit: str = ""
    queue_seconds: float = 0.0
    waits: tuple[Wait, ...] = ()
    retries: tuple[Retry, ...] = ()
    target: Engine | None = None
    asked: float | None = None
    first_token: float | None = None
    ended: float = 0.0
    trace: TraceIds | None = None
    copy: ReplyCopy | None = None
