import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.figures import (
    LOADED,
    Spread,
    Stat,
    load_of,
    memory_of,
    merged,
    ratios,
    slope,
    slope_error,
    stat_of,
    table,
)

SEEN = {"requests": 100, "us": 2_000_000, "p50": 30, "p99": 70, "errors": {"read": 0, "status": 3}}


def test_a_spread_is_median_least_and_most() -> None:
    assert Spread.of([5, 1, 2]) == Spread(2, 1, 5)


def test_a_spread_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no round"):
        Spread.of([])


def test_a_spread_of_one_value_shows_no_range() -> None:
    assert Spread.of([1234.56]).text() == "1,234.6"


def test_a_spread_shows_least_and_most() -> None:
    assert Spread.of([1, 2, 3]).text(0) == "2 (1 to 3)"


def test_ratios_are_taken_round_by_round() -> None:
    # The machine was twice as slow in the second round: the ratio is the same.
    assert ratios([10, 20], [5, 10]) == Spread(2, 2, 2)


@pytest.mark.parametrize("theirs", [[1.0], [1.0, 0.0]])
def test_ratios_want_as_many_rounds_and_no_zero(theirs: list[float]) -> None:
    with pytest.raises(ValueError, match="rounds"):
        ratios([1, 2], theirs)


@given(
    st.floats(-100, 100),
    st.floats(-100, 100),
    st.lists(st.integers(-1000, 1000), min_size=2, max_size=50, unique=True),
)
def test_the_slope_of_a_line_is_its_own(rise: float, start: float, xs: list[int]) -> None:
    assert slope([(x, start + rise * x) for x in xs]) == pytest.approx(rise, abs=1e-6)


@pytest.mark.parametrize("points", [[], [(1.0, 2.0)], [(1.0, 2.0), (1.0, 3.0)]])
def test_a_slope_needs_two_times(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="two times"):
        slope(points)


def test_a_line_has_no_slope_error() -> None:
    assert slope_error([(0, 0), (1, 2), (2, 4)]) == pytest.approx(0)


def test_the_slope_error_is_that_of_least_squares() -> None:
    # Residuals -1, 2, -1: 6 over one degree of freedom, over a spread of x of 2.
    assert slope_error([(0, 0), (1, 3), (2, 0)]) == pytest.approx(3**0.5)


def test_the_line_of_wrk_is_found_in_its_output() -> None:
    load = load_of(f"Running 2s test\n{LOADED}{json.dumps(SEEN)}\nmore")
    assert (load.requests, load.rate, load.p50, load.p99) == (100, 50, 30, 70)


def test_only_errors_that_happened_are_kept() -> None:
    assert load_of(LOADED + json.dumps(SEEN)).errors == {"status": 3}


@pytest.mark.parametrize("output", ["", "unable to connect to 127.0.0.1:9\n"])
def test_a_wrk_that_failed_is_told(output: str) -> None:
    with pytest.raises(ValueError, match=output.strip() or "printed nothing"):
        load_of(output)


def test_a_process_may_be_named_like_fields() -> None:
    line = "42 (a ) S 7) R 1 42 40 0 -1 4194304 9 9 9 9 100 20 3 4 20 0 1 0 5"
    assert stat_of(line) == Stat(session=40, ticks=127)


def test_memory_is_read_in_mib() -> None:
    assert memory_of("00-ff ---p 0 [rollup]\nRss:  2048 kB\nPss:  1024 kB\nPss_Anon: 9 kB\n") == (2, 1)


def test_memory_that_is_not_told_is_missed() -> None:
    with pytest.raises(ValueError, match="Pss"):
        memory_of("Rss: 2048 kB\n")


def test_a_table_aligns_figures_to_the_right() -> None:
    assert table(["", "a"], [("x", 1)]) == "|  | a |\n| --- | ---: |\n| x | 1 |"


def test_a_part_takes_the_place_of_its_older_self() -> None:
    assert merged({"b": {"x": 1}, "c": {}}, "b", {"x": 2}) == {"b": {"x": 2}, "c": {}}
