from __future__ import annotations

from datetime import UTC, datetime

import pytest

from policies.times import Window, clock, days, inside


def held(window: Window, when: str) -> bool:
    return inside(window)(datetime.fromisoformat(when).replace(tzinfo=UTC).timestamp())


WORK = Window(8 * 60, 18 * 60, days("mon-fri"))
NIGHT = Window(22 * 60, 6 * 60, days("fri"))


@pytest.mark.parametrize(
    ("window", "when", "inside_"),
    [
        (WORK, "2026-11-30T08:00", True),  # a Monday
        (WORK, "2026-11-30T07:59", False),
        (WORK, "2026-11-30T17:59:59", True),
        (WORK, "2026-11-30T18:00", False),
        (WORK, "2026-11-29T12:00", False),
        (NIGHT, "2026-12-04T22:00", True),  # a Friday
        (NIGHT, "2026-12-05T05:59", True),
        (NIGHT, "2026-12-05T06:00", False),
        (NIGHT, "2026-12-05T22:00", False),
        (NIGHT, "2026-12-04T05:00", False),
        (Window(days=days("sun")), "2026-11-29T23:59:59", True),
        (Window(days=days("sun")), "2026-11-30T00:00", False),
    ],
)
def test_windows(window: Window, when: str, inside_: bool) -> None:
    assert held(window, when) is inside_


def test_a_zone_keeps_its_summer_time() -> None:
    berlin = Window(8 * 60, 9 * 60, zone="Europe/Berlin")
    assert held(berlin, "2026-01-15T07:30")
    assert not held(berlin, "2026-01-15T06:30")
    assert held(berlin, "2026-07-15T06:30")


def test_spans_of_days() -> None:
    assert days("mon") == {0}
    assert days("sat-mon") == {5, 6, 0}
    assert days("mon-sun") == set(range(7))


@pytest.mark.parametrize("value", ["8", 8, "24:01", "12:60", "", None, "8:00 "])
def test_what_is_no_time_of_day(value: object) -> None:
    with pytest.raises(ValueError, match="time of day"):
        clock(value)
