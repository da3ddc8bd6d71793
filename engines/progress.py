"""What an engine's counters say over time: whether it still makes tokens, and how fast it works.

An engine may hang behind a `/health` that is 200 (vllm#39863), so health alone is not believed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

FADE_SECONDS = 60.0
"""What was seen so long ago counts about a third."""


class Told(Protocol):
    """Figures that an engine has told; see `engines.health.Figures`."""

    @property
    def requests(self) -> int: ...
    @property
    def pulse(self) -> tuple[float, ...]: ...
    @property
    def finished(self) -> float | None: ...
    @property
    def prefill_seconds(self) -> float | None: ...
    @property
    def prefilled(self) -> float | None: ...


@dataclass(slots=True)
class Ratio:
    """Of two amounts that grow, the one by the other; older growth fades."""

    top: float = 0.0
    bottom: float = 0.0

    def add(self, top: float, bottom: float, seconds: float) -> None:
        fade = math.exp(-seconds / FADE_SECONDS)
        self.top = self.top * fade + top
        self.bottom = self.bottom * fade + bottom

    @property
    def value(self) -> float | None:
        """None until both have grown."""
        return self.top / self.bottom if self.top > 0 and self.bottom > 0 else None


@dataclass(slots=True)
class Progress:
    """Of one engine; times are monotonic seconds. `moved_at` is when a counter was last seen to have changed,
    `still_since` since when it has had requests and changed none. `finishing` is requests a second while it
    has some, `prefill` the seconds that a request waits for each token of its prompt to be computed."""

    moved_at: float | None = None
    still_since: float | None = None
    finishing: Ratio = field(default_factory=Ratio)
    prefill: Ratio = field(default_factory=Ratio)
    _last: Told | None = None
    _last_at: float = 0.0

    def told(self, figures: Told, now: float) -> None:
        """New figures have come. An engine without counters is never called still."""
        last = self._last
        if not figures.pulse:
            self.still_since = None
        elif last is None or last.pulse != figures.pulse:
            self.moved_at = None if last is None else now
            self.still_since = now
        elif not figures.requests:
            self.still_since = now
        if last is not None:
            self._rates(last, figures, now - self._last_at)
        self._last, self._last_at = figures, now

    def silent(self, now: float, in_flight: int) -> None:
        """The figures of an engine that has told some were waited for in vain; that goes on counting while
        requests of ours are with it."""
        if self.still_since is not None and not in_flight:
            self.still_since = now

    def forget(self) -> None:
        """Another process may answer next time, or none."""
        self.moved_at = self.still_since = self._last = None
        self.finishing, self.prefill = Ratio(), Ratio()

    def still_for(self, now: float) -> float:
        """Seconds."""
        return 0.0 if self.still_since is None else now - self.still_since

    def moved_since(self, then: float | None) -> bool:
        """Whether the engine was seen to work after that: a request that it kept waiting was a long one."""
        return self.moved_at is not None and then is not None and self.moved_at > then

    def _rates(self, last: Told, figures: Told, seconds: float) -> None:
        done = _growth(last.finished, figures.finished)
        if done is not None and (done or last.requests):
            self.finishing.add(done, seconds, seconds)
        spent = _growth(last.prefill_seconds, figures.prefill_seconds)
        tokens = _growth(last.prefilled, figures.prefilled)
        if spent is not None and tokens:
            self.prefill.add(spent, tokens, seconds)


def _growth(before: float | None, after: float | None) -> float | None:
    """None where a counter is missing, or has begun anew with its engine."""
    return None if before is None or after is None or after < before else after - before
