"""Small requests of the gateway's own to an engine: health, metrics. Over the pool of clients' requests."""

from __future__ import annotations

from typing import Protocol

from gateway.relay.upstream import ConnectFailed, Limits, LostEarly, LostLate, Pool, RequestHead, TimedOut

MAX_REPLY = 8 << 20


class Reachable(Protocol):
    @property
    def pool(self) -> Pool: ...
    @property
    def head(self) -> RequestHead: ...


async def fetch(upstream: Reachable, path: str, seconds: float, method: str = "GET") -> tuple[int, bytes]:
    """(status, body) of one request. Raises OSError or TimeoutError where there is no answer in `seconds`."""
    limits = Limits(seconds, seconds, seconds, seconds)
    payload = upstream.head.build(method, path, b"", b"")
    for fresh in (False, True):
        try:
            connection = (None if fresh else upstream.pool.reuse()) or await upstream.pool.connect(seconds)
        except ConnectFailed as exc:
            raise OSError(str(exc)) from exc
        try:
            connection.start(payload, limits)
            parts: list[bytes] = []
            while not connection.complete:
                await connection.wait()
                parts.append(connection.take())
                if sum(map(len, parts)) > MAX_REPLY:
                    raise OSError(f"{path} answered more than {MAX_REPLY} bytes")
                connection.check()
            return connection.status, b"".join(parts)
        except LostEarly as exc:
            if not exc.reused:
                raise OSError(str(exc)) from exc
        except LostLate as exc:
            raise OSError(str(exc)) from exc
        except TimedOut as exc:
            raise TimeoutError(f"{path}: {exc}") from exc
        finally:
            upstream.pool.release(connection)
    raise OSError(f"{path}: the connection was closed twice before a reply")
