"""Images, audio, video and files in a request's messages: bytes that come with it pass, addresses do not.

An engine that follows a client's address is a way into the network it stands in (GHSA-3f6c-7fw2-ppm4,
CVE-2026-24779), and one that is given tensors unpickles them (CVE-2025-62164). An operator may name hosts
whose addresses pass, in `bounds.fetch`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from gateway.config import HOST
from gateway.dialects.schemas import shown
from gateway.errors import InvalidRequest

PLAIN = frozenset({"role", "content", "type", "text", "name", "id", "tool_call_id", "tool_calls", "input"})
"""Keys whose values are texts, or what a tool was called with: nothing that an engine would fetch."""
HOLDERS = frozenset({"content", "output", "file", "input_audio"})
"""Keys whose values may be parts themselves, or say of which file one is."""
DATA = re.compile(r"data:(?!//)", re.IGNORECASE)
NAME = re.compile(HOST)
ADDRESS = re.compile(r"https?://[!-~]+", re.IGNORECASE)
PORTS = (None, 80, 443)

Path = tuple[str | int, ...]


def check_messages(field: str, messages: object, fetch: Sequence[str]) -> list[object]:
    """Raises InvalidRequest, `param` being the field, for the first part of a message that does not pass.
    Returns the messages that are more than a role and a text."""
    odd: list[object] = []
    if isinstance(messages, dict):
        messages = [messages]
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if type(message) is dict:
            if type(message.get("content")) is str and type(message.get("role")) is str and len(message) == 2:
                continue
            _part(message, (field, index), fetch)
        else:
            _parts(message, (field, index), fetch)
        odd.append(message)
    return odd


def _parts(parts: object, path: Path, fetch: Sequence[str]) -> None:
    if isinstance(parts, dict):
        _part(parts, path, fetch)
    elif isinstance(parts, list):
        for index, part in enumerate(parts):
            _parts(part, (*path, index), fetch)


def _part(part: dict[str, object], path: Path, fetch: Sequence[str]) -> None:
    kind = part.get("type")
    if isinstance(kind, str) and kind.endswith("_embeds"):
        raise _refused((*path, "type"), f"`{kind[:32]}` is not accepted: send text, or the bytes of a medium")
    for name, value in part.items():
        if name in HOLDERS:
            _parts(value, (*path, name), fetch)
        elif name in PLAIN or value is None:
            continue
        elif name.endswith("_embeds") or name == "image_pil":
            raise _refused((*path, name), "is not accepted: send text, or the bytes of a medium")
        elif name.endswith("_url") or name == "source":
            _medium(value, (*path, name), fetch)


def _medium(value: object, path: Path, fetch: Sequence[str]) -> None:
    if isinstance(value, dict):
        # OpenAI's {"url": …}; Anthropic's source, which may hold bytes, or a list of blocks.
        if value.get("url") is not None:
            _address(value["url"], (*path, "url"), fetch)
        elif path[-1] != "source":
            raise _refused(path, "must have a `url`")
        _parts(value.get("content"), (*path, "content"), fetch)
    elif path[-1] != "source" or isinstance(value, list):
        _address(value, path, fetch)


def _address(value: object, path: Path, fetch: Sequence[str]) -> None:
    if not isinstance(value, str):
        raise _refused(path, "must be a string")
    if DATA.match(value):
        return
    host = _host(value)
    if host is None or not any(_matches(host, one) for one in fetch):
        raise _refused(
            path, "must be a data: URL: engines fetch nothing from addresses that clients send (bounds.fetch)"
        )


def _host(address: str) -> str | None:
    """The host of an address that every reader of URLs takes for the same, and that is no IP literal."""
    if not ADDRESS.fullmatch(address) or "\\" in address:
        return None
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        return None
    host = parts.hostname or ""
    if "@" in parts.netloc or "%" in parts.netloc or port not in PORTS or not NAME.fullmatch(host):
        return None
    return host


def _matches(host: str, allowed: str) -> bool:
    return allowed in ("*", host) or (allowed.startswith("*.") and host.endswith(allowed[1:]))


def _refused(path: Path, message: str) -> InvalidRequest:
    return InvalidRequest(f"{shown(path)} {message}", param=str(path[0]))
