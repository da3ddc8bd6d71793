"""Where an engine listens."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Address:
    """Where an engine listens: host and port, or a unix socket; `base` is the path before the route's."""

    host: str
    port: int
    tls: bool = False
    uds: str | None = None
    base: str = ""

    @classmethod
    def parse(cls, url: str) -> Address:
        """`http://h:p[/base]`, `https://h[:p][/base]` or `unix:/path`. Raises ValueError."""
        if url.startswith("unix:"):
            path = url.removeprefix("unix:").removeprefix("//")
            if not path.startswith("/"):
                raise ValueError("a unix socket is written unix:/path/to.sock")
            return cls("localhost", 0, uds=path)
        wrong = ValueError("an engine's url is http://host:port, https://host or unix:/path/to.sock")
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise wrong from None
        if parts.scheme not in ("http", "https") or not host or parts.username or parts.query:
            raise wrong
        if not url.isascii() or not url.isprintable() or " " in url:
            raise wrong
        tls = parts.scheme == "https"
        return cls(host, port or (443 if tls else 80), tls, base=parts.path.rstrip("/").removesuffix("/v1"))

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = 443 if self.tls else 80
        return host if self.uds or self.port == default else f"{host}:{self.port}"
