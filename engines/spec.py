"""One engine as an operator declares it: an immutable value, no behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

Kind = Literal["vllm", "llama.cpp", "external", "hosted"]
KINDS: tuple[Kind, ...] = ("vllm", "llama.cpp", "external", "hosted")
NO_ENV: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. `first_byte` runs from the request's last byte to the reply's first, `idle` between bytes."""

    connect: float = 2.0
    first_byte: float = 120.0
    idle: float = 60.0
    total: float = 1800.0


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """A model at one precision, at one URL.

    `url` is `http://host:port`, `https://host:port` or `unix:/path/to.sock`; for an engine that we launch it
    is made from `port`. `served_model` is the name the engine answers to. `share` is the part of the GPU's
    memory (0..1), None where it is to be planned. `model` is a hub name or an absolute folder. `priorities`
    says that the engine schedules by priority: others refuse a request that has one. `allow` is what is not
    refused in the model's folder (`engines.contents`), `manifest` the `sha256:…` that its manifest must have.
    `binary` is a llama-server of the operator's own. Of a hosted engine `model` is LiteLLM's name for it,
    `api_base` the provider's address where it is not the usual one, and `url` is empty until the gateway has
    given it a socket (`engines.hosted`).
    """

    name: str
    tier: str
    kind: Kind
    url: str
    served_model: str
    precision: str
    model: str | None = None
    gpu: int | None = None
    share: float | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=lambda: NO_ENV)
    api_key: str | None = field(default=None, repr=False)
    timeouts: Timeouts = Timeouts()
    priorities: bool = False
    allow: frozenset[str] = frozenset()
    manifest: str | None = None
    api_base: str | None = None
    binary: str | None = None

    @property
    def launched(self) -> bool:
        """Whether Dualgauge starts this engine itself."""
        return self.kind in ("vllm", "llama.cpp")


def bearer(key: str | None) -> dict[str, str]:
    """The header of a request that shows this key; none without one."""
    return {"authorization": f"Bearer {key}"} if key else {}
