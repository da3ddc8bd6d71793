"""The admin port, a Starlette application: readiness, metrics, status, reload. Loopback, or with a token."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.runtime import Gateway
from gateway.surface import ready_reply

Handler = Callable[[Request], Awaitable[Response]]


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _error(status: int, message: str) -> Response:
    kind = "invalid_request_error"
    return _json({"error": {"message": message, "type": kind, "param": None, "code": None}}, status)


def status_body(gateway: Gateway) -> dict[str, object]:
    """What `dualgauge status` shows: engines, tiers, policy, and what needs a person."""
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


def admin_app(gateway: Gateway, reload: Callable[[Gateway], str | None]) -> Starlette:
    """`reload` reads policy and keys again, and says why it could not."""
    token = gateway.config.admin_token

    def guarded(handler: Handler) -> Handler:
        async def guard(request: Request) -> Response:
            if token is not None:
                given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
                if not hmac.compare_digest(given.encode(), token.encode()):
                    return _error(401, "send the admin token as `Authorization: Bearer …`")
            return await handler(request)

        return guard

    async def health(_: Request) -> Response:
        return _json({"status": "ok"})

    async def ready(_: Request) -> Response:
        code, body = ready_reply(gateway)
        return Response(body, code, media_type="application/json")

    async def metrics(request: Request) -> Response:
        # Beside the event loop: many series take milliseconds to write down.
        scrape = gateway.metrics.scrape
        body, kind = await asyncio.to_thread(scrape, request.headers.get("accept", ""))
        return Response(body, headers={"content-type": kind})

    async def status(_: Request) -> Response:
        return _json(status_body(gateway))

    async def reload_now(_: Request) -> Response:
        problem = reload(gateway)
        if problem is not None:
            return _error(400, problem)
        snapshot, candidate = gateway.snapshot, gateway.snapshot.candidate
        told = {
            "policy": snapshot.policy.hash,
            "candidate": None if candidate is None else candidate.policy.hash,
            "restart_needed": gateway.restart_needed,
        }
        return _json(told)

    async def not_found(request: Request, _: Exception) -> Response:
        return _error(404, f"there is no {request.method} {request.url.path} here")

    async def wrong_method(request: Request, _: Exception) -> Response:
        return _error(405, f"{request.url.path} does not take {request.method}")

    return Starlette(
        routes=[
            Route("/healthz", health),
            Route("/readyz", ready),
            Route("/metrics", guarded(metrics)),
            Route("/admin/status", guarded(status)),
            Route("/admin/reload", guarded(reload_now), methods=["POST"]),
        ],
        exception_handlers={404: not_found, 405: wrong_method},
    )
