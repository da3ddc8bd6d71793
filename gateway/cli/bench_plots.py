"""Small charts as SVG: lines over concurrency, and bars. They follow the reader's light or dark colours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 76, 40
STYLE = """
.plot{font:12px system-ui,sans-serif}
.plot text{fill:#1f2937}.plot .dim{fill:#6b7280}.plot .grid{stroke:#e5e7eb}
.plot .head{font-weight:600;font-size:14px}
.plot .s0{stroke:#6b7280;fill:#6b7280}.plot .s1{stroke:#2563eb;fill:#2563eb}
.plot .s2{stroke:#c2570c;fill:#c2570c}.plot .s3{stroke:#0f766e;fill:#0f766e}
.plot .line{fill:none;stroke-width:2}.plot .faint{stroke-dasharray:4 4;opacity:.6}
@media (prefers-color-scheme:dark){
.plot text{fill:#e5e7eb}.plot .dim{fill:#9ca3af}.plot .grid{stroke:#374151}
.plot .s0{stroke:#9ca3af;fill:#9ca3af}.plot .s1{stroke:#7aa7ff;fill:#7aa7ff}
.plot .s2{stroke:#fb923c;fill:#fb923c}.plot .s3{stroke:#2dd4bf;fill:#2dd4bf}}
"""


@dataclass(frozen=True, slots=True)
class Series:
    """`place` is 0 to 3 and gives its colour and mark; `values` by concurrency, or by the name of a group.

    `faint`: a second line of the same, dashed.
    """

    name: str
    place: int
    values: Mapping[Any, float]
    faint: Mapping[int, float] = field(default_factory=dict)


def lines(title: str, unit: str, series: Sequence[Series]) -> str:
    """Over concurrency, both axes logarithmic."""
    levels = sorted({level for one in series for level in one.values})
    every = [value for one in series for of in (one.values, one.faint) for value in of.values() if value > 0]
    if not levels or not every:
        return ""
    low, high = _around(min(every), max(every))

    def across(level: float) -> float:
        span = math.log(levels[-1] / levels[0]) or 1.0
        return LEFT + 16 + (WIDTH - LEFT - RIGHT - 32) * math.log(level / levels[0]) / span

    def up(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * math.log(value / low) / math.log(high / low)

    parts = [_grid(up(tick), _number(tick)) for tick in _ticks(low, high)]
    parts += [_below(across(level), str(level)) for level in levels]
    parts.append(
        f'<text class="dim" x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">requests at a time</text>'
    )
    for one in series:
        for values, extra in ((one.faint, " faint"), (one.values, "")):
            points = [(across(at), up(values[at])) for at in sorted(values) if values[at] > 0]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline class="line s{one.place}{extra}" points="{path}"/>')
            if not extra:
                parts += [_mark(one.place, x, y) for x, y in points]
    return _whole(title, unit, series, parts)


def bars(title: str, unit: str, groups: Sequence[str], series: Sequence[Series]) -> str:
    """Side by side in each group, from zero."""
    every = [value for one in series for value in one.values.values()]
    if not every:
        return ""
    step = _step(max(every))
    high = math.ceil(max(every) / step) * step

    def up(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / high

    parts = [_grid(up(step * at), _number(step * at)) for at in range(round(high / step) + 1)]
    room = (WIDTH - LEFT - RIGHT) / len(groups)
    width = min(36.0, room * 0.8 / max(1, len(series)))
    for at, group in enumerate(groups):
        middle = LEFT + room * (at + 0.5)
        parts.append(_below(middle, escape(group)))
        shown = [one for one in series if group in one.values]
        start = middle - width * len(shown) / 2
        for place, one in enumerate(shown):
            value = one.values[group]
            x = start + width * place
            parts.append(
                f'<rect class="s{one.place}" x="{x + 1:.1f}" y="{up(value):.1f}" width="{width - 2:.1f}" '
                f'height="{HEIGHT - BOTTOM - up(value):.1f}"/>'
                f'<text x="{x + width / 2:.1f}" y="{up(value) - 4:.1f}" text-anchor="middle" font-size="10">'
                f"{_number(value)}</text>"
            )
    return _whole(title, unit, series, parts)


def _whole(title: str, unit: str, series: Sequence[Series], parts: Sequence[str]) -> str:
    keys = []
    for at, one in enumerate(series):
        # Two in a line, since a name takes up to half the width.
        x, y = LEFT + (WIDTH - LEFT) / 2 * (at % 2), 40 + 18 * (at // 2)
        keys.append(
            _mark(one.place, x + 5, y) + f'<text x="{x + 14:.1f}" y="{y + 4}">{escape(one.name)}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}, {escape(unit)}"><style>{STYLE}</style>'
        f'<text class="head" x="8" y="20">{escape(title)}</text>'
        f'<text class="dim" x="{WIDTH - RIGHT}" y="20" text-anchor="end">{escape(unit)}</text>'
        f"{''.join(keys)}{''.join(parts)}</svg>"
    )


def _grid(y: float, label: str) -> str:
    return (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="dim" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    )


def _below(x: float, label: str) -> str:
    y = HEIGHT - BOTTOM + 18
    return f'<text class="dim" x="{x:.1f}" y="{y}" text-anchor="middle">{label}</text>'


def _mark(place: int, x: float, y: float) -> str:
    """A circle, a square, a triangle, a rhombus: the colours are not all that tells lines apart."""
    if place == 0:
        return f'<circle class="s0" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    corners = {
        1: ((-4, -4), (4, -4), (4, 4), (-4, 4)),
        2: ((0, -5), (5, 4), (-5, 4)),
        3: ((0, -5), (5, 0), (0, 5), (-5, 0)),
    }[place]
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon class="s{place}" points="{points}"/>'


def _around(low: float, high: float) -> tuple[float, float]:
    """The nearest 1, 2 or 5 times a power of ten below and above, never the same."""
    below = max(tick for tick in _steps(low / 10, low) if tick <= low)
    above = min(tick for tick in _steps(high, high * 10) if tick >= high)
    return (below, above) if above > below else (below, below * 2)


def _steps(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [mantissa * 10.0**power for power in range(first, last + 1) for mantissa in (1, 2, 5)]


def _ticks(low: float, high: float) -> list[float]:
    found = [tick for tick in _steps(low, high) if low * 0.999 <= tick <= high * 1.001]
    return found if len(found) <= 8 else [tick for tick in found if f"{tick:e}".startswith("1")]


def _step(high: float) -> float:
    power = 10.0 ** math.floor(math.log10(high)) if high > 0 else 1.0
    return next(power * part for part in (0.2, 0.5, 1, 2) if high / (power * part) <= 5)


def _number(value: float) -> str:
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2g}"
