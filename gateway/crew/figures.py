"""What several processes tell of themselves, put together. Pure: bodies in, one body out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from gateway.telemetry.history import Figures, TierFigures
from gateway.telemetry.metrics import FIRST_TOKEN
from gateway.telemetry.series import Families, Point

Body = Mapping[str, Any]
Totals = dict[str, tuple[float, float]]
WAY = ("rule", "tier", "candidate_rule", "candidate_tier")
SUMMED = ("decided", "acted", "failed", "moved")


def statuses(serving: Sequence[Body], leaving: Sequence[Body] = ()) -> dict[str, Any]:
    """`/admin/status` of all: requests are summed, also of those that are leaving; engines are as the first
    finds them; a mistake that one of them has met is told."""
    first, bodies = (*serving, *leaving)[0], (*serving, *leaving)
    current = serving or leaving
    policies = [body["policy"] for body in current]
    return {
        **first,
        "draining": all(body["draining"] for body in current),
        "restart_needed": any(body["restart_needed"] for body in current),
        "engines": [
            {**engine, "in_flight": _in_flight(engine["name"], bodies)} for engine in first["engines"]
        ],
        "policy": {
            **first["policy"],
            "reload_error": _any(policy["reload_error"] for policy in policies),
            "shadow": _shadow([policy["shadow"] for policy in policies if policy["shadow"] is not None]),
            "shadow_error": _any(policy["shadow_error"] for policy in policies),
        },
        "leases": sum(body["leases"] for body in bodies),
    }


def _in_flight(name: str, bodies: Iterable[Body]) -> int:
    return sum(engine["in_flight"] for body in bodies for engine in body["engines"] if engine["name"] == name)


def _any(told: Iterable[str | None]) -> str | None:
    return next((one for one in told if one is not None), None)


def _shadow(tallies: Sequence[Body]) -> dict[str, Any] | None:
    """What the processes that have the first one's candidate have counted of it."""
    if not tallies:
        return None
    same = [tally for tally in tallies if tally["hash"] == tallies[0]["hash"]]
    ways: dict[tuple[str, ...], int] = {}
    for tally in same:
        for one in tally["differences"]:
            key = tuple(one[name] for name in WAY)
            ways[key] = ways.get(key, 0) + one["requests"]
    differences = sorted(ways.items(), key=lambda pair: -pair[1])
    return {
        **same[0],
        **{name: sum(tally[name] for tally in same) for name in SUMMED},
        "differences": [
            {**dict(zip(WAY, key, strict=True)), "requests": count} for key, count in differences
        ],
    }


def demands(bodies: Sequence[Body]) -> dict[str, Any]:
    """`/admin/demand` of all."""
    tiers: dict[str, dict[str, float]] = {}
    for body in bodies:
        for tier, one in body["tiers"].items():
            before = tiers.setdefault(tier, {"waiting": 0, "oldest": 0.0, "running": 0})
            before["waiting"] += one["waiting"]
            before["oldest"] = max(before["oldest"], one["oldest"])
            before["running"] += one["running"]
    return {"tiers": tiers}


def shown(serving: Sequence[Body], leaving: Sequence[Body], counted: Families) -> dict[str, Any]:
    """What the console shows of all: the state of each, with what `counted` says of rules."""
    first = (*serving, *leaving)[0]
    requests, degraded = rule_totals(counted)
    known = [rule["name"] for rule in first["rules"]]
    others = [name for name in requests if name not in known and name != "none"]
    added = [{"name": name, "send": "", "in_policy": False} for name in others]
    return {
        **first,
        **statuses(serving, leaving),
        "rules": [
            {
                **rule,
                "requests": int(requests.get(rule["name"], 0)),
                "degraded": int(degraded.get(rule["name"], 0)),
            }
            for rule in (*first["rules"], *added)
        ],
        "undecided": int(requests.get("none", 0)),
        "store": {**first["store"], "up": all(body["store"]["up"] for body in serving or leaving)},
    }


def _points(families: Families, name: str) -> list[tuple[dict[str, str], Point]]:
    return [
        (dict(point.labels), point) for family in families if family.name == name for point in family.points
    ]


def _sums(
    families: Families, name: str, label: str, only: Callable[[dict[str, str]], bool]
) -> dict[str, float]:
    sums: dict[str, float] = {}
    for labels, point in _points(families, name):
        if only(labels):
            sums[labels[label]] = sums.get(labels[label], 0.0) + point.value
    return sums


def _all(_: dict[str, str]) -> bool:
    return True


def rule_totals(counted: Families) -> tuple[dict[str, float], dict[str, float]]:
    """Requests that ended, and those that were degraded, by rule."""
    return (
        _sums(counted, "dualgauge_requests", "rule", _all),
        _sums(counted, "dualgauge_degraded", "rule", _all),
    )


def tenant_totals(counted: Families) -> Totals:
    """Requests that ended, and their prompt and completion tokens, by tenant."""
    requests = _sums(counted, "dualgauge_tenant_requests", "tenant", _all)
    tokens = _sums(counted, "dualgauge_tenant_tokens", "tenant", lambda labels: labels["kind"] != "cached")
    return {tenant: (count, tokens.get(tenant, 0.0)) for tenant, count in requests.items()}


def looked(counted: Families, tiers: Collection[str], engines: Collection[str]) -> Figures:
    """What the console's charts are drawn from."""
    requests = _sums(counted, "dualgauge_requests", "tier", _all)
    tokens = _sums(counted, "dualgauge_tokens", "tier", lambda labels: labels["kind"] == "completion")
    flight = _sums(counted, "dualgauge_in_flight", "tier", _all)
    running = _sums(counted, "dualgauge_engine_running", "engine", _all)
    waiting = _sums(counted, "dualgauge_engine_waiting", "engine", _all)
    kv = _sums(counted, "dualgauge_engine_kv_usage", "engine", _all)
    first = _first_tokens(counted, tiers)
    return Figures(
        {
            tier: TierFigures(
                requests.get(tier, 0.0), tokens.get(tier, 0.0), int(flight.get(tier, 0)), first[tier]
            )
            for tier in tiers
        },
        {name: (int(running.get(name, 0)), int(waiting.get(name, 0)), kv.get(name)) for name in engines},
    )


def _first_tokens(counted: Families, tiers: Collection[str]) -> dict[str, list[int]]:
    """Of each tier, how many streams began within each bound, and beyond the last."""
    below: dict[str, list[tuple[float, float]]] = {}
    for labels, point in _points(counted, "dualgauge_time_to_first_token_seconds"):
        if point.name.endswith("_bucket"):
            below.setdefault(labels["tier"], []).append((float(labels["le"]), point.value))
    found = {}
    for tier in tiers:
        totals = [int(value) for _, value in sorted(below.get(tier, []))] or [0] * (len(FIRST_TOKEN) + 1)
        found[tier] = [count - before for before, count in zip([0, *totals], totals, strict=False)]
    return found
