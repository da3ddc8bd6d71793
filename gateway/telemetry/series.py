"""Metrics of several processes as one: what each has counted, in a form that can be sent, and their sum.

Counters and histograms are summed, also over processes that have ended: a sum never falls. A gauge is summed
where each process has its share of it, else it is the highest or the lowest, as `GAUGES` says. What engines
tell of themselves every process knows alike: one is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample, Timestamp

How = Literal["sum", "max", "min", "one"]
GAUGES: Mapping[str, How] = {
    "dualgauge_in_flight": "sum",
    "dualgauge_leases": "sum",
    "dualgauge_store_up": "min",
    "dualgauge_file_refused": "max",
    "dualgauge_policy_info": "max",
    "dualgauge_config_info": "max",
    "dualgauge_shadow_rollout": "max",
    "dualgauge_engine_state": "one",
    "dualgauge_engine_info": "one",
    "dualgauge_engine_running": "one",
    "dualgauge_engine_waiting": "one",
    "dualgauge_engine_kv_usage": "one",
}
OF_ENGINES = ("dualgauge_engine_preemptions",)
"""Counters of the engines' own."""

Labels = tuple[tuple[str, str], ...]


class Shown(msgspec.Struct, frozen=True, array_like=True):
    """An exemplar: `at` is Unix time in seconds."""

    labels: dict[str, str]
    value: float
    at: float | None


class Point(msgspec.Struct, frozen=True, array_like=True):
    """One series' name, labels and value."""

    name: str
    labels: Labels
    value: float
    exemplar: Shown | None = None


class Family(msgspec.Struct, frozen=True, array_like=True):
    name: str
    kind: str
    text: str
    points: list[Point]

    @property
    def how(self) -> How:
        """How several processes' values become one."""
        if self.name in OF_ENGINES:
            return "one"
        return GAUGES.get(self.name, "max") if self.kind == "gauge" else "sum"

    @property
    def lasts(self) -> bool:
        """Whether what a process has counted counts on when it has ended."""
        return self.kind != "gauge" and self.how == "sum"


Families = list[Family]


def families(registry: CollectorRegistry) -> Families:
    """All that a process has counted. May be called on another thread."""
    return [
        Family(metric.name, metric.type, metric.documentation, [_point(sample) for sample in metric.samples])
        for metric in registry.collect()
    ]


def _point(sample: Sample) -> Point:
    shown = sample.exemplar
    exemplar = None if shown is None else Shown(dict(shown.labels), shown.value, _seconds(shown.timestamp))
    return Point(sample.name, tuple(sample.labels.items()), float(sample.value), exemplar)


def _seconds(at: float | Timestamp | None) -> float | None:
    return None if at is None else float(at)


def merged(
    serving: Sequence[Families], leaving: Sequence[Families] = (), past: Families | None = None
) -> Families:
    """Those of all processes. Of the ones that are `leaving` gauges count only where they are shares of a
    sum; `past` is what ended ones have counted."""
    whole: dict[str, _Sum] = {}
    for index, part in enumerate((*serving, *leaving, past or [])):
        stays = index < len(serving)
        for family in part:
            if stays or family.how == "sum":
                whole.setdefault(family.name, _Sum(family)).add(family.points)
    return [one.family() for one in whole.values()]


def lasting(past: Families, ended: Families) -> Families:
    """What ended processes have counted, one more of them included."""
    return merged([], [past, [family for family in ended if family.lasts]])


class _Sum:
    def __init__(self, first: Family) -> None:
        self._first = first
        self._how = first.how
        self._points: dict[tuple[str, Labels], Point] = {}
        self._parts = 0

    def add(self, points: Iterable[Point]) -> None:
        self._parts += 1
        if self._how == "one" and self._parts > 1:
            return
        known = self._points
        for point in points:
            key = point.name, point.labels
            before = known.get(key)
            known[key] = point if before is None else self._both(before, point)

    def _both(self, old: Point, new: Point) -> Point:
        if self._how == "sum":
            value = old.value + new.value
        else:
            value = (max if self._how == "max" else min)(old.value, new.value)
        shown = max(
            (one for one in (old.exemplar, new.exemplar) if one is not None),
            key=lambda one: one.at or 0.0,
            default=None,
        )
        return Point(new.name, new.labels, value, shown)

    def family(self) -> Family:
        first = self._first
        return Family(first.name, first.kind, first.text, list(self._points.values()))


class _Collected(Collector):
    def __init__(self, families: Families) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.text, family.kind)
            for point in family.points:
                shown = point.exemplar
                exemplar = None if shown is None else Exemplar(shown.labels, shown.value, shown.at)
                metric.add_sample(point.name, dict(point.labels), point.value, None, exemplar)
            yield metric


def scrape(families: Families, accept: str) -> tuple[bytes, str]:
    """(body, content type) in the format that a scraper accepts."""
    encode, content_type = choose_encoder(accept)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(families))
    return encode(registry), content_type
