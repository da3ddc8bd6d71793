"""Which engine takes a request, whatever has happened before: properties that hold after any history."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engines import affinity
from engines.breaker import LONGEST, Breaker
from engines.fleet import Engine, Fleet
from engines.spec import EngineSpec

TIERS = ("fast", "exact")


def fleet(fast: int = 1, exact: int = 0, *, seed: int = 0) -> Fleet:
    """Ready engines, fast-0 ... and exact-0 ..."""
    specs = [
        EngineSpec(f"{tier}-{index}", tier, "external", f"http://h:{index + 1}", "m", "awq")
        for tier, count in zip(TIERS, (fast, exact), strict=True)
        for index in range(count)
    ]
    some = Fleet(specs, TIERS, random.Random(seed))
    for engine in some.engines:
        some.set_state(engine, "ready", "the test says so")
    return some


def loaded(engine: Engine, running: int = 0, waiting: int = 0, kv: float | None = None) -> Engine:
    engine.running, engine.waiting, engine.kv = running, waiting, kv
    return engine


# least loaded, of two drawn by chance


@pytest.mark.parametrize(
    ("lighter", "heavier"),
    [
        ({"running": 3}, {"running": 4}),
        ({"running": 3}, {"waiting": 1}),
        ({"running": 1, "kv": 0.2}, {"running": 1, "kv": 0.3}),
        ({"running": 3}, {"kv": 1.0}),
        ({"running": 9, "waiting": 1}, {"running": 1, "waiting": 4}),
    ],
)
def test_of_two_engines_the_less_loaded_takes_it(lighter: dict[str, Any], heavier: dict[str, Any]) -> None:
    some = fleet(2)
    first, second = some.engines
    loaded(first, **heavier)
    loaded(second, **lighter)
    assert {some.pick("fast") for _ in range(20)} == {second}


def test_of_two_as_loaded_the_first_takes_it() -> None:
    some = fleet(2)
    assert {some.pick("fast") for _ in range(20)} == {some.engines[0]}


def test_each_pair_of_engines_is_drawn() -> None:
    some = fleet(4)
    taken = Counter(some.pick("fast") for _ in range(6000))
    for engine, pairs in zip(some.engines, (3, 2, 1, 0), strict=True):
        assert abs(taken[engine] - 1000 * pairs) < 200


def test_two_choices_keep_engines_nearly_even_on_old_figures() -> None:
    some = fleet(8)
    for _ in range(800):
        engine = some.pick("fast")
        assert engine is not None
        engine.in_flight += 1
    have = [engine.in_flight for engine in some.engines]
    assert max(have) - min(have) <= 6


def test_the_most_loaded_of_several_takes_nothing() -> None:
    some = fleet(5)
    loaded(some.engines[2], running=1)
    assert some.engines[2] not in {some.pick("fast") for _ in range(200)}


def test_what_came_and_went_since_the_figures_counts() -> None:
    engine = loaded(fleet().engines[0], running=10, waiting=2)
    engine.in_flight = engine.sampled_in_flight = 4
    assert engine.requests() == 12
    engine.in_flight = 7
    assert engine.requests() == 15
    engine.in_flight = 1
    assert engine.requests() == 9


def test_one_whose_last_probe_failed_is_left_for_a_better_one() -> None:
    some = fleet(2)
    some.engines[0].failures = 1
    loaded(some.engines[1], running=50)
    assert some.pick("fast") is some.engines[1]
    assert some.pick("fast", [some.engines[1]]) is some.engines[0]


# busy


def test_a_wait_is_predicted_from_the_queue_and_the_pace() -> None:
    engine = loaded(fleet().engines[0], running=4, waiting=6)
    assert engine.predicted_wait() is None
    engine.progress.finishing.add(10, 5, 5)
    assert engine.predicted_wait() == pytest.approx(3.0)
    assert engine.over(8, 0.95, 3.5) is False
    assert engine.over(8, 0.95, 2.9) is True
    assert engine.over(8, 0.95) is False


def test_nothing_waits_where_there_is_no_queue_and_room_in_the_cache() -> None:
    engine = loaded(fleet().engines[0], running=4, kv=0.5)
    assert engine.predicted_wait(0.95) == 0.0
    engine.progress.finishing.add(10, 5, 5)
    engine.kv = 0.97
    assert engine.predicted_wait(0.95) == pytest.approx(0.5)


def test_an_unknown_pace_is_no_reason_to_call_an_engine_busy() -> None:
    some = fleet()
    loaded(some.engines[0], running=4, waiting=6)
    assert not some.busy("fast", 8, 0.95, 0.001)


def test_a_tier_waits_as_long_as_its_quickest_engine() -> None:
    some = fleet(2)
    for engine, rate in zip(some.engines, (1, 4), strict=True):
        loaded(engine, running=1, waiting=8)
        engine.progress.finishing.add(rate, 1, 1)
    assert some.predicted_wait("fast") == pytest.approx(2.0)
    assert some.busy("fast", 99, 1.0, 1.9)
    assert not some.busy("fast", 99, 1.0, 2.1)


# requests that fail


def test_failed_requests_in_a_row_make_an_engine_suspect() -> None:
    some = fleet(2)
    engine = some.engines[0]
    for _ in range(2):
        some.faulted(engine, "500")
    assert engine.ready
    some.faulted(engine, "500")
    assert engine.state == "suspect"
    assert "3 requests failed in a row: 500" in engine.reason


def test_one_that_succeeds_between_them_forgives_them() -> None:
    some = fleet(2)
    engine = some.engines[0]
    for _ in range(9):
        some.faulted(engine, "500")
        some.faulted(engine, "500")
        some.succeeded(engine)
    assert engine.ready


def test_the_last_ready_engine_of_a_tier_stays() -> None:
    some = fleet(2, 1)
    first, second, _ = some.engines
    some.set_state(second, "down", "killed")
    for _ in range(20):
        some.faulted(first, "500")
    assert some.pick("fast") is first


def test_one_that_cools_serves_where_the_others_are_gone() -> None:
    some = fleet(2)
    first, second = some.engines
    for _ in range(3):
        some.faulted(first, "500")
    assert {some.pick("fast") for _ in range(9)} == {second}
    some.set_state(second, "down", "killed")
    assert some.pick("fast") is first
    assert "fast" not in some.missing()


def test_a_suspect_engine_is_tried_with_one_request_at_a_time() -> None:
    some = fleet(2)
    first, second = some.engines
    for _ in range(3):
        some.faulted(first, "500")
    first.breaker.probed()
    assert some.pick("fast") is first
    first.breaker.trial = "somebody"
    assert some.pick("fast") is second
    some.succeeded(first)
    assert first.ready


def test_a_trial_that_fails_doubles_the_probes_until_the_next() -> None:
    breaker = Breaker()
    waits = []
    for _ in range(8):
        breaker.trip()
        breaker.trip()  # another of the requests that were under way then
        count = 0
        while not breaker.half_open:
            breaker.probed()
            count += 1
        waits.append(count)
    assert waits == [1, 2, 4, 8, 16, 32, LONGEST, LONGEST]
    breaker.close()
    breaker.trip()
    breaker.probed()
    assert breaker.half_open


def test_one_that_cannot_be_reached_is_no_last_resort() -> None:
    some = fleet(2)
    first, second = some.engines
    for _ in range(3):
        some.faulted(first, "500")
    some.set_state(second, "down", "killed")
    told: list[Engine] = []
    some.doubters.append(told.append)
    some.failed(first, "refused")
    assert some.pick("fast") is None
    assert told == [first]
    assert some.missing() == {
        "fast": "fast-0: suspect, refused; fast-1: down, killed",
        "exact": "no engine is configured",
    }


# conversations

NAMES = st.lists(st.text("abcdefgh0123456789-", min_size=1, max_size=12), min_size=2, max_size=8, unique=True)
KEYS = st.integers(0, 2**48 - 1)


def named(names: list[str]) -> list[Engine]:
    return [Engine(EngineSpec(name, "fast", "external", "http://h:1", "m", "awq")) for name in names]


@given(NAMES, st.lists(KEYS, min_size=1, max_size=50), st.data())
def test_only_the_conversations_of_an_engine_that_goes_move(
    names: list[str], keys: list[int], data: st.DataObject
) -> None:
    some = named(names)
    gone = data.draw(st.sampled_from(some))
    rest = [engine for engine in some if engine is not gone]
    for key in keys:
        before = affinity.choose(some, key)
        after = affinity.choose(rest, key)
        assert after is before or before is gone


@given(NAMES, KEYS)
def test_the_order_of_engines_does_not_matter(names: list[str], key: int) -> None:
    forwards, backwards = named(names), named(names[::-1])
    assert affinity.choose(forwards, key).spec.name == affinity.choose(backwards, key).spec.name


@given(NAMES, st.lists(KEYS, min_size=1, max_size=300), st.integers(0, 3))
@settings(max_examples=60)
def test_no_engine_gets_more_than_its_bound(names: list[str], keys: list[int], distinct: int) -> None:
    some = named(names)
    for key in keys:
        engine = affinity.choose(some, key % (distinct + 1))
        engine.in_flight += 1
        total = sum(e.in_flight for e in some)
        assert engine.in_flight <= max(affinity.ALWAYS, math.ceil(affinity.SHARE * total / len(some)))


@given(NAMES, st.lists(st.integers(0, 40), min_size=8, max_size=8), KEYS)
def test_a_conversation_leaves_its_engine_only_above_the_bound(
    names: list[str], have: list[int], key: int
) -> None:
    some = named(names)
    own = affinity.choose(some, key)
    for engine, requests in zip(some, have, strict=False):
        engine.in_flight = requests
    most = affinity.bound(sum(e.in_flight for e in some), len(some))
    chosen = affinity.choose(some, key)
    assert chosen.in_flight < most
    assert (chosen is own) == (own.in_flight < most)


def test_conversations_are_spread_evenly() -> None:
    some = named([f"fast-{index}" for index in range(4)])
    rand = random.Random(1)
    taken = Counter(affinity.choose(some, rand.getrandbits(48)).spec.name for _ in range(8000))
    assert all(1800 < taken[engine.spec.name] < 2200 for engine in some)


def test_a_conversation_keeps_its_engine() -> None:
    some = fleet(3)
    for key in range(100):
        assert len({some.pick("fast", (), key) for _ in range(5)}) == 1


# after any history


class History(RuleBasedStateMachine):
    """Engines of two tiers, to which anything happens in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = fleet(3, 2)
        self.keys = random.Random(7)

    engines = st.integers(0, 4)

    @rule(index=engines, state=st.sampled_from(["starting", "ready", "suspect", "asleep", "down"]))
    def probed_to(self, index: int, state: Any) -> None:
        self.fleet.set_state(self.fleet.engines[index], state, "a probe")

    @rule(index=engines)
    def refuses(self, index: int) -> None:
        self.fleet.failed(self.fleet.engines[index], "refused")

    @rule(index=engines, held=st.booleans())
    def held(self, index: int, held: bool) -> None:
        self.fleet.hold(self.fleet.engines[index], "it drains" if held else "")

    @rule(index=engines)
    def good_probe(self, index: int) -> None:
        self.fleet.engines[index].breaker.probed()

    @rule(index=engines)
    def stalls(self, index: int) -> None:
        if self.fleet.engines[index].usable:
            self.fleet.stalled(self.fleet.engines[index], "no token")

    @rule(index=engines)
    def answers(self, index: int) -> None:
        self.fleet.succeeded(self.fleet.engines[index])

    @rule(index=engines, times=st.integers(1, 4))
    def faults(self, index: int, times: int) -> None:
        """What requests met never takes a tier's last ready engine away."""
        engines = self.fleet.tiers[self.fleet.engines[index].spec.tier]
        before = any(e.ready for e in engines)
        for _ in range(times):
            self.fleet.faulted(self.fleet.engines[index], "500")
        assert any(e.ready for e in engines) == before

    @rule(index=engines, trial=st.booleans())
    def tries(self, index: int, trial: bool) -> None:
        self.fleet.engines[index].breaker.trial = "somebody" if trial else None

    @rule(index=engines, failures=st.integers(0, 2), in_flight=st.integers(0, 30), running=st.integers(0, 30))
    def figures(self, index: int, failures: int, in_flight: int, running: int) -> None:
        engine = self.fleet.engines[index]
        engine.failures, engine.in_flight, engine.running = failures, in_flight, running

    @invariant()
    def a_pick_is_usable_and_of_its_tier(self) -> None:
        for tier, engines in self.fleet.tiers.items():
            for key in (None, self.keys.getrandbits(48)):
                tried: list[Engine] = []
                while (engine := self.fleet.pick(tier, tried, key)) is not None:
                    assert engine.usable
                    assert not engine.held
                    assert engine.state in ("ready", "suspect")
                    assert engine.spec.tier == tier
                    assert engine not in tried
                    tried.append(engine)
                assert all(e in tried for e in engines if e.ready)

    @invariant()
    def a_ready_engine_goes_before_one_that_cools(self) -> None:
        for tier, engines in self.fleet.tiers.items():
            picked = self.fleet.pick(tier)
            if picked is not None and not picked.ready and not picked.on_trial:
                assert not any(e.ready for e in engines)

    @invariant()
    def a_tier_is_missing_where_nothing_can_be_picked(self) -> None:
        for tier in TIERS:
            assert (tier in self.fleet.missing()) == (self.fleet.pick(tier) is None)


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
