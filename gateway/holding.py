"""Engines that are held back from new requests: by `dualgauge up`, through the admin port and at the start.

`up` holds an engine from the moment it leaves service (drained, restarted, put to sleep) until it is proven
again, whatever the gateway's own probes say meanwhile. A gateway that is started anew reads in the run file
what is held; a gateway without a living `up` holds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engines import runfile
from gateway.console.routes import error_reply, json_reply
from gateway.runtime import Gateway

MAX_REASON = 200


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


async def hold_reply(gateway: Gateway, request: Request) -> Response:
    """`POST /admin/engines/{name}/hold`: hold it or let it go; how many of its requests are under way."""
    engine = gateway.fleet.by_name.get(request.path_params["name"])
    if engine is None:
        return error_reply(404, f"there is no engine `{request.path_params['name'][:64]}`")
    try:
        order = msgspec.json.decode(await request.body(), type=Hold)
    except msgspec.DecodeError as error:
        return error_reply(400, f'send {{"reason": "…"}}: {error}')
    gateway.fleet.hold(engine, order.reason[:MAX_REASON])
    return json_reply({"engine": engine.spec.name, "held": engine.held, "in_flight": engine.in_flight})


def demand_reply(gateway: Gateway) -> Response:
    """`GET /admin/demand`: of each tier, how many requests wait for it, the first for how many seconds, and
    how many are under way."""
    tiers = {}
    for tier, engines in gateway.fleet.tiers.items():
        waiting, oldest = gateway.tiers.oldest(tier)
        running = sum(engine.in_flight for engine in engines)
        tiers[tier] = {"waiting": waiting, "oldest": oldest, "running": running}
    return json_reply({"tiers": tiers})
