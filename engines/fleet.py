"""The gateway's view of its engines: which are ready, how loaded they are, and which takes a request.

Plain state, changed by health probes and by what requests meet on their way; no I/O, no clock of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from engines import affinity
from engines.breaker import Breaker
from engines.picking import less_loaded
from engines.progress import Progress
from engines.spec import EngineSpec

State = Literal["starting", "ready", "suspect", "asleep", "down"]
Doubt = Literal["", "unreachable", "stalled", "faults"]

FAULTS = 3
"""So many requests in a row an engine may fail: one may be at fault itself, in each of its attempts."""
NOT_ASKED = "not asked yet"
QUEUED = 4
"""A queued request weighs as much as so many that run: vLLM's own weights between data-parallel engines. A
full KV cache weighs like one queued request, since that is what the next one becomes."""


@dataclass(slots=True, eq=False)
class Engine:
    """One engine at run time. `running`, `waiting` and `kv` (0..1) are its own figures, at `sampled_at`
    (monotonic seconds); `in_flight` counts the requests that this gateway has with it now,
    `sampled_in_flight` those it had then. `software` is what its metrics tell it to be, `vllm` or
    `llama.cpp`; `preemptions` is what it has counted since its start. `doubt` is why it is suspect;
    `failures` and `successes` are probes in a row."""

    spec: EngineSpec
    state: State = "starting"
    reason: str = NOT_ASKED
    in_flight: int = 0
    running: int = 0
    waiting: int = 0
    kv: float | None = None
    sampled_at: float | None = None
    sampled_in_flight: int = 0
    software: str = ""
    preemptions: int | None = None
    failures: int = 0
    successes: int = 0
    doubt: Doubt = ""
    breaker: Breaker = field(default_factory=Breaker)
    progress: Progress = field(default_factory=Progress)
    seed: int = 0
    manifest: str = ""
    """`sha256:…` of its model's manifest, where Dualgauge starts it and the model has one."""
    held: str = ""
    """Why it takes no new request, however healthy it is: it drains, or is not proven yet."""

    def __post_init__(self) -> None:
        self.seed = affinity.seed(self.spec.name)

    @property
    def asked(self) -> bool:
        """Whether a probe has had an answer, or none, since the start."""
        return self.reason != NOT_ASKED

    @property
    def ready(self) -> bool:
        return self.state == "ready" and not self.held

    @property
    def cooling(self) -> bool:
        """Whether only failed requests speak against it: better than nothing, where a tier has no other."""
        return self.state == "suspect" and self.doubt == "faults" and not self.held

    @property
    def on_trial(self) -> bool:
        """Whether one request may try it."""
        return (
            self.state == "suspect"
            and self.doubt != "unreachable"
            and self.breaker.half_open
            and not self.held
        )

    @property
    def usable(self) -> bool:
        """Whether a request may go to it at all, if only as a trial or for want of another."""
        return self.ready or self.cooling or self.on_trial

    def requests(self) -> int:
        """Requests at this engine: what it told last and what came or went since, or what we know of."""
        return max(self.in_flight, self.running + self.waiting + self.in_flight - self.sampled_in_flight)

    def load(self) -> float:
        """How loaded it is, in running requests; what queues weighs more."""
        return self.requests() + (QUEUED - 1) * self.waiting + QUEUED * (self.kv or 0.0)

    def queued(self) -> int:
        """What we sent and it has not yet told as running counts as waiting: its own figures may be a probe's
        interval old."""
        return max(self.waiting, self.in_flight - self.running)

    def over(self, waiting: int, kv: float, wait: float | None = None) -> bool:
        """Whether it is busy by one of the figures; `wait` is in seconds."""
        if self.queued() >= waiting or (self.kv is not None and self.kv >= kv):
            return True
        predicted = None if wait is None else self.predicted_wait(kv)
        return predicted is not None and wait is not None and predicted >= wait

    def predicted_wait(self, kv: float = 1.0) -> float | None:
        """Seconds until a request sent now would begin (Little's law: the queue by the rate at which requests
        finish); None where nothing is known of the rate. Over this share of the KV cache, the request itself
        queues."""
        queue = self.queued() + (self.kv is not None and self.kv >= kv)
        if not queue:
            return 0.0
        rate = self.progress.finishing.value
        return None if rate is None else queue / rate


