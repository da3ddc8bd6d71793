"""What a policy would gain on a decision log, by the speeds that were measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engines.bench.configurations import EXACT, FAST
from engines.bench.results import Gain, Part, Results
from gateway.telemetry.decision_files import lines
from policies.logged import decode
from policies.policy import Policy
from policies.replay import Load, Replay


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of engines for the tokens of a log at one concurrency: all of them on `exact`, and what the
    policy gives to each."""

    level: int
    all_exact: float
    exact: float
    fast: float

    @property
    def engine_time(self) -> float:
        """Of both engines together, as a part of all on the 16-bit one."""
        return (self.exact + self.fast) / self.all_exact

    @property
    def finished(self) -> float:
        """Until both are done where neither slows the other, as a part of all on the 16-bit one."""
        return max(self.exact, self.fast) / self.all_exact


def gain(policy: Policy, files: list[Path]) -> Gain:
    """The decisions of the files made again."""
    replay, bad = Replay(policy), 0
    for placed in lines(files, lambda _: None):
        try:
            if placed.data is None:
                raise ValueError(placed.why)
            replay.feed(decode(placed.data))
        except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
            bad += 1
    tiers: dict[str, Load] = {}
    for way, load in replay.ways.items():
        tiers[way.new_tier] = tiers.get(way.new_tier, Load()) + load
    return Gain(
        policy=Path(policy.file).stem,
        decisions=replay.decisions,
        tiers={tier: _part(load) for tier, load in sorted(tiers.items())},
        pinned=_part(replay.pinned),
        undecided=_part(replay.undecided),
        bad=bad,
    )


def _part(load: Load) -> Part:
    return Part(load.requests, load.tokens)


def estimates(results: Results) -> Iterator[Estimate]:
    """By concurrency, where both engines were measured and every tier of the log is one of theirs."""
    found, exact, fast = results.gain, results.of(EXACT), results.of(FAST)
    if found is None or exact is None or fast is None or exact.tier == fast.tier:
        return
    tokens = {tier: part.tokens for tier, part in found.tiers.items()}
    total = sum(tokens.values())
    if not total or tokens.keys() - {exact.tier, fast.tier}:
        return
    for level in sorted(exact.speeds.keys() & fast.speeds.keys()):
        slow, quick = exact.speeds[level].total, fast.speeds[level].total
        if slow and quick:
            yield Estimate(
                level, total / slow, tokens.get(exact.tier, 0) / slow, tokens.get(fast.tier, 0) / quick
            )
