"""Finds an engine that begins a reply: picks, asks, and before a reply has begun may ask again.

The one owner of retries. A request is sent once more only where the engine has seen nothing of it, broke off
before its reply, or said that it is overloaded; within `retries.attempts` and the budget. A stream begins
with the first byte after its head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engines.fleet import Engine
from gateway import placement
from gateway.errors import EngineBroke, EngineTimeout, GatewayError, NothingReady
from gateway.identity import Tenant
from gateway.placement import Past
from gateway.relay import replies
from gateway.relay.upstream import (
    ConnectFailed,
    Connection,
    ConnectTimeout,
    LostEarly,
    LostLate,
    Pool,
    TimedOut,
)
from gateway.runtime import Gateway, Upstream
from gateway.telemetry.record import Record, Retry, Wait
from policies.decision import Decision

Build = Callable[[Engine], bytes]
"""The whole request, head and body, for one engine."""


class Dispatch:
    """One request's search. While it holds a connection, `engine` and `connection` are set; whoever made it
    calls `release` at the end, whatever happens."""

    __slots__ = (
        "_build",
        "_gateway",
        "_past",
        "_pool",
        "_read_at",
        "_record",
        "_unserved",
        "because",
        "connection",
        "engine",
    )

    def __init__(
        self,
        gateway: Gateway,
        record: Record,
        build: Build,
        read_at: float,
        past: Past | None = None,
        unserved: Sequence[Engine] = (),
    ) -> None:
        self._gateway = gateway
        self._record = record
        self._build = build
        self._read_at = read_at
        self._past = past
        self._unserved = unserved
        self._pool: Pool | None = None
        self.because = ""
        self.engine: Engine | None = None
        self.connection: Connection | None = None

    async def place(self, decision: Decision, tenant: Tenant) -> tuple[Engine, Connection]:
        """An engine whose reply has begun, with a status that is worth passing on.

        Raises NothingReady, TierNotAllowed, EngineBroke, EngineTimeout.
        """
        gateway, record = self._gateway, self._record
        fleet = gateway.fleet
        gateway.budget.request()
        last: GatewayError | None = None
        tried = [*self._unserved]
        for step in placement.steps(decision, fleet, tenant, self._past):
            if step.wait:
                started = gateway.clock()
                await gateway.tiers.wait(step.tier, tenant.name, step.wait)
                ended = gateway.clock()
                record.queue_seconds += ended - started
                record.waits += (Wait(step.tier, started, ended),)
                tried[:] = self._unserved
            while (engine := self._pick(step.tier, tried)) is not None:
                try:
                    connection = await self.ask(engine)
                except ConnectFailed as exc:
                    fleet.failed(engine, str(exc))
                    tried.append(engine)
                    record.retries += (Retry(engine.spec.name, gateway.clock(), str(exc)),)
                    if isinstance(exc, ConnectTimeout):
                        last = EngineTimeout(f"engine {engine.spec.name}: {exc} (timeouts.connect)")
                    continue
                except LostEarly as exc:
                    if not self._may_retry():
                        raise EngineBroke(f"engine {engine.spec.name} broke off: {exc}") from exc
                    fleet.faulted(engine, f"it broke off: {exc}")
                    record.retries += (Retry(engine.spec.name, gateway.clock(), f"broke off: {exc}"),)
                    if self._pick(step.tier, [*tried, engine]) is not None:
                        tried.append(engine)
                    continue
                if connection.status in replies.OVERLOADED:
                    last = _overloaded(engine, connection)
                    self.release()
                    tried.append(engine)
                    if not self._may_retry():
                        raise last
                    record.retries += (Retry(engine.spec.name, gateway.clock(), last.message),)
                    continue
                self.because = step.because
                return engine, connection
        raise placement.nowhere(decision, fleet, tenant, last, self._past)

    def _pick(self, tier: str, tried: list[Engine]) -> Engine | None:
        past, fleet = self._past, self._gateway.fleet
        return fleet.pick(tier, tried) if past is None else past.pick(fleet, tier, tried)

    def _may_retry(self) -> bool:
        gateway = self._gateway
        return self._record.attempts < gateway.config.retries.attempts and gateway.budget.take()

    async def ask(self, engine: Engine) -> Connection:
        """Send the request to one engine and wait until its reply begins.

        Raises ConnectFailed, LostEarly, EngineBroke, EngineTimeout; nothing is held then.
        """
        upstream = self._gateway.upstreams[engine.spec.name]
        payload = self._build(engine)
        record, spec = self._record, engine.spec
        # Noted before it answers: whoever looks for what an engine broke or kept waiting must find its name.
        record.tier, record.engine, record.precision = spec.tier, spec.name, spec.precision
        record.target = engine
        record.attempts += 1
        engine.in_flight += 1
        if engine.state != "ready":
            engine.breaker.trial = self
        self.engine = engine
        self._pool = upstream.pool
        try:
            try:
                return await self._exchange(upstream, payload, fresh=False)
            except LostEarly as exc:
                if not exc.reused:
                    raise
            # Closed while it was idle in the pool: the engine has seen nothing of this request.
            if self.connection is not None:
                upstream.pool.release(self.connection)
                self.connection = None
            self._record.attempts += 1
            return await self._exchange(upstream, payload, fresh=True)
        except LostLate as exc:
            self.release()
            raise EngineBroke(f"engine {engine.spec.name}: {exc}") from exc
        except TimedOut as exc:
            self.release()
            raise replies.timeout_error(exc, engine.spec.name) from exc
        except (ConnectFailed, LostEarly):
            self.release()
            raise

    async def _exchange(self, upstream: Upstream, payload: bytes, *, fresh: bool) -> Connection:
        record, gateway, limits = self._record, self._gateway, upstream.limits
        connection = None if fresh else upstream.pool.reuse()
        if connection is None:
            connection = await upstream.pool.connect(limits.connect)
        self.connection = connection
        if record.asked is None:
            record.asked = gateway.clock()
            if self._read_at:
                gateway.metrics.overhead(record.asked - self._read_at)
        connection.start(payload, limits)
        while not connection.begun:
            await connection.wait()
            connection.check()
        return connection

    def release(self) -> None:
        """Give the connection back; one with a reply under way is closed, which aborts it at the engine."""
        engine, connection, pool = self.engine, self.connection, self._pool
        if engine is None:
            return
        if connection is not None and pool is not None:
            pool.release(connection)
        self.connection = None
        engine.in_flight -= 1
        if engine.breaker.trial is self:
            engine.breaker.trial = None
        self.engine = None


def _overloaded(engine: Engine, connection: Connection) -> NothingReady:
    seconds = replies.retry_after(connection.headers)
    return NothingReady(
        f"engine {engine.spec.name} is overloaded ({connection.status})",
        code="engine_overloaded",
        retry_after=2 if seconds is None else seconds,
    )
