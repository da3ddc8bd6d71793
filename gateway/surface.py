"""What is known without asking an engine: the public port's routes and models, readiness, status."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote

import msgspec

from gateway.dialects import ENDPOINTS, Endpoint
from gateway.errors import ModelNotFound
from gateway.identity import Tenant
from gateway.runtime import Gateway

ALLOWED: Mapping[str, tuple[str, ...]] = {
    path: tuple(sorted(m for m, p in ENDPOINTS if p == path)) for _, path in ENDPOINTS
}
MAX_PATH = 512
PRINTABLE = " !#$&'()*+,-./:;<=>?@[]^_`{|}~"


def find(method: str, path: str) -> tuple[str, Endpoint | None, tuple[str, ...]]:
    """(route, endpoint, methods of the route); where there is an endpoint, the route is the table's key."""
    endpoint = ENDPOINTS.get((method, path))
    if endpoint is not None:
        return path, endpoint, ()
    route = path if path in ALLOWED else _with_id(path)
    return route, ENDPOINTS.get((method, route)), ALLOWED.get(route, ())


def _with_id(path: str) -> str:
    parts = path.split("/")
    if len(path) > MAX_PATH or len(parts) < 4 or parts[3] in ("", ".", ".."):
        return path
    route = "/".join([*parts[:3], "{id}", *parts[4:]])
    return route if route in ALLOWED else path


def models_reply(gateway: Gateway, tenant: Tenant, path: str) -> bytes:
    """`GET /v1/models` and `/v1/models/{id}`: the routed name and the pinned ones that this key may use."""
    models = [
        {"id": name, "object": "model", "created": 0, "owned_by": "dualgauge"}
        for name, tier in gateway.names.items()
        if (tier is None or tenant.may_use(tier)) and tenant.may_ask(name, gateway.config.model)
    ]
    if path == "/v1/models":
        return msgspec.json.encode({"object": "list", "data": models})
    wanted = path.removeprefix("/v1/models/")
    for model in models:
        if model["id"] == wanted:
            return msgspec.json.encode(model)
    raise ModelNotFound(f"the model `{wanted[:128]}` does not exist here", param="model")


def ready_reply(gateway: Gateway) -> tuple[int, bytes]:
    """200 where every tier has a ready engine, else 503 with the reason of each that has not."""
    missing = gateway.fleet.missing()
    body: dict[str, object] = {
        "ready": not missing and not gateway.draining,
        "tiers": {tier: missing.get(tier, "ready") for tier in gateway.config.tiers},
    }
    if gateway.draining:
        body["draining"] = True
    if gateway.reload_error is not None:
        body["reload_error"] = gateway.reload_error
    if gateway.shadow_error is not None:
        body["shadow_error"] = gateway.shadow_error
    return 200 if body["ready"] else 503, msgspec.json.encode(body)


def status_body(gateway: Gateway) -> dict[str, object]:
    """What `dualgauge status` and the console show: engines, tiers, policy, and what needs a person."""
    fleet = gateway.fleet
    missing = fleet.missing()
    candidate = gateway.snapshot.candidate
    return {
        "model": gateway.config.model,
        "draining": gateway.draining,
        "restart_needed": gateway.restart_needed,
        "tiers": {tier: missing.get(tier, "ready") for tier in gateway.config.tiers},
        "engines": [
            {
                "name": engine.spec.name,
                "tier": engine.spec.tier,
                "kind": engine.spec.kind,
                "precision": engine.spec.precision,
                "url": engine.spec.url,
                "state": engine.state,
                "reason": engine.reason,
                "held": engine.held,
                "in_flight": engine.in_flight,
                "running": engine.running,
                "waiting": engine.waiting,
                "kv_usage": engine.kv,
            }
            for engine in fleet.engines
        ],
        "policy": {
            "file": gateway.snapshot.policy.file,
            "hash": gateway.snapshot.policy.hash,
            "prompt_tokens": gateway.prompts if gateway.counter is None else gateway.counter.source,
            "rules": [rule.name for rule in gateway.snapshot.policy.rules],
            "reload_error": gateway.reload_error,
            "shadow": None if candidate is None else candidate.status(),
            "shadow_error": gateway.shadow_error,
        },
        "leases": gateway.store.in_use(),
    }


class HeaderView(Mapping[str, str]):
    """ASGI headers as a mapping; of a header that is repeated, the values are joined (RFC 9110, 5.3)."""

    __slots__ = ("_first", "_raw")

    def __init__(self, raw: list[tuple[bytes, bytes]], first: Mapping[bytes, bytes]) -> None:
        """`first` has the first value of each."""
        self._raw = raw
        self._first = first

    def get(self, name: str, default: Any = None) -> Any:
        key = name.encode("latin-1", "replace")
        found = self._first.get(key)
        if found is None:
            return default
        if len(self._first) < len(self._raw):
            found = b", ".join([value for header, value in self._raw if header == key])
        return found.decode("latin-1")

    def __getitem__(self, name: str) -> str:
        value = self.get(name)
        if value is None:
            raise KeyError(name)
        return str(value)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name.decode("latin-1") for name, _ in self._raw))

    def __len__(self) -> int:
        return len({name for name, _ in self._raw})


@lru_cache(maxsize=1024)
def decision_lines(tier: str, engine: str, precision: str, rule: str) -> bytes:
    """The header lines that name a decision; empty names are left out. All come from the configuration; what
    is not printable ASCII in a rule's name is percent-encoded."""
    named = (("tier", tier), ("engine", engine), ("precision", precision), ("rule", rule))
    lines = [f"x-dualgauge-{name}: {quote(value, safe=PRINTABLE)}\r\n" for name, value in named if value]
    return "".join(lines).encode("ascii")
