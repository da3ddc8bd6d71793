"""Counters and histograms that cost a list item to count, read by prometheus-client when it is scraped.

One event loop writes them, so they need no lock; `prometheus_client.Counter` takes one for each increment,
and a search through its labels. Another thread may read them meanwhile: it copies what may grow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

Labels = tuple[str, ...]


class Count:
    """One series of a counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        self.value += amount


class Counter(Collector):
    """A counter with labels; `name` without `_total`."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._series: dict[Labels, Count] = {}
        if not labels:
            self.labels()

    def labels(self, *values: str) -> Count:
        """The series of these values, made where there is none."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = Count()
        return series

    def value(self, *values: str) -> float:
        """What the series of these values counts; 0 where there is none."""
        series = self._series.get(values)
        return 0.0 if series is None else series.value

    def items(self) -> Iterable[tuple[Labels, float]]:
        """Each series' values and what it counts."""
        return [(values, series.value) for values, series in self._series.items()]

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, series in list(self._series.items()):
            family.add_metric(values, series.value)
        yield family


class Buckets:
    """One series of a histogram. `exemplars` are those of its buckets, by index: one for each at most."""

    __slots__ = ("bounds", "counts", "exemplars", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.exemplars: dict[int, Exemplar] = {}
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def show(self, value: float, trace: str, at: float) -> None:
        """Name the trace of a value that was observed; `at` is Unix time in seconds."""
        self.exemplars[bisect_left(self.bounds, value)] = Exemplar({"trace_id": trace}, value, at)


def pace(intervals: Buckets, clock: Callable[[], float]) -> Callable[[], None]:
    """What observes the intervals between its calls, in seconds of `clock`. On the path of every token: so a
    closure, and `observe` written out."""
    bounds, counts = intervals.bounds, intervals.counts
    last: float | None = None

    def beat() -> None:
        nonlocal last
        now = clock()
        if last is not None:
            interval = now - last
            counts[bisect_left(bounds, interval)] += 1
            intervals.sum += interval
        last = now

    return beat


class Histogram(Collector):
    """A histogram with labels; `bounds` are upper bounds, ascending, without infinity."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = (), *, bounds: Sequence[float]) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._bounds = tuple(bounds)
        self._shown = (*(repr(float(bound)) for bound in bounds), "+Inf")
        self._series: dict[Labels, Buckets] = {}
        if not labels:
            self.labels()

    def labels(self, *values: str) -> Buckets:
        """The series of these values, made where there is none."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = Buckets(self._bounds)
        return series

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, series in list(self._series.items()):
            total = 0
            cumulative: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
            for index, (bound, count) in enumerate(zip(self._shown, series.counts, strict=True)):
                total += count
                shown = series.exemplars.get(index)
                cumulative.append((bound, total) if shown is None else (bound, total, shown))
            family.add_metric(values, cumulative, series.sum)
        yield family
