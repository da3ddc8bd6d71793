"""A circuit breaker for one engine: what its requests met decides, where its own `/health` sees nothing.

Closed, it counts requests that failed in a row. Open, it lets nothing pass until some good probes have come;
then it is half open and lets one request at a time try. One that succeeds closes it, one that fails doubles
the probes that the next trial waits for. It counts probes, not seconds, so it needs no clock.
"""

from __future__ import annotations

LONGEST = 32
"""Good probes before a trial, at most: about a minute where one comes every 2 s."""


class Breaker:
    """`faults` are failed requests in a row, more than 0 also while it is open. `trial` is whoever tries
    now."""

    __slots__ = ("_trips", "_wait", "faults", "open", "trial")

    def __init__(self) -> None:
        self.faults = 0
        self.open = False
        self.trial: object | None = None
        self._wait = 0
        self._trips = 0

    @property
    def half_open(self) -> bool:
        """Whether a request may try the engine now."""
        return self.open and self._wait == 0 and self.trial is None

    def trip(self) -> None:
        """Open it; while it is open, count a trial that failed. A failure of what was sent before says
        nothing new."""
        self.faults += 1
        if not self.open or self._wait == 0:
            self.open = True
            self._wait = min(LONGEST, 1 << self._trips)
            self._trips = min(self._trips + 1, LONGEST)

    def probed(self) -> None:
        """A probe was good."""
        if self._wait > 0:
            self._wait -= 1

    def close(self) -> None:
        self.faults = self._wait = self._trips = 0
        self.open = False
