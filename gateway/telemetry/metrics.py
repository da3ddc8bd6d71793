"""Prometheus metrics: counted once, when a request ends, on every way out. Labels are names from the
configuration and fixed words, never what a client sent."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engines.fleet import Fleet
from gateway.limits import Store
from gateway.telemetry.record import Record

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
FIRST_TOKEN = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
DECISION = (0.00001, 0.000025, 0.00005, 0.0001, 0.0002, 0.0004, 0.001, 0.005, 0.025, 0.1)
STATES = ("starting", "ready", "suspect", "down")


class FleetCollector(Collector):
    """Reads the fleet and the store when it is scraped: no gauge can be stale or leak."""

    def __init__(self, fleet: Fleet, store: Store) -> None:
        self._fleet = fleet
        self._store = store

    def collect(self) -> Iterable[Metric]:
        state = GaugeMetricFamily(
            "dualgauge_engine_state", "1 for the state that holds", labels=["engine", "state"]
        )
        running = GaugeMetricFamily(
            "dualgauge_engine_running", "Requests that the engine runs", labels=["engine"]
        )
        waiting = GaugeMetricFamily(
            "dualgauge_engine_waiting", "Requests in the engine's queue", labels=["engine"]
        )
        kv = GaugeMetricFamily(
            "dualgauge_engine_kv_usage", "Used share of the KV cache, 0..1", labels=["engine"]
        )
        flight = GaugeMetricFamily(
            "dualgauge_in_flight", "Requests with an engine of the tier", labels=["tier"]
        )
        for engine in self._fleet.engines:
            name = engine.spec.name
            for one in STATES:
                state.add_metric([name, one], float(engine.state == one))
            running.add_metric([name], engine.running)
            waiting.add_metric([name], engine.waiting)
            if engine.kv is not None:
                kv.add_metric([name], engine.kv)
        for tier, engines in self._fleet.tiers.items():
            flight.add_metric([tier], sum(e.in_flight for e in engines))
        leases = GaugeMetricFamily(
            "dualgauge_leases", "Reservations that are not settled", self._store.in_use()
        )
        return (state, running, waiting, kv, flight, leases)


class Metrics:
    """All metrics of one process, in a registry of their own."""

    def __init__(self, fleet: Fleet, store: Store) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        self._requests = counter(
            "dualgauge_requests", "Requests that ended", ["dialect", "tier", "rule", "outcome"]
        )
        self._degraded = counter(
            "dualgauge_degraded", "Answers by a less precise tier than decided", ["rule"]
        )
        self._limited = counter("dualgauge_limited", "Requests refused by a limit", ["kind"])
        self._tokens = counter(
            "dualgauge_tokens", "Tokens by kind: prompt, cached, completion", ["tier", "kind"]
        )
        self._retries = counter("dualgauge_retries", "Attempts after the first", ["tier"])
        self._first = histogram(
            "dualgauge_time_to_first_token_seconds",
            "From the request to the first byte of a stream's body",
            ["tier"],
            buckets=FIRST_TOKEN,
        )
        self._whole = histogram(
            "dualgauge_request_seconds", "From the request to its end", ["dialect", "tier"], buckets=LATENCY
        )
        self._queue = histogram(
            "dualgauge_queue_seconds", "Waiting for an engine to be ready", ["tier"], buckets=LATENCY
        )
        self._overhead = histogram(
            "dualgauge_overhead_seconds", "From the request's last byte to asking an engine", buckets=DECISION
        )
        self._decision = histogram(
            "dualgauge_decision_seconds", "Measuring signals and deciding", buckets=DECISION
        )
        self._policy = gauge("dualgauge_policy_info", "1 for the policy in force", ["hash"])
        self._reload_failures = counter(
            "dualgauge_reload_failures", "Reloads that kept the old file", ["file"]
        )
        self._by_labels: dict[tuple[str, str, str, str], Counter] = {}
        self._by_tier: dict[str, tuple[Counter, Counter, Counter, Histogram]] = {}
        self._by_dialect: dict[tuple[str, str], Histogram] = {}
        self.registry.register(FleetCollector(fleet, store))

    def count(self, record: Record) -> None:
        """One request, whatever became of it."""
        tier = record.tier or "none"
        labels = (record.dialect, tier, record.rule or "none", record.outcome)
        requests = self._by_labels.get(labels)
        if requests is None:
            requests = self._by_labels[labels] = self._requests.labels(*labels)
        requests.inc()
        children = self._by_tier.get(tier)
        if children is None:
            children = self._by_tier[tier] = (
                self._tokens.labels(tier, "prompt"),
                self._tokens.labels(tier, "cached"),
                self._tokens.labels(tier, "completion"),
                self._first.labels(tier),
            )
        prompt, cached, completion, first = children
        if record.usage is not None:
            prompt.inc(record.usage.prompt)
            if record.usage.cached:
                cached.inc(record.usage.cached)
            completion.inc(record.usage.completion)
        if record.first_token is not None and record.stream:
            first.observe(record.first_token - record.started)
        key = (record.dialect, tier)
        whole = self._by_dialect.get(key)
        if whole is None:
            whole = self._by_dialect[key] = self._whole.labels(*key)
        whole.observe(record.ended - record.started)
        if record.decide_seconds is not None:
            self._decision.observe(record.decide_seconds)
        if record.degraded:
            self._degraded.labels(record.rule).inc()
        if record.outcome == "limited":
            self._limited.labels(record.error_code or "rate_limit_exceeded").inc()
        if record.attempts > 1:
            self._retries.labels(tier).inc(record.attempts - 1)
        if record.queue_seconds:
            self._queue.labels(tier).observe(record.queue_seconds)

    def overhead(self, seconds: float) -> None:
        self._overhead.observe(seconds)

    def policy(self, hash_: str) -> None:
        self._policy.clear()
        self._policy.labels(hash_).set(1)

    def reload_failed(self, file: str) -> None:
        self._reload_failures.labels(file).inc()

    def text(self) -> bytes:
        """The exposition format, version 0.0.4."""
        return generate_latest(self.registry)
