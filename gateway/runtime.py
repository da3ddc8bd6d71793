"""What every request meets: the parts of one gateway process, wired together in `gateway.app`."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from engines.fleet import Fleet
from engines.spec import EngineSpec
from gateway.config import Bounds, Config
from gateway.errors import Overloaded
from gateway.identity import Keyring
from gateway.limits import Store
from gateway.limits.waiting import SlotLines, TierLines
from gateway.reading import AT_ONCE, Reader
from gateway.relay.upstream import Limits, Pool, RequestHead
from gateway.shadow import Candidate
from gateway.telemetry.decisions import Decisions
from gateway.telemetry.ended import Ended
from gateway.telemetry.history import History
from gateway.telemetry.logs import AccessLog
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.recent import Recent
from gateway.telemetry.traces import Tracer
from gateway.tokenizer import Counter
from policies.logged import Fields
from policies.policy import Policy

Stamp = tuple[int, int, int] | None
Stamps = dict[Path, Stamp]
"""How files looked when they were read: time of change, size and inode; None where there was none."""

MAX_STORED = 10_000
BUDGET_START = 10.0
BUDGET_CAP = 100.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a reload replaces, in one assignment; a request keeps the one it began with. `fields` are what the
    decision log has of requests under these policies."""

    policy: Policy
    keyring: Keyring
    candidate: Candidate | None
    fields: Fields

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The one in force, and its candidate."""
        return (self.policy,) if self.candidate is None else (self.policy, self.candidate.policy)


class Upstream:
    """How to reach one engine: its pool, its prepared request heads, its timeouts."""

    def __init__(self, spec: EngineSpec, idle_seconds: float) -> None:
        self.pool = Pool(spec.url, idle_seconds=idle_seconds)
        self.head = RequestHead(self.pool.address, spec.api_key)
        t = spec.timeouts
        self.limits = Limits(t.connect, t.first_byte, t.idle, t.total)


class RetryBudget:
    """Retries as a share of recent requests (the "retry budget" of Finagle): each request pays in `share`,
    each retry takes out 1; a few are allowed from the start."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._balance = BUDGET_START

    def request(self) -> None:
        if self._balance < BUDGET_CAP:
            self._balance += self._share

    def take(self) -> bool:
        if self._balance < 1:
            return False
        self._balance -= 1
        return True


class Stored(NamedTuple):
    """A reply that an engine holds: whose it is, and where its conversation falls in an even spread (the
    signal `sample`; None: nobody asked)."""

    reply: str
    engine: str
    tenant: str
    sample: float | None = None


@dataclass(slots=True)
class StoredReplies:
    """Replies that engines hold; the oldest are forgotten. `told` hears of those that this process learns of
    by itself."""

    told: Callable[[Stored], None] | None = None
    _by_id: OrderedDict[str, Stored] = field(default_factory=OrderedDict)

    def remember(self, reply: str, engine: str, tenant: str, sample: float | None = None) -> None:
        stored = Stored(reply, engine, tenant, sample)
        self.put(stored)
        if self.told is not None:
            self.told(stored)

    def put(self, stored: Stored) -> None:
        """One of which another process has told."""
        self._by_id[stored.reply] = stored
        if len(self._by_id) > MAX_STORED:
            self._by_id.popitem(last=False)

    def forget(self, engine: str) -> None:
        """What an engine held is gone with it."""
        for stored in [stored for stored in self._by_id.values() if stored.engine == engine]:
            del self._by_id[stored.reply]

    def find(self, reply: str) -> Stored | None:
        """A reply that is remembered."""
        return self._by_id.get(reply)

    def all(self) -> list[Stored]:
        """The oldest first."""
        return list(self._by_id.values())


@dataclass(slots=True)
class Load:
    """What the requests of this process hold together: how many they are, and the bytes of their bodies."""

    requests: int = 0
    bytes: int = 0
    _by_tenant: dict[str, int] = field(default_factory=dict)

    def enter(self, bounds: Bounds) -> None:
        """Raises Overloaded where there is no room for one more. It counts once its body is there: a head
        alone takes nobody's place."""
        if self.requests >= bounds.requests:
            raise Overloaded(f"{self.requests} requests run already (bounds.requests)", retry_after=1)

    def hold(self, size: int, tenant: str, bounds: Bounds) -> None:
        """Count bytes of a body in. Raises Overloaded where there is no room; small bodies have theirs by the
        number of requests, and one tenant has no more than half where that holds the largest body."""
        own = self._by_tenant.get(tenant, 0) + size
        share = max(bounds.memory // 2, bounds.body)
        if size > AT_ONCE and (self.bytes + size > bounds.memory or own > share):
            raise Overloaded("too many large bodies are held already (bounds.memory)", retry_after=1)
        self.bytes += size
        self._by_tenant[tenant] = own

    def release(self, size: int, tenant: str) -> None:
        """Take back what `hold` has counted."""
        self.bytes -= size
        left = self._by_tenant.pop(tenant) - size
        if left:
            self._by_tenant[tenant] = left


@dataclass(slots=True)
class Gateway:
    """`clock` is monotonic and `wall` Unix time, both in seconds; `rand` draws ids. `prompts` says how the
    length of prompts is measured, where nothing counts them. `sockets` is the folder of hosted engines'
    sockets, there while the gateway runs. `departed` are the upstreams of engines that have left. `draining`:
    it ends, and refuses what comes; `retiring`: another one has taken its place, and what comes on its
    connections is the last of each."""

    config: Config
    snapshot: Snapshot
    fleet: Fleet
    upstreams: dict[str, Upstream]
    store: Store
    metrics: Metrics
    tracer: Tracer | None
    budget: RetryBudget
    stored: StoredReplies
    clock: Callable[[], float]
    wall: Callable[[], float]
    rand: random.Random
    draining: bool = False
    retiring: bool = False
    reload_error: str | None = None
    shadow_error: str | None = None
    restart_needed: bool = False
    decisions: Decisions | None = None
    access: AccessLog | None = None
    counter: Counter | None = None
    prompts: str = "estimated"
    sockets: Path = Path()
    stamps: Stamps = field(default_factory=dict)
    names: dict[str, str | None] = field(default_factory=dict)
    departed: list[Upstream] = field(default_factory=list)
    recent: Recent = field(default_factory=Recent)
    reader: Reader = field(default_factory=Reader)
    load: Load = field(default_factory=Load)

    ended: Ended = field(init=False)
    history: History = field(init=False)
    slots: SlotLines = field(init=False)
    tiers: TierLines = field(init=False)

    def __post_init__(self) -> None:
        self.names = model_names(self.config)
        self.ended = Ended(self.metrics, self.access)
        self.history = History(self.config.tiers, self._engines(), self.clock, self.wall)
        self.fleet.movers.append(lambda: self.history.fit(self._engines()))
        self.slots = SlotLines(self.store, self.config.limits.waiting)
        self.tiers = TierLines(self.fleet, self.config.limits.waiting)

    def _engines(self) -> list[str]:
        return [engine.spec.name for engine in self.fleet.engines]


def model_names(config: Config) -> dict[str, str | None]:
    """The names that applications may ask for, each with the tier that it pins, None where it is routed."""
    return {config.model: None, **{f"{config.model}:{tier}": tier for tier in config.tiers}}
