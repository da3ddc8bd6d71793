"""Who may use the admin port. Fails closed.

With a token: it, as `Authorization: Bearer …`, or a session that the console's login gave for it: a cookie
that scripts cannot read and other sites cannot have sent. Without one the port is loopback's, and what a
browser sends must come from a page of this port, by a loopback name: else any web page that the operator
visits could ask (cross-site requests, DNS rebinding).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

COOKIE = "dualgauge_session"
SESSION_SECONDS = 12 * 3600
SAFE = ("GET", "HEAD")
_SAME = ("same-origin", "none", None)


class Access:
    """`wall` is Unix time in seconds. A session is its end and a MAC of it, keyed by the token: nothing is
    kept, it outlives a restart, and a new token ends it."""

    def __init__(self, token: str | None, wall: Callable[[], float]) -> None:
        self._token = None if token is None else token.encode()
        self._key = hashlib.sha256(b"dualgauge console session\0" + (self._token or b"")).digest()
        self._wall = wall

    @property
    def asks(self) -> bool:
        """Whether there is a token to ask for."""
        return self._token is not None

    def is_token(self, given: str) -> bool:
        return self._token is not None and hmac.compare_digest(given.encode(), self._token)

    def session(self) -> str:
        """A new session."""
        return self._signed(int(self._wall()) + SESSION_SECONDS)

    def _signed(self, end: int) -> str:
        return f"{end}.{hmac.new(self._key, str(end).encode(), hashlib.sha256).hexdigest()}"

    def _is_session(self, given: str) -> bool:
        end, _, _mac = given.partition(".")
        if not (end.isascii() and end.isdigit() and len(end) < 16):
            return False
        signed = hmac.compare_digest(given.encode(), self._signed(int(end)).encode())
        return signed and self._wall() < int(end)

    def signed_in(self, cookies: Mapping[str, str]) -> bool:
        return self._is_session(cookies.get(COOKIE, ""))

    def refusal(
        self, method: str, headers: Mapping[str, str], cookies: Mapping[str, str]
    ) -> tuple[int, str] | None:
        """Status and message for a request that may not pass, None for one that may."""
        foreign = self.foreign(headers)
        if self._token is None:
            return foreign
        if self.is_token(headers.get("authorization", "").removeprefix("Bearer ").strip()):
            return None
        if self.signed_in(cookies):
            return None if method in SAFE else foreign
        return 401, "send the admin token as `Authorization: Bearer …`"

    def foreign(self, headers: Mapping[str, str]) -> tuple[int, str] | None:
        """Why a request is not one of this port's own pages, None where it may be."""
        host = headers.get("host", "")
        if self._token is None and not is_loopback(host):
            message = f"`{host}` is no loopback address: set `admin_token` to be reached by another name"
            return 403, message
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        # A proxy may change Host, but not what the browser itself says; older ones say Origin only.
        if site is None and origin is not None:
            site = "same-origin" if origin.partition("://")[2] == host else "cross-site"
        if site not in _SAME:
            return 403, "this request comes from another site: use the console's own page"
        return None


def is_loopback(host: str) -> bool:
    """Whether a Host header names this machine, whatever the port; `localhost` and its subdomains do."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
