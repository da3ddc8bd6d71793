"""The gateway's view of its engines: which are ready, how loaded they are, and which takes a request.

Plain state, changed by health probes and by what requests meet on their way; no I/O, no clock of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from engines.spec import EngineSpec

State = Literal["starting", "ready", "suspect", "asleep", "down"]


@dataclass(slots=True, eq=False)
class Engine:
    """One engine at run time. `running`, `waiting` and `kv` (0..1) are its own figures, at `sampled_at`
    (monotonic seconds); `in_flight` counts the requests that this gateway has with it now. `software` is what
    its metrics tell it to be, `vllm` or `llama.cpp`; `preemptions` is what it has counted since its start."""

    spec: EngineSpec
    state: State = "starting"
    reason: str = "not asked yet"
    in_flight: int = 0
    running: int = 0
    waiting: int = 0
    kv: float | None = None
    sampled_at: float | None = None
    software: str = ""
    preemptions: int | None = None
    failures: int = 0
    successes: int = 0
    held: str = ""
    """Why it takes no new request, however healthy it is: it drains, or is not proven yet."""

    @property
    def ready(self) -> bool:
        return self.state == "ready" and not self.held

    def load(self) -> int:
        """Requests at this engine: what it told last, or what we know to be with it since."""
        return max(self.in_flight, self.running + self.waiting)

    def over(self, waiting: int, kv: float) -> bool:
        """Whether it is busy by one of the two figures. What we sent and it has not yet told as running
        counts as waiting: its own figures may be a probe's interval old."""
        queued = max(self.waiting, self.in_flight - self.running)
        return queued >= waiting or (self.kv is not None and self.kv >= kv)


class Fleet:
    """All engines by tier; `tiers` go from the least to the most precise."""

    def __init__(self, specs: Sequence[EngineSpec], tiers: Sequence[str]) -> None:
        self.engines = tuple(Engine(spec) for spec in specs)
        self.by_name: Mapping[str, Engine] = {e.spec.name: e for e in self.engines}
        self.tiers: Mapping[str, tuple[Engine, ...]] = {
            tier: tuple(e for e in self.engines if e.spec.tier == tier) for tier in tiers
        }
        self._order = tuple(tiers)
        # Told of each change of an engine's state, at once.
        self.watchers: list[Callable[[Engine], None]] = []

    def pick(self, tier: str, tried: Collection[Engine] = ()) -> Engine | None:
        """The least loaded ready engine of a tier that was not tried yet."""
        best: Engine | None = None
        for engine in self.tiers.get(tier, ()):
            if engine.ready and engine not in tried and (best is None or engine.load() < best.load()):
                best = engine
        return best

    def busy(self, tier: str, waiting: int, kv: float) -> bool:
        """Whether every ready engine of the tier is over one of the figures; false where none is ready."""
        ready = [e for e in self.tiers.get(tier, ()) if e.ready]
        return bool(ready) and all(e.over(waiting, kv) for e in ready)

    def ready_below(self, tier: str) -> Iterator[str]:
        """Less precise tiers with a ready engine, the nearest first."""
        order = self._order
        index = order.index(tier) if tier in order else len(order)
        return (t for t in reversed(order[:index]) if any(e.ready for e in self.tiers[t]))

    def less_precise(self, tier: str, than: str) -> bool:
        return self._order.index(tier) < self._order.index(than)

    def missing(self) -> dict[str, str]:
        """Tiers without a ready engine, each with the reason."""
        found: dict[str, str] = {}
        for tier, engines in self.tiers.items():
            if not any(e.ready for e in engines):
                reasons = [f"{e.spec.name}: {e.held or f'{e.state}, {e.reason}'}" for e in engines]
                found[tier] = "; ".join(reasons) or "no engine is configured"
        return found

    # what probes and requests report

    def set_state(self, engine: Engine, state: State, reason: str) -> None:
        changed = engine.state != state
        engine.state = state
        engine.reason = reason
        if changed:
            for watcher in self.watchers:
                watcher(engine)

    def hold(self, engine: Engine, reason: str) -> None:
        """Give it no new request, whatever probes say; an empty reason ends that. What runs goes on."""
        if engine.held != reason:
            engine.held = reason
            for watcher in self.watchers:
                watcher(engine)

    def failed(self, engine: Engine, reason: str) -> None:
        """A request could not reach the engine, or lost it: suspect until a probe says otherwise."""
        engine.successes = 0
        if engine.state == "ready":
            engine.failures += 1
            self.set_state(engine, "suspect", reason)
