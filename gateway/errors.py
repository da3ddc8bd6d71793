"""Everything that can end a request early, as one tree and one table.

    GatewayError
    ├── RequestError         the client can mend it (4xx)
    │   ├── RouteNotFound        404
    │   ├── MethodNotAllowed     405
    │   ├── InvalidKey           401
    │   ├── BodyTooLarge         413
    │   ├── BodyTooSlow          408
    │   ├── WrongMediaType       415
    │   ├── InvalidRequest       400
    │   ├── TierNotAllowed       403
    │   ├── ModelNotFound        404
    │   └── LimitExceeded        429
    │       └── SlotsTaken           of requests in flight
    └── ServiceError         the client cannot (5xx)
        ├── InternalFault        500
        ├── EngineBroke          502
        ├── NothingReady         503
        ├── Overloaded           503
        ├── LimitsUnavailable    503
        └── EngineTimeout        504

    EngineRefused            an engine's own 4xx, its status and message kept
    ClientGone               nobody is left to answer

Dialects turn these into their own body shapes; `ANTHROPIC_TYPES` is that dialect's column of the table.
"""

from __future__ import annotations

from typing import ClassVar


class ClientGone(Exception):
    """The client closed its connection: nothing is sent, nothing is an error."""


class GatewayError(Exception):
    """One failed request: `message` tells a person what to do, the rest is for programs.

    `retry_after` is in seconds and becomes the header of that name.
    """

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.error_code = code if code is not None else self.code
        self.http_status = self.status
        self.error_kind = self.kind


class RequestError(GatewayError):
    kind = "invalid_request_error"


class RouteNotFound(RequestError):
    status = 404
    code = "unknown_url"


class MethodNotAllowed(RequestError):
    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class InvalidKey(RequestError):
    status = 401
    code = "invalid_api_key"


class BodyTooLarge(RequestError):
    status = 413
    code = "body_too_large"

    @classmethod
    def over(cls, limit: int) -> BodyTooLarge:
        return cls(f"the body is larger than {limit} bytes (bounds.body)")


class BodyTooSlow(RequestError):
    status = 408
    code = "body_too_slow"

    @classmethod
    def after(cls, seconds: float) -> BodyTooSlow:
        return cls(f"the body was not complete after {seconds:g} s (bounds.read)")


class WrongMediaType(RequestError):
    status = 415
    code = "unsupported_media_type"


class InvalidRequest(RequestError):
    status = 400


class TierNotAllowed(RequestError):
    status = 403
    kind = "permission_error"
    code = "tier_not_allowed"


class ModelNotFound(RequestError):
    status = 404
    code = "model_not_found"


class LimitExceeded(RequestError):
    status = 429
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"
    # The lines `x-ratelimit-*` of what is left, each with its CRLF.
    headers: bytes = b""
    # Which limit of the plan it was: requests, tokens, those of one tier (exact_tokens), concurrent.
    limit: str = "requests"


class SlotsTaken(LimitExceeded):
    code = "concurrency_exceeded"
    limit = "concurrent"
    scope: str = ""


class ServiceError(GatewayError):
    kind = "server_error"


class InternalFault(ServiceError):
    status = 500
    code = "internal_error"


class EngineBroke(ServiceError):
    status = 502
    code = "engine_broke_off"


class NothingReady(ServiceError):
    status = 503
    code = "no_engine_ready"


class Overloaded(ServiceError):
    """This process has no room for the request: another may, or the same a moment later."""

    status = 503
    code = "overloaded"


class LimitsUnavailable(ServiceError):
    """The store of limits is down, and `on_store_failure` is `closed`."""

    status = 503
    code = "limits_unavailable"


class EngineTimeout(ServiceError):
    status = 504
    code = "engine_timeout"


class EngineRefused(GatewayError):
    """An engine's 400, 404, 413 or 422: its status, and its words in our shape."""

    def __init__(
        self, message: str, status: int, *, kind: str | None, param: str | None, code: str | None
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.http_status = status
        self.error_kind = kind or "invalid_request_error"


# https://docs.anthropic.com/en/api/errors: 529 is that dialect's word for "nothing ready".
ANTHROPIC_OVERLOADED = 529
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