class Fleet:
    """All engines by tier; `tiers` go from the least to the most precise. `several` are the tiers that have
    more than one. Engines may come and go (`change`), tiers stay."""

    engines: tuple[Engine, ...]
    by_name: Mapping[str, Engine]
    tiers: Mapping[str, tuple[Engine, ...]]
    several: frozenset[str]

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        tiers: Sequence[str],
        rand: random.Random | None = None,
    ) -> None:
        self._order = tuple(tiers)
        self._have(tuple(Engine(spec) for spec in specs))
        self._rand = rand or random.Random()  # noqa: S311 - spreads load, no secret
        # Tiers that take turns on one GPU: how many seconds a request waits for its tier's.
        self.turns: Mapping[str, float] = {}
        # Told of each change of an engine's state, at once.
        self.watchers: list[Callable[[Engine], None]] = []
        # Told of an engine that could not be reached: a probe soon tells a moment's trouble from an outage.
        self.doubters: list[Callable[[Engine], None]] = []
        # Told when engines came or went.
        self.movers: list[Callable[[], None]] = []

    def _have(self, engines: tuple[Engine, ...]) -> None:
        self.engines = engines
        self.by_name = {e.spec.name: e for e in engines}
        self.tiers = {tier: tuple(e for e in engines if e.spec.tier == tier) for tier in self._order}
        self.several = frozenset(tier for tier, some in self.tiers.items() if len(some) > 1)

    def change(self, specs: Sequence[EngineSpec]) -> tuple[Sequence[Engine], Sequence[Engine]]:
        """Have these engines from now on: (those that came, those that went). One whose spec is as before
        keeps its state. What has gone takes no request any more; those that it has end there."""
        before = self.engines
        kept = {e.spec.name: e for e in before if e.spec in specs}
        now = tuple(kept.get(spec.name) or Engine(spec) for spec in specs)
        came, went = [e for e in now if e not in before], [e for e in before if e not in now]
        if came or went:
            self._have(now)
            for engine in went:
                self.set_state(engine, "down", "it has left")
            for mover in self.movers:
                mover()
        return came, went

    def pick(self, tier: str, tried: Collection[Engine] = (), key: int | None = None) -> Engine | None:
        """The engine of a tier for a request, None where no usable one was left untried.

        An engine that is to be tried again comes first, for one request; then the conversation's own (`key`),
        or the less loaded of two; one whose last probe failed only where there is no better, one that failed
        requests only where there is no other."""
        engines = self.tiers.get(tier, ())
        if len(engines) == 1:
            engine = engines[0]
            return engine if engine.usable and engine not in tried else None
        left = [e for e in engines if e not in tried]
        ready = [e for e in left if e.ready]
        for engine in left:
            if engine.on_trial:
                return engine
        among = [e for e in ready if not e.failures] or ready or [e for e in left if e.cooling]
        if len(among) < 2:
            return among[0] if among else None
        return less_loaded(among, self._rand) if key is None else affinity.choose(among, key)

    def busy(self, tier: str, waiting: int, kv: float, wait: float | None = None) -> bool:
        """Whether every ready engine of the tier is over one of the figures; false where none is ready."""
        ready = [e for e in self.tiers.get(tier, ()) if e.ready]
        return bool(ready) and all(e.over(waiting, kv, wait) for e in ready)

    def predicted_wait(self, tier: str, kv: float = 1.0) -> float | None:
        """The shortest predicted wait of a ready engine, in seconds; None where none can be predicted."""
        waits = [e.predicted_wait(kv) for e in self.tiers.get(tier, ()) if e.ready]
        return min((wait for wait in waits if wait is not None), default=None)

    def prefill(self, tier: str) -> float | None:
        """Seconds that a token of a prompt takes at the tier's fastest ready engine; None where it is
        unknown."""
        rates = [e.progress.prefill.value for e in self.tiers.get(tier, ()) if e.ready]
        return min((rate for rate in rates if rate is not None), default=None)

    def ready_below(self, tier: str) -> Iterator[str]:
        """Less precise tiers with a usable engine, the nearest first."""
        order = self._order
        index = order.index(tier) if tier in order else len(order)
        return (t for t in reversed(order[:index]) if any(e.usable for e in self.tiers[t]))

    def less_precise(self, tier: str, than: str) -> bool:
        return self._order.index(tier) < self._order.index(than)

    def missing(self) -> dict[str, str]:
        """Tiers without a usable engine, each with the reason."""
        found: dict[str, str] = {}
        for tier, engines in self.tiers.items():
            if not any(e.usable for e in engines):
                reasons = [f"{e.spec.name}: {e.held or f'{e.state}, {e.reason}'}" for e in engines]
                found[tier] = "; ".join(reasons) or "no engine is configured"
        return found

    # what probes and requests report

    def set_state(self, engine: Engine, state: State, reason: str, doubt: Doubt = "") -> None:
        if state != "down" and self.by_name.get(engine.spec.name) is not engine:
            return  # it has left meanwhile
        changed = engine.state != state
        engine.state = state
        engine.reason = reason
        engine.doubt = doubt
        if changed:
            if state != "suspect":
                engine.breaker.close()
            for watcher in self.watchers:
                watcher(engine)

    def hold(self, engine: Engine, reason: str) -> None:
        """Give it no new request, whatever probes say; an empty reason ends that. What runs goes on."""
        if engine.held != reason:
            engine.held = reason
            for watcher in self.watchers:
                watcher(engine)
            if not reason and engine.state != "ready":
                # It has been started or woken since the last probe.
                for doubter in self.doubters:
                    doubter(engine)

    def failed(self, engine: Engine, reason: str) -> None:
        """A request could not reach the engine: suspect until a probe says otherwise."""
        engine.successes = 0
        if engine.state == "ready":
            engine.failures += 1
        elif engine.state != "suspect" or engine.doubt == "unreachable":
            return
        self.set_state(engine, "suspect", reason, "unreachable")
        for doubter in self.doubters:
            doubter(engine)

    def faulted(self, engine: Engine, reason: str) -> None:
        """The engine was reached and failed a request: suspect after some in a row, unless it is the last
        ready one of its tier. It may be the requests' fault."""
        breaker = engine.breaker
        if breaker.open:
            breaker.trip()
        elif engine.state == "ready":
            breaker.faults += 1
            others = any(e.ready for e in self.tiers[engine.spec.tier] if e is not engine)
            if breaker.faults >= FAULTS and others:
                breaker.trip()
                text = f"{FAULTS} requests failed in a row: {reason}"
                self.set_state(engine, "suspect", text, "faults")

    def succeeded(self, engine: Engine) -> None:
        """The engine answered a request."""
        breaker = engine.breaker
        if breaker.open:
            self.set_state(engine, "ready", "it answers requests again")
        breaker.close()

    def stalled(self, engine: Engine, reason: str) -> None:
        """The engine has requests and makes no tokens."""
        engine.successes = 0
        if engine.doubt != "stalled":
            engine.breaker.trip()
            self.set_state(engine, "suspect", reason, "stalled")
