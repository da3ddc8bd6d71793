from __future__ import annotations

from collections.abc import Callable

import pytest

from policies.units import Rate, count, duration, rate, share, size


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (duration, "250ms", 0.25),
        (duration, "20s", 20.0),
        (duration, "1.5m", 90.0),
        (duration, "1h", 3600.0),
        (size, 65536, 65536),
        (size, "64KiB", 65536),
        (size, "10MiB", 10 << 20),
        (size, "1GB", 10**9),
        (count, 32, 32),
        (count, "1.5k", 1500),
        (rate, "600/min", Rate(600, 60.0)),
        (rate, "200k/min", Rate(200_000, 60.0)),
        (rate, "1M/day", Rate(1_000_000, 86400.0)),
        (rate, "100/30s", Rate(100, 30.0)),
        (rate, "2M / 7d", Rate(2_000_000, 604800.0)),
        (rate, "2M/week", Rate(2_000_000, 604800.0)),
        (share, "20%", 0.2),
        (share, 0.5, 0.5),
        (share, 1, 1.0),
    ],
)
def test_quantities(parse: Callable[[object], object], text: object, expected: object) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("parse", "text", "hint"),
    [
        (duration, 20, "20s"),
        (duration, "20", "20s"),
        (duration, "-1s", "20s"),
        (size, "10mb", "10MiB"),
        (size, True, "10MiB"),
        (count, 1.5, "4k"),
        (count, "x", "4k"),
        (count, -1, "from 0 on"),
        (count, 10**19, "not a whole number"),
        (count, "1001G", "1000G is the most"),
        (rate, "1001G/min", "1000G is the most"),
        (rate, "600", "600/min"),
        (rate, "0/min", "600/min"),
        (rate, "10/0s", "100/30s"),
        (rate, "1/fortnight", "600/min"),
        (share, "120%", "20%"),
        (share, 20, "20%"),
        (share, True, "20%"),
    ],
)
def test_refusals_show_the_right_form(parse: Callable[[object], object], text: object, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        parse(text)
