"""Known vulnerabilities of the servers behind the gateway, by version: what an operator should hear first.

A selection that ships with each release, not a scanner: what can reach a server through the gateway, and what
lets others past it. `SOURCE` has each one's own page.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Product = Literal["vllm", "redis"]
SOURCE = "https://nvd.nist.gov/vuln/detail/"
_VERSION = re.compile(r"v?(\d+(?:\.\d+)*)(.*)")
_BEFORE = re.compile(r"[.-]?(a|b|rc|dev)\d*")
_PARTS = 4


@dataclass(frozen=True, slots=True)
class Advisory:
    """`affected` are ranges of versions: from the first one, without the second, which has the fix."""

    cve: str
    product: Product
    affected: tuple[tuple[str, str], ...]
    what: str

    @property
    def source(self) -> str:
        return SOURCE + self.cve


ADVISORIES = (
    Advisory(
        "CVE-2026-48746",
        "vllm",
        (("0.3.0", "0.22.0"),),
        "a crafted Host header gets past --api-key: whoever reaches the port can use the engine",
    ),
    Advisory("CVE-2026-44223", "vllm", (("0.18.0", "0.20.0"),), "penalties crash it where it speculates"),
    Advisory(
        "CVE-2026-27893",
        "vllm",
        (("0.10.1", "0.18.0"),),
        "parts of a model run code of its repository although trust_remote_code is off",
    ),
    Advisory("CVE-2026-22778", "vllm", (("0.8.3", "0.14.1"),), "a video runs code in the engine"),
    Advisory("CVE-2026-24779", "vllm", (("0.1.0", "0.14.1"),), "an image's address leads into your network"),
    Advisory("CVE-2025-62164", "vllm", (("0.10.2", "0.11.1"),), "prompt embeddings overwrite its memory"),
    Advisory("CVE-2025-62426", "vllm", (("0.5.5", "0.11.1"),), "chat_template_kwargs stall it"),
    Advisory(
        "CVE-2025-59425", "vllm", (("0.1.0", "0.11.0"),), "--api-key can be guessed by the time it takes"
    ),
    Advisory("CVE-2025-48956", "vllm", (("0.1.0", "0.10.1.1"),), "a large header exhausts its memory"),
    Advisory("CVE-2025-48944", "vllm", (("0.8.0", "0.9.0"),), "a tool's schema crashes it"),
    Advisory("CVE-2026-23479", "redis", (("7.2.0", "8.6.3"),), "who may log in can run code in it"),
    Advisory(
        "CVE-2025-49844",
        "redis",
        (("0", "6.2.20"), ("7.0", "7.2.11"), ("7.4.0", "7.4.6"), ("8.0.0", "8.0.4"), ("8.2.0", "8.2.2")),
        "a Lua script can run code in it",
    ),
)


def known(product: Product, version: str) -> tuple[Advisory, ...]:
    """What is known of this version; nothing of one that is no number (a build of somebody's own)."""
    at = _parsed(version)
    if at is None:
        return ()
    return tuple(
        advisory
        for advisory in ADVISORIES
        if advisory.product == product
        and any(_bound(first) <= at < _bound(fixed) for first, fixed in advisory.affected)
    )


def fixed(advisories: tuple[Advisory, ...], version: str) -> str:
    """The lowest version that has the fixes of all of them, for one that is affected by each."""
    at = _bound(version)
    ends = [
        end
        for advisory in advisories
        for first, end in advisory.affected
        if _bound(first) <= at < _bound(end)
    ]
    return max(ends, key=_bound)


def _bound(version: str) -> tuple[int, ...]:
    parsed = _parsed(version)
    assert parsed is not None
    return parsed


def _parsed(version: str) -> tuple[int, ...] | None:
    """Numbers that order as versions do; one before a release (rc, dev) stands right before it."""
    match = _VERSION.fullmatch(version.strip())
    if match is None:
        return None
    numbers = [int(part) for part in match[1].split(".")][:_PARTS]
    return (*numbers, *[0] * (_PARTS - len(numbers)), 0 if _BEFORE.match(match[2]) else 1)
