"""The admin port, a Starlette application: readiness, metrics, status, reload, and the console. Loopback, or
with a token (`gateway.console.access` says who may)."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.config import Config
from gateway.console.access import Access
from gateway.console.routes import Handler, console_routes, error_reply, json_reply
from gateway.holding import Hold
from gateway.site import Site, SiteError


def admin_app(config: Config, site: Callable[[], Site], wall: Callable[[], float] = time.time) -> Starlette:
    """`site` is who serves at the time; `wall` is Unix time in seconds."""
    access = Access(config.admin_token, wall)

    def guarded(handler: Handler) -> Handler:
        async def guard(request: Request) -> Response:
            refused = access.refusal(request.method, request.headers, request.cookies)
            return await handler(request) if refused is None else error_reply(*refused)

        return guard

    async def health(_: Request) -> Response:
        return json_reply({"status": "ok"})

    async def ready(_: Request) -> Response:
        code, body = await site().ready()
        return Response(body, code, media_type="application/json")

    async def metrics(request: Request) -> Response:
        body, kind = await site().scrape(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": kind})

    async def status(_: Request) -> Response:
        return json_reply(await site().status())

    async def reload_now(_: Request) -> Response:
        return json_reply(await site().reload())

    async def restart(_: Request) -> Response:
        return json_reply(await site().restart())

    async def hold(request: Request) -> Response:
        """Hold an engine or let it go; how many of its requests are under way."""
        try:
            order = msgspec.json.decode(await request.body(), type=Hold)
        except msgspec.DecodeError as error:
            return error_reply(400, f'send {{"reason": "…"}}: {error}')
        return json_reply(await site().hold(request.path_params["name"], order.reason))

    async def demand(_: Request) -> Response:
        return json_reply(await site().demand())

    async def not_found(request: Request, _: Exception) -> Response:
        return error_reply(404, f"there is no {request.method} {request.url.path} here")

    async def wrong_method(request: Request, _: Exception) -> Response:
        return error_reply(405, f"{request.url.path} does not take {request.method}")

    async def not_done(_: Request, error: Exception) -> Response:
        assert isinstance(error, SiteError)
        return error_reply(error.status, str(error))

    return Starlette(
        routes=[
            Route("/healthz", health),
            Route("/readyz", ready),
            Route("/metrics", guarded(metrics)),
            Route("/admin/status", guarded(status)),
            Route("/admin/reload", guarded(reload_now), methods=["POST"]),
            Route("/admin/restart", guarded(restart), methods=["POST"]),
            Route("/admin/demand", guarded(demand)),
            Route("/admin/engines/{name}/hold", guarded(hold), methods=["POST"]),
            *console_routes(config, site, access, guarded),
        ],
        exception_handlers={404: not_found, 405: wrong_method, SiteError: not_done},
    )
