"""The spans of one request that has ended, by the semantic conventions for HTTP and for GenAI.

    POST /v1/chat/completions     server: the request
    ├── decide                    signals, rule, contract
    ├── reserve                   the lease
    ├── wait                      for a tier, where the rule says so
    └── chat smollm2              client: the engine, whose own spans hang below

https://opentelemetry.io/docs/specs/semconv/http/http-spans/
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from importlib.metadata import version
from typing import Protocol

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from engines.address import Address
from engines.fleet import Engine
from gateway.relay.client import Client
from gateway.telemetry.content import prompt_attributes, reply_attributes
from gateway.telemetry.record import Record, TraceIds
from policies.decision import Contract, Decision
from policies.facts import Conversation

Attributes = dict[str, str | bool | int | float]

SERVER_ERROR = 500
FAILED = frozenset({"engine_error", "timeout", "internal_error"})
# What ended because somebody wanted it to is no error.
ENDED_WELL = frozenset({"ok", "cancelled"})
OPERATIONS: Mapping[str, str] = {
    "openai.completions": "text_completion",
    "openai.embeddings": "embeddings",
    "vllm.tokens": "tokenize",
}
"""By dialect; every other one chats."""
PROVIDERS: Mapping[str, str] = {"vllm": "vllm", "llama.cpp": "llama.cpp"}
"""By kind of engine. The conventions' word for an unknown one with an API of OpenAI's shape is `openai`."""
MAX_CLIENT_TEXT = 256
"""Characters of what a client sent: a path, a name of its software."""
SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class Asked(Protocol):
    """The parsed request, as far as spans tell of it."""

    output_tokens: int | None
    n: int
    answers: int
    temperature: float | None

    def conversation(self) -> Conversation:
        """What it says."""


class _OneResource(Resource):
    """What all spans belong to. The encoder looks it up by its hash for each span, for which the SDK's own
    would write all of it as JSON: a fifth of the time that encoding takes."""

    @classmethod
    def of(cls, attributes: Attributes) -> _OneResource:
        made = Resource.create(attributes)
        return cls(made.attributes, made.schema_url)

    __hash__ = object.__hash__


class Builder:
    """`rand` draws the ids of the inner spans; with `capture`, spans hold prompts and replies."""

    def __init__(self, rand: random.Random, *, capture: bool = False) -> None:
        self._rand = rand
        self._capture = capture
        own = version("dualgauge")
        named = os.environ.get("OTEL_SERVICE_NAME", "dualgauge")
        self._resource = _OneResource.of({"service.name": named, "service.version": own})
        self._scope = InstrumentationScope("dualgauge", own)

    def spans(self, record: Record, ids: TraceIds, client: Client, asked: Asked | None) -> list[ReadableSpan]:
        """All spans of a request, the outermost first."""
        own = _own_attributes(record)
        status = _status(record)
        server = self._rand.getrandbits(64)
        # An engine that could not be reached has no span: what was tried is told by the server's.
        events = _events(record)
        top = self._span(
            ids,
            server,
            f"{record.method} {record.route}",
            record.started,
            record.ended,
            record,
            {**_http_attributes(record, client), **own},
            kind=SpanKind.SERVER,
            status=status,
            parent=None if ids.parent_span is None else int(ids.parent_span, 16),
            remote=True,
            events=() if record.asked is not None else events,
        )
        spans = [top]
        decision = record.decision
        if decision is not None and record.decide_seconds is not None:
            ended = record.decide_began + record.decide_seconds
            spans.append(
                self._inner(
                    ids, server, "decide", record.decide_began, ended, record, _decision_attributes(decision)
                )
            )
        if record.reserve_began is not None:
            ended = record.ended if record.reserved is None else record.reserved
            attributes: Attributes = {"dualgauge.limit": record.limit} if record.limit else {}
            spans.append(self._inner(ids, server, "reserve", record.reserve_began, ended, record, attributes))
        spans += [
            self._inner(ids, server, "wait", wait.started, wait.ended, record, {"dualgauge.tier": wait.tier})
            for wait in record.waits
        ]
        if record.asked is not None:
            spans.append(
                self._span(
                    ids,
                    int(ids.client_span, 16),
                    f"{_operation(record)} {record.model}".rstrip(),
                    record.asked,
                    record.ended,
                    record,
                    {**_genai_attributes(record, asked), **self._content(record, asked), **own},
                    kind=SpanKind.CLIENT,
                    status=status,
                    parent=server,
                    events=events,
                )
            )
        return spans

    def _content(self, record: Record, asked: Asked | None) -> Attributes:
        if not self._capture or asked is None:
            return {}
        found: Attributes = {**prompt_attributes(asked.conversation().turns)}
        if record.copy is not None:
            found |= reply_attributes(record.copy)
        return found

    def _inner(
        self,
        ids: TraceIds,
        parent: int,
        name: str,
        began: float,
        ended: float,
        record: Record,
        attributes: Attributes,
    ) -> ReadableSpan:
        span = self._rand.getrandbits(64)
        return self._span(ids, span, name, began, ended, record, attributes, parent=parent)

    def _span(
        self,
        ids: TraceIds,
        span: int,
        name: str,
        began: float,
        ended: float,
        record: Record,
        attributes: Attributes,
        *,
        parent: int | None,
        kind: SpanKind = SpanKind.INTERNAL,
        status: Status = Status(StatusCode.UNSET),  # noqa: B008 - a constant
        remote: bool = False,
        events: tuple[Event, ...] = (),
    ) -> ReadableSpan:
        trace, state = int(ids.trace, 16), _state(ids)
        return ReadableSpan(
            name,
            context=SpanContext(trace, span, False, SAMPLED, state),
            parent=None if parent is None else SpanContext(trace, parent, remote, SAMPLED, state),
            resource=self._resource,
            attributes=attributes,
            events=events,
            kind=kind,
            status=status,
            start_time=_at(record, began),
            end_time=_at(record, ended),
            instrumentation_scope=self._scope,
        )


def _state(ids: TraceIds) -> TraceState | None:
    return None if ids.state is None else TraceState.from_header([ids.state.decode("latin-1")])


def _at(record: Record, moment: float) -> int:
    """Unix time in nanoseconds of a moment of the monotonic clock."""
    return record.started_ns + round((moment - record.started) * 1e9)


def _status(record: Record) -> Status:
    if record.status >= SERVER_ERROR or record.outcome in FAILED:
        return Status(StatusCode.ERROR, record.error_code or None)
    return Status(StatusCode.UNSET)


def _events(record: Record) -> tuple[Event, ...]:
    events = [
        Event(
            "dualgauge.retry",
            {"dualgauge.engine": retry.engine, "dualgauge.reason": retry.why},
            timestamp=_at(record, retry.at),
        )
        for retry in record.retries
    ]
    if record.stream and record.first_token is not None:
        events.append(Event("dualgauge.first_token", timestamp=_at(record, record.first_token)))
    return tuple(events)


def _own_attributes(record: Record) -> Attributes:
    values = {
        "dualgauge.request_id": record.request_id,
        "dualgauge.tier": record.tier,
        "dualgauge.engine": record.engine,
        "dualgauge.precision": record.precision,
        "dualgauge.model_manifest": "" if record.target is None else record.target.manifest,
        "dualgauge.rule": record.rule,
        "dualgauge.reason": "; ".join(filter(None, (record.reason, record.moved_because))),
        "dualgauge.policy_hash": record.policy_hash,
        "dualgauge.tenant": record.tenant,
        "dualgauge.edits": record.edits,
        "dualgauge.outcome": record.outcome,
    }
    return {**{k: v for k, v in values.items() if v}, "dualgauge.degraded": record.degraded}


def _http_attributes(record: Record, client: Client) -> Attributes:
    found: Attributes = {
        "http.request.method": record.method,
        "http.route": record.route,
        "url.path": client.path[:MAX_CLIENT_TEXT],
        "url.scheme": client.scheme,
        "network.protocol.version": "1.1",
    }
    if record.status:
        found["http.response.status_code"] = record.status
    if record.outcome not in ENDED_WELL:
        found["error.type"] = record.error_code or str(record.status)
    software = client.fields.get(b"user-agent")
    if software is not None:
        found["user_agent.original"] = software.decode("latin-1")[:MAX_CLIENT_TEXT]
    return found


def _decision_attributes(decision: Decision) -> Attributes:
    found: Attributes = {
        "dualgauge.tier": decision.tier,
        "dualgauge.rule": decision.rule,
        "dualgauge.contract": _contract(decision.contract),
        "dualgauge.policy_hash": decision.policy_hash,
    }
    if decision.reasons:
        found["dualgauge.reason"] = "; ".join(decision.reasons)
    if decision.if_busy is not None:
        found["dualgauge.if_busy"] = decision.if_busy.use
    for name, value in decision.signals.items():
        found[f"dualgauge.signal.{name}"] = value
    return found


def _contract(contract: Contract) -> str:
    """As it is written in a policy: `fail`, `degrade`, `use exact`, `wait 20s`, `wait 20s, then degrade`."""
    if contract.kind == "use":
        return f"use {contract.use}"
    if contract.kind == "wait":
        then = "" if contract.then == "fail" else f", then {contract.then}"
        return f"wait {contract.wait:g}s{then}"
    return contract.kind


def _operation(record: Record) -> str:
    return OPERATIONS.get(record.dialect, "chat")


def _genai_attributes(record: Record, asked: Asked | None) -> Attributes:
    found: Attributes = {"gen_ai.operation.name": _operation(record)}
    if record.model:
        found["gen_ai.request.model"] = record.model
    if asked is not None:
        if asked.output_tokens is not None:
            found["gen_ai.request.max_tokens"] = asked.output_tokens // asked.answers
        if asked.n > 1:
            found["gen_ai.request.choice.count"] = asked.n
        if asked.temperature is not None:
            found["gen_ai.request.temperature"] = asked.temperature
    if record.stream:
        found["gen_ai.request.stream"] = True
        if record.asked is not None and record.first_token is not None:
            found["gen_ai.response.time_to_first_chunk"] = record.first_token - record.asked
    if record.usage is not None:
        found["gen_ai.usage.input_tokens"] = record.usage.prompt
        found["gen_ai.usage.output_tokens"] = record.usage.completion
        if record.usage.cached:
            found["gen_ai.usage.cache_read.input_tokens"] = record.usage.cached
    if record.target is not None:
        found |= _server_attributes(record.target)
    if record.outcome not in ENDED_WELL:
        found["error.type"] = record.error_code or str(record.status)
    return found


def _provider(engine: Engine) -> str:
    spec = engine.spec
    if spec.kind == "hosted" and spec.model is not None:
        return spec.model.partition("/")[0]
    return PROVIDERS.get(engine.software or spec.kind, "openai")


def _server_attributes(engine: Engine) -> Attributes:
    spec = engine.spec
    address = Address.parse(spec.api_base or spec.url)
    found: Attributes = {
        "gen_ai.provider.name": _provider(engine),
        "gen_ai.response.model": spec.served_model,
    }
    if address.uds is not None:
        return {**found, "server.address": address.uds}
    return {**found, "server.address": address.host, "server.port": address.port}
