"""What is known of one request when it ends. Facts only: no prompt, no reply, no key."""

from __future__ import annotations

from typing import Literal

import msgspec

from gateway.relay.sse import Usage

Outcome = Literal[
    "ok", "client_error", "limited", "unavailable", "engine_error", "timeout", "cancelled", "internal_error"
]


class TraceIds(msgspec.Struct):
    """W3C trace context of one request: ours, and the caller's span where it sent one."""

    trace: int
    server_span: int
    client_span: int
    parent_span: int | None
    sampled: bool
    state: bytes | None = None


class Record(msgspec.Struct):
    """Filled in on the way, read once at the end. Times are monotonic seconds; `started_ns` is Unix time in
    nanoseconds. An empty tier means that the request ended before it had one."""

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
    decide_seconds: float | None = None
    queue_seconds: float = 0.0
    asked: float | None = None
    first_token: float | None = None
    ended: float = 0.0
    trace: TraceIds | None = None
