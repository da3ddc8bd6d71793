"""The admin port, a Starlette application: readiness, metrics, status, reload, and the console. Loopback, or
with a token (`gateway.console.access` says who may)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.console.access import Access
from gateway.console.routes import Handler, console_routes, error_reply, json_reply
from gateway.holding import demand_reply, hold_reply
from gateway.runtime import Gateway
from gateway.surface import ready_reply, status_body


def admin_app(gateway: Gateway, reload: Callable[[Gateway], str | None]) -> Starlette:
    """`reload` reads policy and keys again, and says why it could not."""
    access = Access(gateway.config.admin_token, gateway.wall)

    def guarded(handler: Handler) -> Handler:
        async def guard(request: Request) -> Response:
            refused = access.refusal(request.method, request.headers, request.cookies)
            return await handler(request) if refused is None else error_reply(*refused)

        return guard

    async def health(_: Request) -> Response:
        return json_reply({"status": "ok"})

    async def ready(_: Request) -> Response:
        code, body = ready_reply(gateway)
        return Response(body, code, media_type="application/json")

    async def metrics(request: Request) -> Response:
        # Beside the event loop: many series take milliseconds to write down.
        scrape = gateway.metrics.scrape
        body, kind = await asyncio.to_thread(scrape, request.headers.get("accept", ""))
        return Response(body, headers={"content-type": kind})

    async def status(_: Request) -> Response:
        return json_reply(status_body(gateway))

    async def reload_now(_: Request) -> Response:
        problem = reload(gateway)
        if problem is not None:
            return error_reply(400, problem)
        snapshot, candidate = gateway.snapshot, gateway.snapshot.candidate
        told = {
            "policy": snapshot.policy.hash,
            "candidate": None if candidate is None else candidate.policy.hash,
            "restart_needed": gateway.restart_needed,
        }
        return json_reply(told)

    async def hold(request: Request) -> Response:
        return await hold_reply(gateway, request)

    async def demand(_: Request) -> Response:
        return demand_reply(gateway)

    async def not_found(request: Request, _: Exception) -> Response:
        return error_reply(404, f"there is no {request.method} {request.url.path} here")

    async def wrong_method(request: Request, _: Exception) -> Response:
        return error_reply(405, f"{request.url.path} does not take {request.method}")

    return Starlette(
        routes=[
            Route("/healthz", health),
            Route("/readyz", ready),
            Route("/metrics", guarded(metrics)),
            Route("/admin/status", guarded(status)),
            Route("/admin/reload", guarded(reload_now), methods=["POST"]),
            Route("/admin/demand", guarded(demand)),
            Route("/admin/engines/{name}/hold", guarded(hold), methods=["POST"]),
            *console_routes(gateway, access, guarded),
        ],
        exception_handlers={404: not_found, 405: wrong_method},
    )
