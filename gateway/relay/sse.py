"""What is read from a stream on its way through: event boundaries, and usage. No event is parsed unless it
names usage; no byte is changed unless a usage chunk that the gateway itself asked for is taken out.

Pure and synchronous: `feed(bytes) -> bytes to forward`, `finish() -> the rest`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

import msgspec

# An event longer than this is passed on in parts: a bound on memory matters more than whole events.
HOLD_LIMIT = 1 << 20
# Without the colon, which may stand apart. Inside a text its quotes are escaped: it does not match there.
USAGE_KEY = b'"usage"'
_BLANK_LINE = re.compile(rb"\n\n|\n\r\n|\r\r")


class Usage(msgspec.Struct):
    """Tokens as an engine counts them; `cached` is the part of `prompt` that came from its prefix cache."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0


ReadUsage = Callable[[dict[str, object], Usage | None], Usage | None]
decode_event = msgspec.json.Decoder(dict[str, object]).decode


def boundary(data: bytes) -> int:
    """The offset just behind the last blank line of `data`, 0 where there is none.

    Lines may end in LF, CRLF or CR (WHATWG HTML, section 9.2.6 "Interpreting an event stream").
    """
    lf = data.rfind(b"\n\n") + 2
    crlf = data.rfind(b"\n\r\n") + 3
    cr = data.rfind(b"\r\r") + 2
    return max(lf if lf > 1 else 0, crlf if crlf > 2 else 0, cr if cr > 1 else 0)


def split_events(data: bytes) -> list[bytes]:
    """Whole events, each with its blank line; `data` ends on a boundary."""
    ends = [match.end() for match in _BLANK_LINE.finditer(data)]
    cuts = [0, *ends]
    if cuts[-1] < len(data):
        cuts.append(len(data))
    return [data[start:end] for start, end in pairwise(cuts)]


def event_data(event: bytes) -> bytes:
    """The value of an event's `data` field, its lines joined with LF."""
    lines = event.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    return b"\n".join(
        line[6:] if line.startswith(b"data: ") else line[5:] for line in lines if line.startswith(b"data:")
    )


class Tap:
    """Follows one stream. `strip` removes the usage chunk (`choices` empty) that was injected.

    `tokens` counts what `marker` marks (an event of one token each), for streams that end without usage.
    `torn` is true while a part of an unfinished event has been forwarded.
    """

    __slots__ = ("_held", "_marker", "_read_usage", "_strip", "tokens", "torn", "usage")

    def __init__(self, read_usage: ReadUsage, *, marker: bytes, strip: bool) -> None:
        self._held = b""
        self._read_usage = read_usage
        self._marker = marker
        self._strip = strip
        self.usage: Usage | None = None
        self.tokens = 0
        self.torn = False

    def feed(self, data: bytes) -> bytes:
        if self._held:
            data = self._held + data
            self._held = b""
        if not data.endswith(b"\n\n"):
            end = boundary(data)
            if end < len(data):
                if len(data) - end > HOLD_LIMIT:
                    self.torn = True
                    return self._whole(data[:end]) + data[end:] if end else data
                self._held = data[end:]
                data = data[:end]
                if not data:
                    return b""
        self.torn = False
        return self._whole(data)

    def passes(self, data: bytes) -> bool:
        """Whether whole events may go on as they are, none being held; they are counted where they may."""
        if self._held or self.torn or USAGE_KEY in data:
            return False
        self.tokens += data.count(self._marker)
        return True

    def _whole(self, data: bytes) -> bytes:
        self.tokens += data.count(self._marker)
        if USAGE_KEY in data:
            return self._usage_in(data)
        return data

    def finish(self) -> bytes:
        """What was held when the engine ended its stream properly without a last blank line."""
        rest, self._held = self._held, b""
        return self._usage_in(rest) if USAGE_KEY in rest else rest

    def _usage_in(self, data: bytes) -> bytes:
        kept: list[bytes] = []
        for event in split_events(data):
            if USAGE_KEY in event and self._is_injected(event):
                # Line ends before it, of a blank line that came in parts, are not of what was injected.
                kept.append(event[: len(event) - len(event.lstrip(b"\r\n"))])
            else:
                kept.append(event)
        return b"".join(kept)

    def _is_injected(self, event: bytes) -> bool:
        try:
            body = decode_event(event_data(event))
        except (msgspec.DecodeError, RecursionError):
            return False
        usage = self._read_usage(body, self.usage)
        if usage is None:
            return False
        self.usage = usage
        return self._strip and body.get("choices") == []
