"""Metrics of several processes as one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge

from gateway.telemetry.counters import Counter, Histogram
from gateway.telemetry.output import pieces
from gateway.telemetry.series import Families, families, lasting, merged, scrape

counts = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(0, 1000))


def process(counted: dict[str, int], gauges: dict[str, float] | None = None) -> Families:
    """What a process has counted by label, and its gauges by name."""
    registry = CollectorRegistry()
    counter = Counter("dualgauge_requests", "text", ("rule",))
    histogram = Histogram("dualgauge_request_seconds", "text", ("rule",), bounds=(1.0, 2.0))
    for label, count in counted.items():
        counter.labels(label).add(count)
        histogram.labels(label).observe(count)
    registry.register(counter)
    registry.register(histogram)
    for name, value in (gauges or {}).items():
        Gauge(name, "text", registry=registry).set(value)
    return families(registry)


def values(some: Families, name: str) -> dict[str, float]:
    return {
        dict(point.labels).get("rule", ""): point.value
        for family in some
        for point in family.points
        if point.name == name
    }


@given(st.lists(counts, min_size=1), st.lists(counts), st.lists(counts))
def test_what_is_counted_is_the_sum_over_all_that_have_been(
    serving: list[dict[str, int]], leaving: list[dict[str, int]], ended: list[dict[str, int]]
) -> None:
    past: Families = []
    for one in ended:
        past = lasting(past, process(one))
    found = merged(list(map(process, serving)), list(map(process, leaving)), past)
    every = [*serving, *leaving, *ended]
    expected = {
        label: sum(one.get(label, 0) for one in every) for label in {label for one in every for label in one}
    }
    assert values(found, "dualgauge_requests_total") == expected
    observed = values(found, "dualgauge_request_seconds_count")
    assert observed == {label: sum(label in one for one in every) for label in expected}


@given(st.lists(counts, min_size=2))
def test_a_process_that_ends_takes_nothing_away(some: list[dict[str, int]]) -> None:
    before = merged(list(map(process, some)))
    first, *others = map(process, some)
    after = merged(others, [], lasting([], first))
    assert values(before, "dualgauge_requests_total") == values(after, "dualgauge_requests_total")


def test_a_gauge_is_summed_only_where_each_has_a_share_of_it() -> None:
    gauges = {"dualgauge_leases": 2.0, "dualgauge_store_up": 1.0, "dualgauge_engine_running": 5.0}
    others = {"dualgauge_leases": 3.0, "dualgauge_store_up": 0.0, "dualgauge_engine_running": 4.0}
    found = merged([process({}, gauges), process({}, others)])
    shown = {family.name: family.points[0].value for family in found if family.kind == "gauge"}
    assert shown == {"dualgauge_leases": 5.0, "dualgauge_store_up": 0.0, "dualgauge_engine_running": 5.0}


def test_who_leaves_counts_with_its_share_alone() -> None:
    gauges = {"dualgauge_leases": 2.0, "dualgauge_store_up": 0.0}
    found = merged([process({}, {"dualgauge_leases": 1.0, "dualgauge_store_up": 1.0})], [process({}, gauges)])
    shown = {family.name: family.points[0].value for family in found if family.kind == "gauge"}
    assert shown == {"dualgauge_leases": 3.0, "dualgauge_store_up": 1.0}


def test_gauges_of_ended_processes_are_forgotten() -> None:
    past = lasting([], process({"a": 1}, {"dualgauge_leases": 2.0}))
    assert [family.name for family in past] == ["dualgauge_requests", "dualgauge_request_seconds"]


def test_the_latest_exemplar_is_shown() -> None:
    parts = []
    for trace, at in (("old", 1.0), ("new", 2.0)):
        registry = CollectorRegistry()
        histogram = Histogram("dualgauge_request_seconds", "text", bounds=(1.0,))
        histogram.labels().observe(0.5)
        histogram.labels().show(0.5, trace, at)
        registry.register(histogram)
        parts.append(families(registry))
    body, _ = scrape(merged(parts), "application/openmetrics-text; version=1.0.0")
    assert b'trace_id="new"' in body
    assert b'trace_id="old"' not in body


@given(st.lists(st.binary(max_size=9000).map(lambda data: data.replace(b"\n", b".") + b"\n")))
def test_a_line_of_a_log_is_written_in_one_piece(lines: list[bytes]) -> None:
    found = list(pieces(b"".join(lines)))
    assert b"".join(found) == b"".join(lines)
    assert all(piece.endswith(b"\n") for piece in found)
    assert all(len(piece) <= 4096 or piece.count(b"\n") == 1 for piece in found)
