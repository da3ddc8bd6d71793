"""Windows of time: hours of a day, days of the week, in a time zone. The clock is a fact of the request."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from policies.document import unknown

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
MIDNIGHT = 24 * 60
_CLOCK = re.compile(r"([01]?[0-9]|2[0-3]):([0-5][0-9])|(24):00")


@dataclass(frozen=True, slots=True)
class Window:
    """From `begin` to `end`, in minutes of the day; `end` itself is outside.

    Where `end` is not after `begin` the window goes over midnight; `days` (0 is Monday) are those on which it
    begins.
    """

    begin: int = 0
    end: int = MIDNIGHT
    days: frozenset[int] = frozenset(range(7))
    zone: str = "UTC"

    def __str__(self) -> str:
        days = "" if len(self.days) == 7 else " ".join(DAYS[day] for day in sorted(self.days)) + " "
        return f"{days}{_shown(self.begin)}-{_shown(self.end)} {self.zone}"


def clock(value: object) -> int:
    """Minutes of the day, of `8:30` or `24:00`."""
    match = _CLOCK.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"`{value}` is not a time of day: write 08:00 or 17:30")
    return MIDNIGHT if match[3] else int(match[1]) * 60 + int(match[2])


def days(value: object) -> frozenset[int]:
    """Days of the week, of `sat` or of a span, `mon-fri`."""
    if not isinstance(value, str):
        raise ValueError("write a day (`sat`), a span (`mon-fri`) or a list of them")
    first, _, last = value.partition("-")
    for day in (first, last or first):
        if day not in DAYS:
            raise ValueError(unknown("day", day, DAYS))
    begin, end = DAYS.index(first), DAYS.index(last or first)
    return frozenset((begin + step) % 7 for step in range((end - begin) % 7 + 1))


def zone(name: str) -> tzinfo:
    """A time zone by its name in the IANA database. Raises ValueError."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        near = unknown("time zone", name, available_timezones())
        message = near if len(near) < 200 else f"unknown time zone `{name}`: write it as Europe/Berlin"
        raise ValueError(message) from None


def inside(window: Window) -> Callable[[float], bool]:
    """A test of Unix times in seconds."""
    begin, end, on, tz = window.begin, window.end, window.days, zone(window.zone)

    def test(time: float) -> bool:
        now = datetime.fromtimestamp(time, tz)
        minute, day = now.hour * 60 + now.minute, now.weekday()
        if begin < end:
            return begin <= minute < end and day in on
        return (minute >= begin and day in on) or (minute < end and (day - 1) % 7 in on)

    return test


def _shown(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"
