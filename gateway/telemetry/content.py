"""Prompts and replies as GenAI messages, for traces that are to hold them (`telemetry.capture_content`).

Everything is bounded: a text is cut, a reply of which too much came is kept up to there.
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/#capturing-instructions-inputs-and-outputs
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from gateway.relay.sse import ReadUsage, Tap, decode_event, event_data, split_events
from policies.facts import Turn

MAX_TEXT = 16_000
"""Characters of one attribute's texts."""
MAX_REPLY = 512 << 10
"""Bytes of a reply that are kept: events carry some 20 times the bytes of their text."""

encode = msgspec.json.Encoder().encode


class ReplyCopy:
    """The first `MAX_REPLY` bytes of one reply."""

    __slots__ = ("_parts", "_size", "events")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self.events = False

    def add(self, data: bytes) -> None:
        if self._size < MAX_REPLY:
            self._parts.append(data[: MAX_REPLY - self._size])
            self._size += len(data)

    @property
    def cut(self) -> bool:
        return self._size > MAX_REPLY

    def data(self) -> bytes:
        return b"".join(self._parts)


class CopyingTap(Tap):
    """A tap that also keeps what goes to the client."""

    __slots__ = ("_copy",)

    def __init__(self, read_usage: ReadUsage, *, marker: bytes, strip: bool, copy: ReplyCopy) -> None:
        super().__init__(read_usage, marker=marker, strip=strip)
        self._copy = copy
        copy.events = True

    def feed(self, data: bytes) -> bytes:
        data = super().feed(data)
        self._copy.add(data)
        return data

    def passes(self, data: bytes) -> bool:
        """False: `data` has a chunk's framing, which is no part of what is kept."""
        return False

    def finish(self) -> bytes:
        data = super().finish()
        self._copy.add(data)
        return data


class Budget:
    """Characters that are left; `cut` tells whether something did not fit."""

    def __init__(self, left: int = MAX_TEXT) -> None:
        self._left = left
        self.cut = False

    def take(self, text: str) -> str:
        kept = text[: self._left]
        self._left -= len(kept)
        self.cut = self.cut or len(kept) < len(text)
        return kept


def prompt_attributes(turns: Iterable[Turn]) -> dict[str, str | bool]:
    """What was asked: system turns apart from the others."""
    budget, system, messages = Budget(), [], []
    for turn in turns:
        text = budget.take(turn.text)
        if turn.text and not text:
            break
        part = {"type": "text", "content": text}
        if turn.role == "system":
            system.append(part)
        else:
            messages.append({"role": turn.role, "parts": [part]})
    found: dict[str, str | bool] = {}
    if system:
        found["gen_ai.system_instructions"] = encode(system).decode()
    if messages:
        found["gen_ai.input.messages"] = encode(messages).decode()
    if budget.cut:
        found["dualgauge.content_cut"] = True
    return found


def reply_attributes(copy: ReplyCopy) -> dict[str, str | bool]:
    """What was answered, read from a reply's bytes, whatever its shape; empty where there is no text."""
    budget = Budget()
    texts = _streamed(copy.data()) if copy.events else _whole(copy.data())
    messages: list[dict[str, object]] = []
    for index in sorted(texts):
        part = {"type": "text", "content": budget.take("".join(texts[index]))}
        messages.append({"role": "assistant", "parts": [part]})
    if not messages:
        return {}
    found: dict[str, str | bool] = {"gen_ai.output.messages": encode(messages).decode()}
    if budget.cut or copy.cut:
        found["dualgauge.content_cut"] = True
    return found


Texts = dict[int, list[str]]
"""The parts of each answer, by its index."""


def _streamed(data: bytes) -> Texts:
    texts: Texts = {}
    for event in split_events(data):
        try:
            body = decode_event(event_data(event))
        except (msgspec.DecodeError, RecursionError):
            continue
        delta = body.get("delta")
        if isinstance(delta, str):  # response.output_text.delta
            if str(body.get("type", "")).startswith("response.output_text"):
                texts.setdefault(0, []).append(delta)
        elif isinstance(delta, Mapping):  # content_block_delta
            _add(texts, 0, delta.get("text"))
        else:
            _choices(texts, body, "delta")
    return texts


def _whole(data: bytes) -> Texts:
    texts: Texts = {}
    try:
        body = decode_event(data)
    except (msgspec.DecodeError, RecursionError):
        return texts
    _choices(texts, body, "message")
    _add(texts, 0, body.get("content"))  # messages
    for item in _list(body.get("output")):  # responses
        if isinstance(item, Mapping):
            _add(texts, 0, item.get("content"))
    return texts


def _choices(texts: Texts, body: Mapping[str, Any], inner: str) -> None:
    for choice in _list(body.get("choices")):
        if not isinstance(choice, Mapping):
            continue
        index = choice.get("index")
        message = choice.get(inner)
        content = message.get("content") if isinstance(message, Mapping) else choice.get("text")
        _add(texts, index if isinstance(index, int) else 0, content)


def _add(texts: Texts, index: int, content: object) -> None:
    """A text, or the texts of a list of blocks."""
    if isinstance(content, str):
        if content:
            texts.setdefault(index, []).append(content)
        return
    for block in _list(content):
        if isinstance(block, Mapping) and isinstance(block.get("text"), str):
            texts.setdefault(index, []).append(block["text"])


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
