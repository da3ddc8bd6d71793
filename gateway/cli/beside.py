"""Engines that `up` does not start (`external`, `hosted`): they can be drained, for whoever works on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from engines.runfile import UnitState
from engines.spec import EngineSpec
from engines.supervise import Idle, OperationError


class Beside:
    """`changed` is called at every change, before anything else happens."""

    def __init__(self, specs: Iterable[EngineSpec], changed: Callable[[], None]) -> None:
        self._changed = changed
        self._units = {
            spec.name: UnitState(spec.name, spec.url, "", state="ready", tier=spec.tier)
            for spec in specs
            if not spec.launched
        }

    def __contains__(self, name: str) -> bool:
        return name in self._units

    @property
    def units(self) -> tuple[UnitState, ...]:
        return tuple(self._units.values())

    async def drain(self, name: str, idle: Idle) -> None:
        """Return once nothing of this gateway runs on the engine; cancelled before, it is undone. Raises
        OperationError."""
        self._turn(name, "ready", "draining")
        try:
            await idle()
        except BaseException:
            self._turn(name, "draining", "ready")
            raise
        self._turn(name, "draining", "drained")

    async def resume(self, name: str) -> None:
        """Let it have requests again. Raises OperationError."""
        self._turn(name, "drained", "ready")

    def _turn(self, name: str, before: str, after: str) -> None:
        unit = self._units[name]
        if unit.state != before:
            raise OperationError(f"{name} is {unit.state}; this needs one that is {before}")
        self._units[name] = msgspec.structs.replace(unit, state=after)
        self._changed()
