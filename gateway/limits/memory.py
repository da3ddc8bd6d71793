"""The store of a single process: token buckets in memory. Fails with its process, and forgets with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

import msgspec

from gateway.limits import Ask, Ended, Held
from gateway.limits.course import Course, Meter, chart
from policies.units import Rate


class Bucket:
    """`level` at time `at` (seconds) of at most `amount`."""

    __slots__ = ("amount", "at", "level", "per_second", "rate")

    def __init__(self, rate: Rate, now: float) -> None:
        self.level = float(rate.amount)
        self.at = now
        self.rate = rate
        self.amount = float(rate.amount)
        self.per_second = rate.per_second

    def resize(self, rate: Rate, now: float) -> None:
        """The plan was edited: what is left keeps its share of the new limit."""
        self.refill(now)
        if rate.amount != self.rate.amount:
            self.level = self.level / self.amount * rate.amount
        self.rate, self.amount, self.per_second = rate, float(rate.amount), rate.per_second

    def refill(self, now: float) -> float:
        if now > self.at:
            level = self.level + (now - self.at) * self.per_second
            if level > self.amount:
                level = self.amount
            self.level = level
            self.at = now
        return self.level


class Holder:
    """What one tenant or organisation, or one model of theirs, has left, and its requests in flight."""

    __slots__ = ("buckets", "running")

    def __init__(self) -> None:
        self.buckets: dict[str, Bucket] = {}
        self.running = 0

    def bucket(self, meter: Meter, now: float) -> Bucket:
        bucket = self.buckets.get(meter.field)
        if bucket is None:
            bucket = self.buckets[meter.field] = Bucket(meter.rate, now)
        return bucket


class _Track:
    """A course with its buckets at hand: (bucket, rate, each, weight, saved)."""

    __slots__ = ("buckets", "course", "gates", "holders", "parts")

    def __init__(self, course: Course, holders: tuple[Holder, ...], now: float) -> None:
        self.course = course
        self.holders = holders
        self.gates = tuple(
            (holder, scope.concurrent, index)
            for index, (holder, scope) in enumerate(zip(holders, course.scopes, strict=True))
            if scope.concurrent is not None
        )
        self.parts = tuple(
            (holders[m.scope].bucket(m, now), m.rate, m.each, m.weight, m.saved) for m in course.meters
        )
        self.buckets = tuple(bucket for bucket, *_ in self.parts)


class MemoryLease:
    __slots__ = ("_open", "_store", "_tokens", "_track", "headers")

    def __init__(self, store: MemoryStore, track: _Track, tokens: int, headers: bytes) -> None:
        self._store = store
        self._track = track
        self._tokens = tokens
        self._open = True
        self.headers = headers

    def settle(self, prompt: int, completion: int, cached: int = 0, tier: str = "") -> None:
        if self._open:
            self._open = False
            self._store.end(self._track, self._tokens, prompt + completion, cached, tier)

    def refund(self) -> None:
        self.settle(0, 0)


class MemoryStore:
    """`clock` is monotonic, in seconds. `leases` counts what is reserved and not yet settled."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.leases = 0
        self._ended: Ended | None = None
        self._holders: dict[str, Holder] = {}
        self._tracks: dict[tuple[str, str, str, str], _Track] = {}

    def in_use(self) -> int:
        return self.leases

    def up(self) -> bool:
        return True  # it lives and ends with the process

    def fallbacks(self) -> int:
        return 0  # it cannot fail, so nothing ever takes its place

    def last_seen(self, ask: Ask) -> bytes:
        track, now = self._track(ask), self.clock()
        levels = [bucket.refill(now) / bucket.amount * rate.amount for bucket, rate, *_ in track.parts]
        return track.course.lines.render(levels)

    def on_end(self, hook: Ended) -> None:
        self._ended = hook

    def running(self) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    async def levels(self, holders: Sequence[Held]) -> Mapping[str, Mapping[str, float]]:
        usage = self.usage()
        return {held.name: usage.get(held.name.removeprefix("t:"), {}) for held in holders}

    def usage(self) -> Mapping[str, Mapping[str, float]]:
        """What each holder has left, by dimension, and its requests in flight."""
        now = self.clock()
        return {
            name.removeprefix("t:"): {
                "concurrent": holder.running,
                **{kind: bucket.refill(now) for kind, bucket in holder.buckets.items()},
            }
            for name, holder in self._holders.items()
        }

    def holder(self, name: str) -> Holder:
        holder = self._holders.get(name)
        if holder is None:
            holder = self._holders[name] = Holder()
        return holder

    def _track(self, ask: Ask) -> _Track:
        key = (ask.tenant, ask.tier, ask.model, ask.organisation)
        track = self._tracks.get(key)
        if track is None or not track.course.fits(ask):
            course = chart(ask)
            holders = tuple(self.holder(scope.name) for scope in course.scopes)
            track = self._tracks[key] = _Track(course, holders, self.clock())
        return track

    def reserve(self, ask: Ask) -> MemoryLease:
        track = self._track(ask)
        course = track.course
        now = self.clock()
        tokens = course.tokens(ask)
        fits = True
        left = []
        for bucket, rate, each, weight, _ in track.parts:
            if bucket.rate is not rate:
                bucket.resize(rate, now)
            level = bucket.refill(now) - (each + tokens * weight)
            left.append(level)
            if level < 0.0:
                fits = False
        for holder, concurrent, index in track.gates:
            if holder.running >= concurrent:
                raise course.slots_taken(index, [bucket.level for bucket in track.buckets])
        if not fits:
            refused = course.over_limit(tokens, [bucket.level for bucket in track.buckets])
            assert refused is not None
            raise refused
        for bucket, level in zip(track.buckets, left, strict=True):
            bucket.level = level
        for holder in track.holders:
            holder.running += 1
        self.leases += 1
        return MemoryLease(self, track, tokens, course.lines.render(left))

    def lower(self, ask: Ask, left: Sequence[float]) -> None:
        """No bucket of this request holds more than such a part of its limit."""
        now = self.clock()
        for (bucket, rate, *_), part in zip(self._track(ask).parts, left, strict=True):
            bucket.resize(rate, now)
            bucket.level = min(bucket.level, part * bucket.amount)

    def end(self, track: _Track, reserved: int, used: int, cached: int, tier: str) -> None:
        """Give back what was reserved, take what was used. Called once for each lease."""
        now = self.clock()
        course = track.course
        self.leases -= 1
        for holder in track.holders:
            holder.running -= 1
        if not tier or tier == course.ask.tier:
            for bucket, rate, _, weight, saved in track.parts:
                if weight:
                    _put(bucket, rate, reserved * weight - (used * weight - cached * saved), now)
        else:
            # First what was taken: what was refilled meanwhile must not be lost to a full bucket.
            moved = msgspec.structs.replace(course.ask, tier=tier)
            for bucket, rate, _, weight, saved in self._track(moved).parts:
                _put(bucket, rate, cached * saved - used * weight, now)
            for bucket, rate, _, weight, _ in track.parts:
                _put(bucket, rate, reserved * weight, now)
        if self._ended is not None:
            self._ended(course.scopes)


def _put(bucket: Bucket, rate: Rate, amount: float, now: float) -> None:
    """`rate` is the one that the amount was taken of: of an edited limit, the same share is meant."""
    if bucket.rate is not rate:
        amount *= bucket.amount / rate.amount
    level = bucket.refill(now) + amount
    if level > bucket.amount:
        level = bucket.amount
    bucket.level = level
