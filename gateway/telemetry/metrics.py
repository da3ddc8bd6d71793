"""Prometheus metrics: counted once, when a request ends, on every way out. Labels are names from the
configuration and fixed words, never what a client sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from engines.fleet import Fleet
from gateway.limits import Store
from gateway.telemetry.counters import Buckets, Count, Counter, Histogram, pace
from gateway.telemetry.record import Record

LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
FIRST_TOKEN = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
BETWEEN_TOKENS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.06,
    0.08,
    0.1,
    0.15,
    0.25,
    0.5,
    1,
    5,
    10,
)
LAG = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
DECISION = (0.00001, 0.000025, 0.00005, 0.0001, 0.0002, 0.0004, 0.001, 0.005, 0.025, 0.1)
Tokens = tuple[Count, Count, Count]
"""Prompt, cached and completion tokens."""
TenantSeries = tuple[Count, Count, Tokens]
"""What a request of the same tenant, tier and outcome counts in: requests, seconds, tokens."""
Series = tuple[Count, Buckets, Tokens, Buckets, TenantSeries | None]
"""What a request of the same dialect, tier, rule, outcome and tenant counts in: requests, seconds, tokens,
seconds to the first token, and the tenant's own, where it has one."""
STATES = ("starting", "ready", "suspect", "asleep", "down")
MOST_TENANTS = 100
OTHER_TENANTS = "_other"  # no key can have this name


class Reading(Collector):
    """A counter that is read when it is scraped."""

    def __init__(self, name: str, text: str, read: Callable[[], float]) -> None:
        self._name, self._text, self._read = name, text, read

    def collect(self) -> Iterable[Metric]:
        return (CounterMetricFamily(self._name, self._text, self._read()),)


