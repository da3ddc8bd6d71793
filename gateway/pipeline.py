"""The way of one request, with no way back:

authenticate -> read -> measure and decide -> reserve -> pick an engine -> relay bytes -> settle -> record.

Whatever ends it (reply, error, client gone, timeout, engine died, shutdown) goes through the one `finally`
of `Exchange.run`: the upstream is released, the lease settled, the record written.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from urllib.parse import quote

from engines.fleet import Engine
from gateway import placement
from gateway.asked import explained
from gateway.dialects import ENDPOINTS, Endpoint, make_facts
from gateway.dialects.base import Request
from gateway.dispatch import Build, Dispatch
from gateway.errors import (
    BodyTooLarge,
    ClientGone,
    EngineBroke,
    EngineRefused,
    EngineTimeout,
    GatewayError,
    InternalFault,
    LimitExceeded,
    LimitsUnavailable,
    MethodNotAllowed,
    ModelNotFound,
    NothingReady,
    Overloaded,
    RequestError,
    RouteNotFound,
    SlotsTaken,
    TierNotAllowed,
    WrongMediaType,
)
from gateway.identity import Tenant, presented_key
from gateway.limits import NO_PLAN, Ask, Lease, claim
from gateway.placement import Past
from gateway.reading import AT_ONCE, parse
from gateway.relay import replies
from gateway.relay.client import Client, Head
from gateway.relay.forward import Beat, Forward
from gateway.relay.sse import Tap, Usage
from gateway.relay.upstream import ConnectFailed, LostEarly
from gateway.runtime import Gateway
from gateway.shadow import Candidate
from gateway.surface import HeaderView, decision_lines, find, models_reply, ready_reply
from gateway.telemetry.content import CopyingTap, ReplyCopy
from gateway.telemetry.decisions import Decided
from gateway.telemetry.record import Outcome, Record
from gateway.telemetry.traces import traceparent
from gateway.tokenizer import Counter, near
from policies.decision import NO_EDITS, Contract, Decision, pinned
from policies.facts import Facts
from policies.policy import Policy
from policies.signals import Memo
from policies.signals.prompt import estimate

logger = logging.getLogger("dualgauge.gateway")

JSON = b"content-type: application/json\r\n"
PROBES = ("/healthz", "/readyz")
REPLY_ID = re.compile(rb'"id":\s*"(resp_[A-Za-z0-9_-]{1,128})"')
PLAIN_JSON = b"application/json"
JSON_TYPE = re.compile(rb"\s*application/(?:[\w.-]+\+)?json\s*(?:;.*)?", re.IGNORECASE)
# Errors before a route is known speak OpenAI's dialect.
NO_ENDPOINT = ENDPOINTS["POST", "/v1/chat/completions"]
OUTCOMES: tuple[tuple[type[GatewayError], Outcome], ...] = (
    (LimitExceeded, "limited"),
    (NothingReady, "unavailable"),
    (LimitsUnavailable, "unavailable"),
    (Overloaded, "unavailable"),
    (EngineTimeout, "timeout"),
    (EngineBroke, "engine_error"),
    (RequestError, "client_error"),
    (EngineRefused, "client_error"),
)


class Exchange:
    """One request from its arrival to its record."""

    __slots__ = (
        "_client",
        "_counted",
        "_decided",
        "_dispatch",
        "_endpoint",
        "_facts",
        "_forward",
        "_gateway",
        "_held",
        "_holder",
        "_id",
        "_id_line",
        "_lease",
        "_prompt",
        "_read_at",
        "_request",
        "_sample",
        "_snapshot",
        "_tenant",
        "record",
    )

    def __init__(self, gateway: Gateway, client: Client) -> None:
        self._gateway = gateway
        self._snapshot = gateway.snapshot
        self._client = client
        self._id = own = b"%032x" % gateway.rand.getrandbits(128)
        request_id = "req_" + own.decode()
        self.record = Record(request_id, gateway.clock(), round(gateway.wall() * 1e9), client.method)
        self._id_line = b"x-request-id: req_%b\r\n" % own
        self._endpoint = NO_ENDPOINT
        self._tenant: Tenant | None = None
        self._request: Request | None = None
        # Where the conversation falls in an even spread: kept over replies that the engines hold.
        self._sample: float | None = None
        # What keeps a conversation where it was: its facts, or the engine that has its latest reply.
        self._facts: Facts | None = None
        self._holder: Engine | None = None
        self._lease: Lease | None = None
        self._decided: Decided | None = None
        self._dispatch: Dispatch | None = None
        self._forward: Forward | None = None
        self._prompt = 0
        self._read_at = 0.0
        # What is counted of it in `gateway.load`: bytes of its body, and itself once that is there.
        self._held = 0
        self._counted = False

    async def run(self) -> None:
        try:
            await self._serve()
        except ClientGone:
            self.record.outcome = "cancelled"
        except asyncio.CancelledError:
            self._uncancel()
            if not self._client.gone:
                # Only the server's shutdown cancels a request whose client is still there.
                shut_down = "the gateway was shut down before the reply was complete"
                await self._refuse(NothingReady(shut_down, retry_after=1))
            self.record.outcome = "cancelled"
        except GatewayError as error:
            await self._refuse(error)
        except Exception:
            logger.exception("request %s failed inside the gateway", self.record.request_id)
            await self._refuse(InternalFault(f"the gateway failed; the log knows {self.record.request_id}"))
        finally:
            self._close()

    async def _serve(self) -> None:
        gateway, client = self._gateway, self._client
        endpoint, path = self._route()
        if gateway.retiring:
            client.close_after()
        kind = endpoint.kind
        if kind == "health":
            await client.reply(200, JSON + self._id_line, b'{"status":"ok"}')
            return
        if kind == "ready":
            status, body = ready_reply(gateway)
            await client.reply(status, JSON + self._id_line, body)
            return
        tenant = self._authenticate()
        if kind == "models":
            await client.reply(200, JSON + self._id_line, models_reply(gateway, tenant, path))
            return
        if gateway.draining:
            client.close_after()
            raise NothingReady("the gateway is shutting down", retry_after=1)
        self._enter()
        if kind == "stored":
            await self._relay_stored(path)
            return
        await self._read()
        if kind == "generate":
            if gateway.counter is not None:
                await self._count(gateway.counter)
            decision = self._decide()
            self.record.reserve_began = gateway.clock()
            await self._reserve(decision)
            self.record.reserved = gateway.clock()
        else:
            decision = self._anywhere()
        await self._place(decision, path)
        await self._relay()

    # authenticate

    def _route(self) -> tuple[Endpoint, str]:
        method, path = self._client.method, self._client.path
        route, endpoint, allowed = find(method, path)
        if endpoint is not None:
            self._endpoint = endpoint
            self.record.route = route
            self.record.dialect = endpoint.dialect.name
            return endpoint, path
        if allowed:
            self._endpoint = ENDPOINTS[allowed[0], route]
            raise MethodNotAllowed(
                f"{path} takes {' or '.join(allowed)}, not {method}", allow=", ".join(allowed)
            )
        raise RouteNotFound(f"there is no {method} {path} here")

    def _authenticate(self) -> Tenant:
        tenant = self._snapshot.keyring.authenticate(presented_key(self._client.fields), self._gateway.wall())
        self._tenant = tenant
        self.record.tenant = tenant.name
        if self._gateway.tracer is not None:
            self.record.trace = self._gateway.tracer.begin(self._client.fields, self._id)
        return tenant

    # read

    def _enter(self) -> None:
        """Refuse at once what this process has no room for, before its body is read."""
        gateway, client = self._gateway, self._client
        bounds, size = gateway.config.bounds, client.declared
        if size is None:
            size = bounds.body if b"transfer-encoding" in client.fields else 0
        elif size > bounds.body:
            raise BodyTooLarge.over(bounds.body)
        gateway.load.enter(bounds)
        self._hold(size)

    def _hold(self, size: int) -> None:
        """Have so many bytes counted instead of those before. Raises Overloaded."""
        load, tenant = self._gateway.load, self.record.tenant
        if self._held:
            load.release(self._held, tenant)
            self._held = 0
        if size:
            load.hold(size, tenant, self._gateway.config.bounds)
            self._held = size

    async def _body(self) -> bytes:
        """The whole body; from here on the request counts, and its client is watched."""
        client, load, bounds = self._client, self._gateway.load, self._gateway.config.bounds
        raw = await client.body(bounds.body, bounds.read)
        client.watch()
        if self._held != len(raw):
            self._hold(len(raw))
        load.enter(bounds)
        load.requests += 1
        self._counted = True
        return raw

    async def _read(self) -> None:
        client, bounds = self._client, self._gateway.config.bounds
        raw = await self._body()
        self._read_at = self._gateway.clock()
        kind = client.fields.get(b"content-type")
        if kind not in (None, PLAIN_JSON) and not JSON_TYPE.fullmatch(kind):
            raise WrongMediaType("the body must be JSON: send content-type: application/json")
        dialect, reader = self._endpoint.dialect, self._gateway.reader
        read = parse(dialect, raw, bounds) if len(raw) <= AT_ONCE else await reader.read(dialect, raw, bounds)
        self._request = request = read
        self.record.stream = request.stream
        if request.previous_response_id is not None:
            found = self._gateway.stored.find(request.previous_response_id)
            if found is not None and found.tenant != self.record.tenant:
                raise _no_such_reply(request.previous_response_id)
            if found is not None:
                self._holder = self._gateway.fleet.by_name[found.engine]
                self._sample = found.sample

    # measure and decide

    async def _count(self, counter: Counter) -> None:
        """Have the model's own tokenizer count the prompt, where a decision may hang on it."""
        request, snapshot = self._request, self._snapshot
        assert request is not None
        policies = snapshot.policies
        if near(policies, len(request.body.raw)) and self._gateway.names.get(request.model) is None:
            dialect = self._endpoint.dialect.name
            request.prompt_tokens = await counter.count(request.conversation(), dialect, policies)

    def _decide(self) -> Decision:
        gateway, request, tenant = self._gateway, self._request, self._tenant
        assert request is not None
        assert tenant is not None
        pinned_tier = self._model(request, tenant)
        snapshot, other = self._snapshot, None
        memo: Memo = {}
        if self._sample is not None:
            memo["sample"] = self._sample
        before = gateway.clock()
        headers = HeaderView(self._client.headers, self._client.fields)
        name, came = self._endpoint.dialect.name, self.record.started_ns / 1e9
        facts = make_facts(name, request, headers, tenant.name, tenant.tags, came)
        if pinned_tier is not None:
            if not tenant.may_use(pinned_tier):
                raise TierNotAllowed(f"this key may not use tier `{pinned_tier}`", param="model")
            decision = pinned(pinned_tier, snapshot.policy.hash)
        else:
            decision = snapshot.policy.decide(facts, memo)
            if snapshot.candidate is not None:
                decision, other = self._beside(snapshot.candidate, facts, memo, decision)
        if gateway.decisions is not None:
            self._decided = Decided(snapshot.fields, facts, memo, decision, other)
        self._sample = memo.get("sample")
        if snapshot.policy.affinity is not None:
            self._facts = facts
        record = self.record
        record.decision, record.decide_began = decision, before
        record.decide_seconds = gateway.clock() - before
        record.rule = decision.rule
        record.reason = "; ".join(decision.reasons)
        record.policy_hash = decision.policy_hash
        if gateway.recent.left:
            acting = snapshot.candidate if decision.policy_hash != snapshot.policy.hash else None
            self._explain(snapshot.policy if acting is None else acting.policy, facts, memo)
        else:
            gateway.recent.add(record)
        if decision.trace and record.trace is not None:
            record.trace.sampled = True
        tracer = gateway.tracer
        if tracer is not None and tracer.capture and record.trace is not None and record.trace.sampled:
            record.copy = ReplyCopy()
        if decision.edits is not NO_EDITS:
            record.edits = self._endpoint.dialect.edit(request, decision.edits)
        return decision

    def _explain(self, policy: Policy, facts: Facts, memo: Memo) -> None:
        """For a console that is open: all signals, all rules. The request does not depend on it."""
        gateway, record = self._gateway, self.record
        try:
            explanation = explained(policy, gateway.config.tiers, facts, dict(memo))
        except Exception:
            logger.exception("request %s cannot be explained", record.request_id)
            gateway.recent.add(record)
        else:
            gateway.recent.explain(record, explanation, policy)

    def _beside(
        self, candidate: Candidate, facts: Facts, memo: Memo, live: Decision
    ) -> tuple[Decision, Decision | None]:
        acting, other = candidate.beside(facts, memo, live)
        if other is None:
            self._gateway.metrics.shadow_failed()
        else:
            tried = other if acting is live else acting
            self._gateway.metrics.shadow(live.rule, live.tier, tried.tier)
        return acting, other

    def _model(self, request: Request, tenant: Tenant) -> str | None:
        """The tier that the model's name pins. Raises ModelNotFound, TierNotAllowed."""
        names = self._gateway.names
        if request.model not in names:
            raise ModelNotFound(
                f"the model `{request.model[:128]}` does not exist here; there is: {', '.join(names)}",
                param="model",
            )
        if not tenant.may_ask(self._gateway.config.model, request.model):
            raise TierNotAllowed(f"this key may not use the model `{request.model}`", param="model")
        self.record.model = request.model
        return names[request.model]

    def _anywhere(self) -> Decision:
        """Counting tokens needs the model, whatever its precision: the pinned tier, else a ready one. Raises
        RouteNotFound where no engine counts."""
        assert self._request is not None
        assert self._tenant is not None
        tier = self._model(self._request, self._tenant)
        hash_, fleet = self._snapshot.policy.hash, self._gateway.fleet
        filled = [t for t, some in fleet.tiers.items() if some]
        counting = [t for t in filled if any(map(self._serves, fleet.tiers[t]))]
        if (filled and not counting) or (tier in filled and tier not in counting):
            raise RouteNotFound(f"no engine of `{self._request.model}` has {self._client.path}")
        if tier is not None:
            return pinned(tier, hash_)
        tiers = [t for t in counting if self._tenant.may_use(t)]
        ready = [t for t in tiers if fleet.pick(t, self._unserved()) is not None]
        first = (ready or tiers or counting or list(fleet.tiers))[0]
        return Decision(first, "any tier", Contract("fail"), hash_)

    def _serves(self, engine: Engine) -> bool:
        return engine.spec.kind not in self._endpoint.unserved

    def _unserved(self) -> list[Engine]:
        """Engines that do not know what is asked."""
        if not self._endpoint.unserved:
            return []
        return [engine for engine in self._gateway.fleet.by_name.values() if not self._serves(engine)]

    # reserve

    async def _reserve(self, decision: Decision) -> None:
        request, tenant, plans = self._request, self._tenant, self._snapshot.policy.plans
        assert request is not None
        assert tenant is not None
        plan = plans.get(tenant.plan, NO_PLAN)
        shared = plans.get(tenant.shared, NO_PLAN) if tenant.organisation else NO_PLAN
        if plan.counts_tokens or shared.counts_tokens:
            measured = decision.measured.get("prompt_tokens")
            self._prompt = _estimate(request) if measured is None else int(measured)
        tier, prompt, output = decision.tier, self._prompt, request.output_tokens
        ask = Ask(tenant.name, plan, tier, request.model, prompt, output, tenant.organisation, shared)
        self._lease = await self._slot(ask)

    async def _slot(self, ask: Ask) -> Lease:
        """A lease; where all slots of the plan are taken, after waiting for one if it says so."""
        gateway, record = self._gateway, self.record
        scope = gateway.slots.ahead(ask)
        if scope is None:
            try:
                reserved = gateway.store.reserve(ask)
                return await claim(reserved) if isinstance(reserved, asyncio.Future) else reserved
            except SlotsTaken as error:
                if not ask.plan.wait:
                    raise
                scope = error.scope
        started = gateway.clock()
        try:
            return await gateway.slots.wait(ask, scope)
        finally:
            record.queue_seconds += gateway.clock() - started

    # pick an engine

    async def _place(self, decision: Decision, path: str) -> None:
        assert self._tenant is not None
        past: Past | None = None
        if self._holder is not None or (
            self._facts is not None and (self._gateway.fleet.several or decision.if_busy is not None)
        ):
            past = Past(self._holder, self._facts, self._sample)
        self._dispatch = dispatch = Dispatch(
            self._gateway,
            self.record,
            self._builder(path, decision.priority),
            self._read_at,
            past,
            self._unserved(),
        )
        engine, _ = await dispatch.place(decision, self._tenant)
        if past is not None:
            self._sample = past.sample
        self._note_move(engine.spec.tier, dispatch.because, decision)

    def _builder(self, path: str, priority: int = 0) -> Build:
        method, headers, request = self._client.method, self._upstream_headers(), self._request
        upstreams, dialect = self._gateway.upstreams, self._endpoint.dialect

        def build(engine: Engine) -> bytes:
            spec, extra = engine.spec, headers
            given = priority if spec.priorities else 0
            if given and dialect.priority_header:
                extra += b"x-vllm-priority: %d\r\n" % given
            body = b"" if request is None else dialect.prepare(request, spec.served_model, given)
            return upstreams[spec.name].head.build(method, path, extra, body)

        return build

    def _upstream_headers(self) -> bytes:
        """Header lines for the engine. Of the client's own, only what its dialect names goes on."""
        lines = self._id_line
        for name in self._endpoint.dialect.forwarded:
            value = self._client.fields.get(name)
            if value is not None:
                lines += b"%b: %b\r\n" % (name, value)
        ids = self.record.trace
        if ids is not None:
            lines += traceparent(ids)
            if ids.state is not None:
                lines += b"tracestate: %b\r\n" % ids.state
        return lines

    def _note_move(self, tier: str, because: str, decision: Decision) -> None:
        if because and because != placement.WAITED:
            self.record.moved_because = because
            self.record.degraded = self._gateway.fleet.less_precise(tier, decision.tier)

    # relay bytes

    async def _relay(self) -> None:
        dispatch = self._dispatch
        assert dispatch is not None
        assert dispatch.connection is not None
        self._forward = forward = Forward(self, self._client, dispatch.connection, self.record.engine)
        await forward.run()

    def read_usage(self, reply: bytes) -> Usage | None:
        return self._endpoint.dialect.reply_usage(reply)

    def follow(self) -> tuple[Tap, Beat]:
        dialect, gateway, request = self._endpoint.dialect, self._gateway, self._request
        strip, copy = request is not None and request.usage_injected, self.record.copy
        if copy is None:
            tap = Tap(dialect.stream_usage, marker=dialect.marker, strip=strip)
        else:
            tap = CopyingTap(dialect.stream_usage, marker=dialect.marker, strip=strip, copy=copy)
        return tap, gateway.metrics.pace(self.record.tier, gateway.clock)

    def begun(self, data: bytes) -> None:
        record, dispatch = self.record, self._dispatch
        assert dispatch is not None
        assert dispatch.connection is not None
        record.first_token = self._gateway.clock()
        record.status = dispatch.connection.status
        if record.copy is not None and not record.copy.events:
            record.copy.add(data)
        if self._endpoint.dialect.name == "openai.responses":
            match = REPLY_ID.search(data)
            if match is not None:
                reply = match[1].decode()
                self._gateway.stored.remember(reply, record.engine, record.tenant, self._sample)

    def head(self, content_type: bytes) -> Head:
        record, request, lease = self.record, self._request, self._lease
        head = b"content-type: %b\r\n%b%b%b" % (
            content_type,
            self._id_line,
            self._decision_lines(),
            lease.headers if lease is not None else b"",
        )
        if record.target is not None and record.target.manifest:
            head += b"x-dualgauge-model-manifest: %b\r\n" % record.target.manifest.encode()
        if record.degraded:
            head += b"x-dualgauge-degraded: true\r\n"
        if record.moved_because:
            head += b"x-dualgauge-reason: %b\r\n" % record.moved_because.encode()
        if record.edits:
            head += b"x-dualgauge-edited: %b\r\n" % record.edits.encode()
        head += self._queue_line()
        if request is not None and request.body.dropped:
            head += b"x-dualgauge-dropped: %b\r\n" % ", ".join(request.body.dropped).encode()
        return head

    def _queue_line(self) -> bytes:
        """How long it waited, where it did: a wait that was shorter than a millisecond counts as one."""
        waited = self.record.queue_seconds
        return b"x-dualgauge-queue-seconds: %.3f\r\n" % max(0.001, waited) if waited else b""

    def _decision_lines(self) -> bytes:
        record = self.record
        return decision_lines(record.tier, record.engine, record.precision, record.rule)

    async def _relay_stored(self, path: str) -> None:
        """A reply that one engine holds: ask the one that made it, or each where that is not known."""
        gateway, tenant = self._gateway, self._tenant
        assert tenant is not None
        await self._body()
        reply = path.split("/")[3]
        found = gateway.stored.find(reply)
        if found is not None and found.tenant != tenant.name:
            raise _no_such_reply(reply)
        engines = gateway.fleet.engines if found is None else (gateway.fleet.by_name[found.engine],)
        refused: GatewayError = _no_such_reply(reply)
        self._dispatch = dispatch = Dispatch(gateway, self.record, self._builder(quote(path, safe="/")), 0.0)
        for engine in engines:
            if not tenant.may_use(engine.spec.tier):
                continue
            if not engine.ready:
                refused = NothingReady(f"engine {engine.spec.name} is not ready", retry_after=2)
                continue
            try:
                await dispatch.ask(engine)
                await self._relay()
            except ConnectFailed as exc:
                refused = NothingReady(f"engine {engine.spec.name}: {exc}", retry_after=2)
            except LostEarly as exc:
                refused = EngineBroke(f"engine {engine.spec.name} broke off: {exc}")
            except EngineRefused as exc:
                refused = exc
            else:
                return
            dispatch.release()
        raise refused

    # the end

    async def _refuse(self, error: GatewayError) -> None:
        client, record, dialect = self._client, self.record, self._endpoint.dialect
        record.outcome = next((o for kind, o in OUTCOMES if isinstance(error, kind)), "internal_error")
        record.error_code = error.error_code or error.error_kind
        if isinstance(error, LimitExceeded):
            record.limit = error.limit
        if client.gone:
            return
        try:
            if client.started:
                tap = self._forward.tap if self._forward is not None else None
                if tap is None:
                    client.break_off()
                    return
                client.close_after()
                cut = b"\n\n" if tap.torn else b""
                await client.send(cut + dialect.error_event(error), False)
                return
            status, body = dialect.error_body(error, record.request_id)
            record.status = status
            head = JSON + self._id_line + self._decision_lines() + self._queue_line()
            if error.retry_after is not None:
                head += b"retry-after: %d\r\n" % max(1, math.ceil(error.retry_after))
            if isinstance(error, MethodNotAllowed):
                head += b"allow: %b\r\n" % error.allow.encode()
            if self._lease is not None:
                head += self._lease.headers
            elif isinstance(error, LimitExceeded):
                head += error.headers
            await client.reply(status, head, body)
        except asyncio.CancelledError:
            self._uncancel()

    def _uncancel(self) -> None:
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()

    def _close(self) -> None:
        record, gateway, forward = self.record, self._gateway, self._forward
        self._client.finish()
        if self._dispatch is not None:
            engine = record.target
            if engine is not None and (record.outcome != "ok" or engine.breaker.faults):
                self._judge(engine, self._dispatch)
            self._dispatch.release()
        if forward is not None:
            record.usage = forward.usage if forward.tap is None else forward.tap.usage
        if self._lease is not None:
            self._settle(self._lease)
        if self._held:
            gateway.load.release(self._held, record.tenant)
        if self._counted:
            gateway.load.requests -= 1
        record.ended = gateway.clock()
        if record.route not in PROBES:
            if gateway.tracer is not None:
                gateway.tracer.finish(record, self._client, self._request)
                record.copy = None
            gateway.ended.add(record)
            if self._decided is not None and gateway.decisions is not None:
                gateway.decisions.record(record, self._decided)
        # It calls back into this exchange: without the cycle, all is freed at once.
        self._forward = None

    def _judge(self, engine: Engine, dispatch: Dispatch) -> None:
        """What the end of this request says of the engine that was asked last. Any 4xx is an answer."""
        record, fleet, connection = self.record, self._gateway.fleet, dispatch.connection
        refused = connection is not None and connection.status in replies.CLIENT
        if record.outcome in ("ok", "client_error") or (record.outcome == "engine_error" and refused):
            fleet.succeeded(engine)
        elif record.outcome == "engine_error":
            fleet.faulted(engine, "it broke off, or answered 5xx")
        elif record.outcome == "timeout" and not engine.progress.moved_since(record.asked):
            fleet.faulted(engine, "a timeout")

    def _settle(self, lease: Lease) -> None:
        record, forward = self.record, self._forward
        if record.usage is not None:
            usage = record.usage
            lease.settle(usage.prompt, usage.completion, usage.cached, record.tier)
        elif record.asked is None or record.outcome in ("unavailable", "client_error"):
            lease.refund()
        else:
            events = forward.tap.tokens if forward is not None and forward.tap is not None else 0
            streamed = max(0, events - self._endpoint.dialect.overhead)
            record.usage = Usage(self._prompt, streamed)
            lease.settle(self._prompt, streamed, tier=record.tier)


def _estimate(request: Request) -> int:
    return estimate(request.conversation()) if request.prompt_tokens is None else request.prompt_tokens


def _no_such_reply(reply: str) -> GatewayError:
    return ModelNotFound(f"no reply `{reply[:128]}` is stored here", code="response_not_found")
