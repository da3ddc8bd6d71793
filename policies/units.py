"""Quantities as operators write them: `20s`, `10MiB`, `200k/min`, `20%`.

Each parser takes what YAML made of the text and raises ValueError with a message that shows the right form.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
PERIODS = {
    **dict.fromkeys(("s", "second"), 1.0),
    **dict.fromkeys(("m", "min", "minute"), 60.0),
    **dict.fromkeys(("h", "hour"), 3600.0),
    **dict.fromkeys(("d", "day"), 86400.0),
    **dict.fromkeys(("w", "week"), 604800.0),
}
BYTES = {"": 1, "B": 1, "kB": 10**3, "KiB": 1 << 10, "MB": 10**6, "MiB": 1 << 20, "GB": 10**9, "GiB": 1 << 30}
COUNTS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9}

MOST = 10**12
"""The largest count: Redis tells what is left of a limit in millionths, as an integer of 64 bits."""

_NUMBER_UNIT = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([A-Za-z]*)\s*")
_RATE = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([kKMG]?)\s*/\s*([0-9]{0,6})\s*([a-z]+)\s*")
_PERCENT = re.compile(r"\s*([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*%\s*")


@dataclass(frozen=True, slots=True)
class Rate:
    """`amount` (requests or tokens) in each `seconds`."""

    amount: int
    seconds: float

    @property
    def per_second(self) -> float:
        return self.amount / self.seconds


def duration(value: object) -> float:
    """Seconds of `250ms`, `20s`, `5m` (or `5min`), `1h`, `1d`."""
    match = _NUMBER_UNIT.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in SECONDS:
        raise ValueError(f"`{_shown(value)}` is not a duration: write 250ms, 20s, 5m or 1h")
    return float(match[1]) * SECONDS[match[2]]


def size(value: object) -> int:
    """Bytes of `1048576`, `64KiB`, `10MiB`, `1GB`."""
    match = _NUMBER_UNIT.fullmatch(_text(value))
    if match is None or match[2] not in BYTES:
        raise ValueError(f"`{_shown(value)}` is not a size: write 65536, 64KiB or 10MiB")
    return round(float(match[1]) * BYTES[match[2]])


def count(value: object) -> int:
    """A whole number, `32` or `4k`."""
    match = _NUMBER_UNIT.fullmatch(_text(value))
    number = float(match[1]) * COUNTS[match[2]] if match is not None and match[2] in COUNTS else 0.5
    if not number.is_integer():
        raise ValueError(f"`{_shown(value)}` is not a whole number from 0 on: write 32, 4k or 1M")
    return int(_bounded(number, value))


def rate(value: object) -> Rate:
    """`600/min`, `200k/min`, `10/s`, `1M/day`, `100/30s`, `2M/7d`."""
    match = _RATE.fullmatch(value) if isinstance(value, str) else None
    amount = float(match[1]) * COUNTS[match[2]] if match is not None else 0.0
    periods = int(match[3] or 1) if match is not None else 0
    if match is None or match[4] not in PERIODS or periods < 1 or amount < 1 or not amount.is_integer():
        raise ValueError(f"`{_shown(value)}` is not a rate: write 10/s, 600/min, 100/30s, 5k/hour or 1M/day")
    return Rate(int(_bounded(amount, value)), periods * PERIODS[match[4]])


def share(value: object) -> float:
    """0..1, of `20%` or `0.2`."""
    if isinstance(value, str) and (match := _PERCENT.fullmatch(value)) is not None:
        number = float(match[1]) / 100
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
    else:
        number = -1.0
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"`{_shown(value)}` is not a share: write 20% or 0.2")
    return number


def _bounded(number: float, value: object) -> float:
    if number > MOST:
        raise ValueError(f"`{_shown(value)}` is too large: {MOST // COUNTS['G']}G is the most")
    return number


def _text(value: object) -> str:
    return str(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else ""


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
