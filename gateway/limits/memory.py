"""The store of a single process: token buckets in memory. Fails with its process, and forgets with it.

A bucket holds at most its limit, starts full and refills continuously (the "token bucket" of RFC 2697,
section 3, with one rate and one burst); a settlement may leave it in debt, which the refill pays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from gateway.errors import LimitExceeded
from gateway.limits import Ask, duration
from policies.units import Rate

HEADER_LINES = {
    kind: b"".join(
        b"x-ratelimit-%b-%b: %%%b\r\n" % (what, kind.encode(), form)
        for what, form in ((b"limit", b"d"), (b"remaining", b"d"), (b"reset", b"b"))
    )
    for kind in ("requests", "tokens")
}


class Bucket:
    """`level` at time `at` (seconds); reads bring both up to date."""

    __slots__ = ("at", "level", "per_second", "rate")

    def __init__(self, rate: Rate, now: float) -> None:
        self.rate = rate
        self.per_second = rate.per_second
        self.level = float(rate.amount)
        self.at = now

    def refill(self, now: float) -> float:
        if now > self.at:
            grown = self.level + (now - self.at) * self.per_second
            self.level = min(float(self.rate.amount), grown)
            self.at = now
        return self.level

    def put(self, amount: float) -> None:
        self.level = min(float(self.rate.amount), self.level + amount)


class _Account:
    """One tenant's buckets under one plan, and its requests in flight."""

    __slots__ = ("buckets", "in_flight")

    def __init__(self) -> None:
        self.buckets: dict[str, Bucket] = {}
        self.in_flight = 0

    def bucket(self, kind: str, rate: Rate, now: float) -> Bucket:
        bucket = self.buckets.get(kind)
        if bucket is None:
            bucket = self.buckets[kind] = Bucket(rate, now)
        elif bucket.rate != rate:
            # The plan was edited: what is left keeps its share of the new limit.
            bucket.level = bucket.refill(now) / bucket.rate.amount * rate.amount
            bucket.rate, bucket.per_second = rate, rate.per_second
        return bucket


class MemoryLease:
    __slots__ = ("_account", "_done", "_reserved", "_store", "headers")

    def __init__(
        self, store: MemoryStore, account: _Account, reserved: list[tuple[Bucket, int]], headers: bytes
    ) -> None:
        self._store = store
        self._account = account
        self._reserved = reserved
        self._done = False
        self.headers = headers

    def settle(self, prompt: int, completion: int) -> None:
        if not self._done:
            self._finish(prompt + completion)

    def refund(self) -> None:
        if not self._done:
            self._finish(0)

    def _finish(self, used: int) -> None:
        self._done = True
        self._account.in_flight -= 1
        self._store.leases -= 1
        now = self._store.clock()
        for bucket, amount in self._reserved:
            bucket.refill(now)
            bucket.put(amount - used)


class MemoryStore:
    """`clock` is monotonic, in seconds. `leases` counts what is reserved and not yet settled."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.leases = 0
        self._accounts: dict[str, _Account] = {}

    def in_use(self) -> int:
        return self.leases

    def up(self) -> bool:
        return True  # it lives and ends with the process

    def fallbacks(self) -> int:
        return 0  # it cannot fail, so nothing ever takes its place

    def usage(self, now: float) -> Mapping[str, Mapping[str, float]]:
        return {
            tenant: {
                "concurrent": account.in_flight,
                **{kind: bucket.refill(now) for kind, bucket in account.buckets.items()},
            }
            for tenant, account in self._accounts.items()
        }

    async def reserve(self, ask: Ask, now: float) -> MemoryLease:
        plan = ask.plan
        account = self._accounts.get(ask.tenant)
        if account is None:
            account = self._accounts[ask.tenant] = _Account()
        if plan.concurrent is not None and account.in_flight >= plan.concurrent:
            raise LimitExceeded(
                f"{plan.concurrent} requests of this key are running, its plan `{plan.name}` allows no more: "
                "wait for one to end",
                code="concurrency_exceeded",
                retry_after=1,
            )
        wanted: list[tuple[str, Bucket, int]] = []
        if plan.requests is not None:
            wanted.append(("requests", account.bucket("requests", plan.requests, now), 1))
        if plan.tokens is not None:
            bucket = account.bucket("tokens", plan.tokens, now)
            wanted.append(("tokens", bucket, _tokens(ask, plan.tokens)))
        rate = plan.tier_tokens.get(ask.tier)
        if rate is not None:
            kind = f"{ask.tier}_tokens"
            wanted.append((kind, account.bucket(kind, rate, now), _tokens(ask, rate)))
        for kind, bucket, amount in wanted:
            _check(kind, bucket, amount, now, plan.name)
        for _, bucket, amount in wanted:
            bucket.level -= amount
        account.in_flight += 1
        self.leases += 1
        reserved = [(bucket, amount) for kind, bucket, amount in wanted if kind != "requests"]
        return MemoryLease(self, account, reserved, _headers(wanted))


def _tokens(ask: Ask, rate: Rate) -> int:
    """A request that names no bound reserves its plan's, and never so much that the whole limit is gone."""
    if ask.output is not None:
        return ask.prompt + ask.output
    room = max(1, rate.amount // 2 - ask.prompt)
    return ask.prompt + min(ask.plan.output, room)


def _check(kind: str, bucket: Bucket, amount: int, now: float, plan: str) -> None:
    limit = bucket.rate
    if amount > limit.amount:
        raise LimitExceeded(
            f"this request reserves {amount} {kind.replace('_', ' ')}, and plan `{plan}` allows "
            f"{limit.amount} in {limit.seconds:g} s: ask for fewer tokens (max_tokens)",
            code="request_exceeds_limit",
        )
    level = bucket.refill(now)
    if level < amount:
        wait = (amount - level) / bucket.per_second
        raise LimitExceeded(
            f"plan `{plan}` allows {limit.amount} {kind.replace('_', ' ')} in {limit.seconds:g} s: "
            f"{amount} needed, {max(0, math.floor(level))} left; try again in {duration(wait)}",
            retry_after=wait,
        )


def _headers(wanted: list[tuple[str, Bucket, int]]) -> bytes:
    lines = b""
    for kind, bucket, _ in wanted:
        form = HEADER_LINES.get(kind)
        if form is not None:
            amount, level = bucket.rate.amount, bucket.level
            reset = duration((amount - level) / bucket.per_second).encode()
            lines += form % (amount, max(0, int(level)), reset)
    return lines
