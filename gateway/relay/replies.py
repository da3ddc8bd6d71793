"""What an engine's reply means: a good one is passed on, an error is put into our contract."""

from __future__ import annotations

import math

import msgspec

from gateway.errors import EngineBroke, EngineRefused, EngineTimeout, GatewayError
from gateway.relay.upstream import TimedOut

OK = range(200, 300)
AUTH = (401, 403)
OVERLOADED = (429, 503)
CLIENT = range(400, 500)
MESSAGE_LIMIT = 4096
_decode = msgspec.json.Decoder(dict[str, object]).decode


def error_from(status: int, body: bytes, engine: str) -> GatewayError:
    """The error that a client sees for an engine's status outside 200..299 (429 and 503 excepted)."""
    if status in AUTH:
        return EngineBroke(f"engine {engine} refused the gateway's key ({status}): check its `api_key`")
    message, param, code = _message(body)
    if status in CLIENT:
        return EngineRefused(
            message or f"the engine answered {status}", status, kind=None, param=param, code=code
        )
    return EngineBroke(f"engine {engine} answered {status}" + (f": {message}" if message else ""))


def _message(body: bytes) -> tuple[str, str | None, str | None]:
    """Text, param and code of an engine's error body, whichever of the usual shapes it has."""
    try:
        outer = _decode(body)
    except (msgspec.DecodeError, RecursionError):
        return "", None, None
    inner = outer.get("error")
    if isinstance(inner, str):
        return inner[:MESSAGE_LIMIT], None, None
    error = inner if isinstance(inner, dict) else outer
    message = error.get("message", error.get("detail", ""))
    text = message if isinstance(message, str) else msgspec.json.encode(message).decode()
    param, code = error.get("param"), error.get("code")
    return (
        text[:MESSAGE_LIMIT],
        param if isinstance(param, str) else None,
        code if isinstance(code, str) else None,
    )


def retry_after(headers: list[tuple[bytes, bytes]]) -> float | None:
    """Seconds of an engine's own retry-after."""
    for name, value in headers:
        if name == b"retry-after":
            try:
                seconds = float(value)
            except ValueError:
                return None
            return seconds if math.isfinite(seconds) and seconds >= 0 else None
    return None


def timeout_error(error: TimedOut, engine: str) -> EngineTimeout:
    what = {"first_byte": "did not begin its reply", "idle": "fell silent", "total": "was not done"}
    return EngineTimeout(
        f"engine {engine} {what.get(error.limit, 'did not answer')} within {error.seconds:g} s "
        f"(timeouts.{error.limit})"
    )
