"""Engines that are held back from new requests: by `dualgauge up`, through the admin port and at the start.

`up` holds an engine from the moment it leaves service (drained, restarted, put to sleep) until it is proven
again, whatever the gateway's own probes say meanwhile. A gateway that is started anew reads in the run file
what is held; a gateway without a living `up` holds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from engines import runfile
from gateway.runtime import Gateway


class Hold(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`reason`: why it gets nothing; empty ends that."""

    reason: str


def held(config: Path) -> Mapping[str, str]:
    """Name -> reason of the engines that this configuration's `up` holds now."""
    run = runfile.read(runfile.paths(config).state)
    if run is None or run.config != str(config) or run.boot != runfile.boot_id() or not run.owner.alive():
        return {}
    return {unit.name: runfile.why_held(unit) for unit in (*run.engines, *run.beside)}


def hold_back(gateway: Gateway) -> None:
    """Hold what `up` holds; for the start."""
    for name, reason in held(gateway.config.path).items():
        engine = gateway.fleet.by_name.get(name)
        if engine is not None:
            gateway.fleet.hold(engine, reason)
