"""Signals that stand in the request itself: nothing is estimated."""

from __future__ import annotations

from policies.facts import Facts
from policies.signals.signal import Memo, Signal


def _output_tokens(facts: Facts, _memo: Memo) -> int | None:
    return facts.output_tokens


def _turns(facts: Facts, _memo: Memo) -> int:
    return sum(turn.role == "user" for turn in facts.turns)


def _has_tools(facts: Facts, _memo: Memo) -> bool:
    return facts.has_tools


def _tool_results(facts: Facts, _memo: Memo) -> int:
    return facts.conversation.tool_results


def _structured(facts: Facts, _memo: Memo) -> bool:
    return facts.structured


def _images(facts: Facts, _memo: Memo) -> int:
    return facts.conversation.images


def _temperature(facts: Facts, _memo: Memo) -> float | None:
    return facts.temperature


def _stream(facts: Facts, _memo: Memo) -> bool:
    return facts.stream


def _model(facts: Facts, _memo: Memo) -> str:
    return facts.model


def _dialect(facts: Facts, _memo: Memo) -> str:
    return facts.dialect


def _tenant(facts: Facts, _memo: Memo) -> str:
    return facts.tenant


DIALECTS = (
    "openai.chat",
    "openai.completions",
    "openai.responses",
    "openai.embeddings",
    "anthropic.messages",
)

REQUEST_SIGNALS = (
    Signal("output_tokens", "count", "completion tokens asked for, if bounded", _output_tokens),
    Signal("turns", "count", "user turns in the conversation", _turns, reads_text=True),
    Signal("has_tools", "flag", "whether tools are offered to the model", _has_tools),
    Signal("tool_results", "count", "tool results in the conversation", _tool_results, reads_text=True),
    Signal("structured", "flag", "whether the output is held to a schema or grammar", _structured),
    Signal("images", "count", "images in the conversation", _images, reads_text=True),
    Signal("temperature", "number", "sampling temperature; unset where none is given", _temperature),
    Signal("stream", "flag", "whether the reply is streamed", _stream),
    Signal("model", "text", "the model name asked for", _model),
    Signal("dialect", "text", "the API shape of the request", _dialect, values=DIALECTS),
    Signal("tenant", "text", "the public name of the caller's key", _tenant),
)