class FleetCollector(Collector):
    """Reads the fleet and the store when it is scraped: no gauge can be stale or leak."""

    def __init__(self, fleet: Fleet, store: Store) -> None:
        self._fleet = fleet
        self._store = store

    def collect(self) -> Iterable[Metric]:
        state = GaugeMetricFamily(
            "dualgauge_engine_state", "1 for the state that holds", labels=["engine", "state"]
        )
        info = GaugeMetricFamily(
            "dualgauge_engine_info", "1; the tier and the precision", labels=["engine", "tier", "precision"]
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
        preemptions = CounterMetricFamily(
            "dualgauge_engine_preemptions", "Requests that the engine preempted", labels=["engine"]
        )
        flight = GaugeMetricFamily(
            "dualgauge_in_flight", "Requests with an engine of the tier", labels=["tier"]
        )
        for engine in self._fleet.engines:
            name = engine.spec.name
            info.add_metric([name, engine.spec.tier, engine.spec.precision], 1.0)
            for one in STATES:
                state.add_metric([name, one], float(engine.state == one))
            running.add_metric([name], engine.running)
            waiting.add_metric([name], engine.waiting)
            if engine.kv is not None:
                kv.add_metric([name], engine.kv)
            if engine.preemptions is not None:
                preemptions.add_metric([name], engine.preemptions)
        for tier, engines in self._fleet.tiers.items():
            flight.add_metric([tier], sum(e.in_flight for e in engines))
        leases = GaugeMetricFamily(
            "dualgauge_leases", "Reservations that are not settled", self._store.in_use()
        )
        up = GaugeMetricFamily("dualgauge_store_up", "1 while the store of leases answers", self._store.up())
        fallback = CounterMetricFamily(
            "dualgauge_store_fallback", "Reservations made while the store was down", self._store.fallbacks()
        )
        return (state, info, running, waiting, kv, preemptions, flight, leases, up, fallback)


class Metrics:
    """All metrics of one process, in a registry of their own."""

    def __init__(self, fleet: Fleet, store: Store) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._counter(
            "dualgauge_requests", "Requests that ended", "dialect", "tier", "rule", "outcome"
        )
        self._degraded = self._counter("dualgauge_degraded", "Answers less precise than decided", "rule")
        self._limited = self._counter("dualgauge_limited", "Requests refused by a limit", "kind")
        self._tokens = self._counter(
            "dualgauge_tokens", "Prompt, cached and completion tokens", "tier", "kind"
        )
        self._retries = self._counter("dualgauge_retries", "Attempts after the first", "tier")
        self._reload_failures = self._counter(
            "dualgauge_reload_failures", "Reloads that kept the old file", "file"
        )
        self._refused = Gauge(
            "dualgauge_file_refused",
            "1 while a file on disk has a mistake and what was read before it stays in force",
            ["file"],
            registry=self.registry,
        )
        self._tenant_requests = self._counter(
            "dualgauge_tenant_requests", "Requests of a tenant that ended", "tenant", "tier", "outcome"
        )
        self._tenant_seconds = self._counter(
            "dualgauge_tenant_request_seconds", "From a tenant's requests to their ends", "tenant"
        )
        self._tenant_tokens = self._counter(
            "dualgauge_tenant_tokens", "A tenant's tokens", "tenant", "tier", "kind"
        )
        self._tenant_degraded = self._counter(
            "dualgauge_tenant_degraded", "A tenant's answers less precise than decided", "tenant"
        )
        self._tenant_limited = self._counter(
            "dualgauge_tenant_limited", "A tenant's requests refused by a limit", "tenant", "kind"
        )
        self._tenants: set[str] = set()
        self._first = self._histogram(
            "dualgauge_time_to_first_token_seconds",
            "From the request to the first bytes of its stream",
            FIRST_TOKEN,
            "tier",
        )
        self._between = self._histogram(
            "dualgauge_inter_token_seconds",
            "Between what a stream brought at one time and at the next",
            BETWEEN_TOKENS,
            "tier",
        )
        self._whole = self._histogram(
            "dualgauge_request_seconds", "From the request to its end", LATENCY, "dialect", "tier"
        )
        self._queue = self._histogram(
            "dualgauge_queue_seconds", "Waiting for an engine to be ready", LATENCY, "tier"
        )
        self._overhead = self._histogram(
            "dualgauge_overhead_seconds", "From the request's last byte to asking an engine", DECISION
        ).labels()
        self._decision = self._histogram(
            "dualgauge_decision_seconds", "Measuring signals and deciding", DECISION
        ).labels()
        self._lag = self._histogram(
            "dualgauge_loop_lag_seconds", "How late the event loop's timers fire", LAG
        ).labels()
        self._policy = Gauge(
            "dualgauge_policy_info", "1 for the policy in force", ["hash"], registry=self.registry
        )
        self._config = Gauge(
            "dualgauge_config_info", "1 for the configuration in force", ["hash"], registry=self.registry
        )
        self._shadow = self._counter(
            "dualgauge_shadow_decisions",
            "Decided by a candidate beside the policy in force",
            "rule",
            "tier",
            "candidate_tier",
        )
        self._shadow_failures = self._counter(
            "dualgauge_shadow_failures", "Requests that a candidate failed to decide"
        ).labels()
        self._candidate = Gauge(
            "dualgauge_shadow_rollout",
            "The share of conversations that the candidate decides",
            ["hash"],
            registry=self.registry,
        )
        self._decisions_dropped = self._counter(
            "dualgauge_decision_log_dropped", "Lines of the decision log that could not be written"
        ).labels()
        self._series: dict[tuple[str, str, str, str, str], Series] = {}
        self.registry.register(FleetCollector(fleet, store))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        counter = Counter(name, text, labels)
        self.registry.register(counter)
        return counter

    def _histogram(self, name: str, text: str, bounds: Sequence[float], *labels: str) -> Histogram:
        histogram = Histogram(name, text, labels, bounds=bounds)
        self.registry.register(histogram)
        return histogram

    def count(self, record: Record) -> None:
        """One request, whatever became of it."""
        labels = record.dialect, record.tier, record.rule, record.outcome, record.tenant
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = self._series_of(*labels)
        requests, whole, tokens, first, tenant = series
        seconds = record.ended - record.started
        requests.value += 1
        whole.observe(seconds)
        trace = record.trace
        if trace is not None and trace.sampled:
            self._show(record, trace.trace.decode(), whole, first)
        usage = record.usage
        if usage is not None:
            prompt, cached, completion = tokens
            prompt.value += usage.prompt
            cached.value += usage.cached
            completion.value += usage.completion
        if record.stream and record.first_token is not None:
            first.observe(record.first_token - record.started)
        if record.decide_seconds is not None:
            self._decision.observe(record.decide_seconds)
        if record.degraded:
            self._degraded.labels(record.rule).add()
        if record.outcome == "limited":
            self._limited.labels(record.limit).add()
        if record.attempts > 1:
            self._retries.labels(record.tier or "none").add(record.attempts - 1)
        if record.queue_seconds:
            self._queue.labels(record.tier or "none").observe(record.queue_seconds)
        if tenant is None:
            return
        requests, spent, tokens = tenant
        requests.value += 1
        spent.value += seconds
        if usage is not None:
            prompt, cached, completion = tokens
            prompt.value += usage.prompt
            cached.value += usage.cached
            completion.value += usage.completion
        if record.degraded:
            self._tenant_degraded.labels(self._tenant(record.tenant)).add()
        if record.outcome == "limited":
            self._tenant_limited.labels(self._tenant(record.tenant), record.limit).add()

    def _show(self, record: Record, trace: str, whole: Buckets, first: Buckets) -> None:
        """Have the histograms of a traced request name its trace."""
        seconds = record.ended - record.started
        at = record.started_ns / 1e9 + seconds
        whole.show(seconds, trace, at)
        if record.stream and record.first_token is not None:
            first.show(record.first_token - record.started, trace, at)

    def _tenant(self, name: str) -> str:
        """The label of a tenant: its name, for as many as there is room for."""
        if name not in self._tenants:
            if len(self._tenants) >= MOST_TENANTS:
                return OTHER_TENANTS
            self._tenants.add(name)
        return name

    def _series_of(self, dialect: str, tier: str, rule: str, outcome: str, tenant: str) -> Series:
        tier, rule = tier or "none", rule or "none"
        return (
            self._requests.labels(dialect, tier, rule, outcome),
            self._whole.labels(dialect, tier),
            _tokens(self._tokens, tier),
            self._first.labels(tier),
            self._tenant_series_of(self._tenant(tenant), tier, outcome) if tenant else None,
        )

    def _tenant_series_of(self, tenant: str, tier: str, outcome: str) -> TenantSeries:
        return (
            self._tenant_requests.labels(tenant, tier, outcome),
            self._tenant_seconds.labels(tenant),
            _tokens(self._tenant_tokens, tenant, tier),
        )

    # what the console shows

    def tier_totals(self) -> dict[str, tuple[float, float]]:
        """Requests that ended and their completion tokens, by tier."""
        requests = _sums((tier, count) for (_, tier, _, _), count in self._requests.items())
        return {tier: (count, self._tokens.value(tier, "completion")) for tier, count in requests.items()}

    def rule_totals(self) -> dict[str, tuple[float, float]]:
        """Requests that ended, and how many of them were degraded, by rule; `none`: nothing decided."""
        requests = _sums((rule, count) for (_, _, rule, _), count in self._requests.items())
        return {rule: (count, self._degraded.value(rule)) for rule, count in requests.items()}

    def tenant_totals(self) -> dict[str, tuple[float, float]]:
        """Requests that ended, and their prompt and completion tokens, by tenant."""
        requests = _sums((tenant, count) for (tenant, _, _), count in self._tenant_requests.items())
        counted = self._tenant_tokens.items()
        tokens = _sums((tenant, count) for (tenant, _, kind), count in counted if kind != "cached")
        return {tenant: (count, tokens.get(tenant, 0.0)) for tenant, count in requests.items()}

    def first_tokens(self, tier: str) -> list[int]:
        """How many streams began within each bound of FIRST_TOKEN, and beyond the last."""
        return list(self._first.labels(tier).counts)

    def overhead(self, seconds: float) -> None:
        self._overhead.observe(seconds)

    def pace(self, tier: str, clock: Callable[[], float]) -> Callable[[], None]:
        """For one stream of this tier, to be called whenever bytes of it go to the client."""
        return pace(self._between.labels(tier), clock)

    def lag(self, seconds: float) -> None:
        self._lag.observe(seconds)

    def policy(self, hash_: str) -> None:
        """The policy in force, when all files were read."""
        for file in ("policy", "keys", "shadow"):
            self._refused.labels(file).set(0)
        self._policy.clear()
        self._policy.labels(hash_).set(1)

    def candidate(self, hash_: str | None, share: float) -> None:
        """The candidate in the shadow, None for none, and its share, 0 to 1."""
        self._candidate.clear()
        if hash_ is not None:
            self._candidate.labels(hash_).set(share)

    def shadow(self, rule: str, tier: str, candidate_tier: str) -> None:
        """One decision of a candidate beside the rule and the tier of the policy in force."""
        self._shadow.labels(rule, tier, candidate_tier).value += 1

    def shadow_failed(self) -> None:
        self._shadow_failures.add()

    def decisions_dropped(self, lines: int) -> None:
        self._decisions_dropped.add(lines)

    def config(self, hash_: str) -> None:
        """The configuration that this process was started with, where its file has no mistake."""
        self._refused.labels("config").set(0)
        self._config.labels(hash_).set(1)

    def reload_failed(self, file: str) -> None:
        self._reload_failures.labels(file).add()
        self._refused.labels(file).set(1)

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A counter that somebody else keeps, read when it is scraped; `name` without `_total`."""
        self.registry.register(Reading(name, text, read))

    def text(self) -> bytes:
        """The exposition format, version 0.0.4."""
        return generate_latest(self.registry)

    def scrape(self, accept: str) -> tuple[bytes, str]:
        """(body, content type) in the format that a scraper accepts; OpenMetrics has the exemplars.

        May be called on another thread. The registry is all that is read: it is where the figures of several
        processes would be put together.
        """
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


def _tokens(counter: Counter, *labels: str) -> Tokens:
    return (
        counter.labels(*labels, "prompt"),
        counter.labels(*labels, "cached"),
        counter.labels(*labels, "completion"),
    )


def _sums(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, count in pairs:
        sums[name] = sums.get(name, 0.0) + count
    return sums
