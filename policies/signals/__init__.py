"""Signals: facts measured from one request. Pure functions; each is computed at most once a request."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from policies.signals.content import CONTENT_SIGNALS
from policies.signals.language import LANGUAGE_SIGNAL
from policies.signals.request import DIALECTS, REQUEST_SIGNALS
from policies.signals.sample import SAMPLE_SIGNALS
from policies.signals.signal import Kind, Memo, Signal

SIGNALS: Mapping[str, Signal] = MappingProxyType(
    {signal.name: signal for signal in (*CONTENT_SIGNALS, LANGUAGE_SIGNAL, *REQUEST_SIGNALS, *SAMPLE_SIGNALS)}
)

__all__ = ["DIALECTS", "SIGNALS", "Kind", "Memo", "Signal"]
