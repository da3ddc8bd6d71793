"""The console's part of the admin port: its page, its login, and the endpoints that the page asks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from gateway.config import Config
from gateway.console.access import COOKIE, SESSION_SECONDS, Access
from gateway.console.page import Page
from gateway.site import Site

Handler = Callable[[Request], Awaitable[Response]]
MOST_LOGIN_BYTES = 8192
NO_STORE = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class _Login(msgspec.Struct):
    token: str


class TooLarge(Exception):
    """A body of more bytes than are read."""


def json_reply(body: object, status: int = 200) -> Response:
    """`body` is encoded, where it is not bytes that are JSON already."""
    raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return Response(raw, status, dict(NO_STORE), media_type="application/json")


def error_reply(status: int, message: str) -> Response:
    kind = "invalid_request_error"
    return json_reply({"error": {"message": message, "type": kind, "param": None, "code": None}}, status)


async def read_body(request: Request, most: int) -> bytes:
    """Raises TooLarge as soon as more than `most` bytes have come."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise TooLarge(f"the body is larger than {most} bytes")
    return bytes(body)


def console_routes(
    config: Config, site: Callable[[], Site], access: Access, guarded: Callable[[Handler], Handler]
) -> list[BaseRoute]:
    """`guarded` lets a handler be reached only by who may use the admin port."""

    async def home(_: Request) -> Response:
        return RedirectResponse("console/")

    async def login(request: Request) -> Response:
        refused = access.foreign(request.headers)
        if refused is not None:
            return error_reply(*refused)
        try:
            given = msgspec.json.decode(await read_body(request, MOST_LOGIN_BYTES), type=_Login).token
        except (msgspec.DecodeError, TooLarge) as error:
            return error_reply(400, f'send {{"token": "…"}}: {error}')
        if access.asks and not access.is_token(given):
            return error_reply(401, "this is not the admin token (`admin_token` in dualgauge.yaml)")
        reply = Response(status_code=204, headers=dict(NO_STORE))
        if access.asks:
            _set_cookie(request, reply, access.session(), SESSION_SECONDS)
        return reply

    async def session(request: Request) -> Response:
        return json_reply({"asked": access.asks, "signed_in": access.signed_in(request.cookies)})

    async def logout(request: Request) -> Response:
        reply = Response(status_code=204, headers=dict(NO_STORE))
        _set_cookie(request, reply, "", 0)
        return reply

    async def live_now(request: Request) -> Response:
        return json_reply(await site().live(request.query_params.get("cursor", "")))

    async def decision(request: Request) -> Response:
        return json_reply(await site().decision(request.path_params["id"]))

    async def policy(_: Request) -> Response:
        return json_reply(await site().policy())

    async def tenants(_: Request) -> Response:
        return json_reply(await site().tenants())

    async def explain(request: Request) -> Response:
        try:
            return json_reply(await site().explain(await read_body(request, config.bounds.body)))
        except TooLarge as error:
            return error_reply(413, str(error))

    return [
        Route("/", home),
        Mount("/console", Page()),
        Route("/admin/session", session),
        Route("/admin/login", login, methods=["POST"]),
        Route("/admin/logout", guarded(logout), methods=["POST"]),
        Route("/admin/live", guarded(live_now)),
        Route("/admin/decisions/{id}", guarded(decision)),
        Route("/admin/policy", guarded(policy)),
        Route("/admin/tenants", guarded(tenants)),
        Route("/admin/explain", guarded(explain), methods=["POST"]),
    ]


def _set_cookie(request: Request, reply: Response, value: str, seconds: int) -> None:
    # Where a proxy in front speaks TLS, it says so; over plain HTTP a browser would not send a secure cookie.
    scheme = request.headers.get("x-forwarded-proto", request.url.scheme)
    reply.set_cookie(
        COOKIE, value, max_age=seconds, path="/", httponly=True, samesite="strict", secure=scheme == "https"
    )
