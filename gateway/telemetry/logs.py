"""What the gateway writes to standard error: JSON objects, a line each, or coloured text for people.

`configure` sets this up for everything that logs in this process; `AccessLog` has a line for each request. No
line holds a prompt, a reply or a key: records have facts only, and tracebacks come without local variables.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TextIO

import msgspec

from gateway.config import LogsPart
from gateway.telemetry.record import GOOD, Outcome, Record

QUIET = ("uvicorn", "uvicorn.error")
"""Loggers that say at `info` what ours say already."""
MAX_QUEUE = 10_000
CLOCK = "%H:%M:%S"
BATCH = 200
"""Lines, some 100 KiB: larger buffers come from the kernel each time, which takes as long as writing."""
EVERY_SECONDS = 0.2
END_SECONDS = 1.0

encode = msgspec.json.Encoder().encode
Render = Callable[["Line"], bytes]


class Line(msgspec.Struct, omit_defaults=True, gc=False):
    """One request that has ended; what is not known is left out. Times are in seconds."""

    timestamp: datetime
    level: str
    logger: str
    event: str
    request_id: str
    method: str
    route: str
    status: int
    outcome: Outcome
    seconds: float
    dialect: str = "none"
    tenant: str = ""
    model: str = ""
    tier: str = ""
    engine: str = ""
    precision: str = ""
    rule: str = ""
    reason: str = ""
    degraded: bool = False
    moved_because: str = ""
    stream: bool = False
    error: str = ""
    attempts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    decide_seconds: float = 0.0
    queue_seconds: float = 0.0
    asked_seconds: float = 0.0
    first_token_seconds: float = 0.0
    trace_id: str = ""


def line_of(record: Record) -> Line:
    """What the access log has of a request; `asked_seconds` and `first_token_seconds` are since it came.

    On the path of every request."""
    started, usage, trace = record.started, record.usage, record.trace
    line = Line(
        datetime.fromtimestamp(record.started_ns / 1e9, UTC),
        "info" if record.outcome in GOOD else "warning",
        "dualgauge.access",
        "request",
        record.request_id,
        record.method,
        record.route,
        record.status,
        record.outcome,
        _microseconds(record.ended - started),
        record.dialect,
        record.tenant,
        record.model,
        record.tier,
        record.engine,
        record.precision,
        record.rule,
        record.reason,
        record.degraded,
        record.moved_because,
        record.stream,
        record.error_code,
        record.attempts,
    )
    if usage is not None:
        line.prompt_tokens, line.cached_tokens = usage.prompt, usage.cached
        line.completion_tokens = usage.completion
    if record.decide_seconds is not None:
        line.decide_seconds = _microseconds(record.decide_seconds)
    if record.queue_seconds:
        line.queue_seconds = _microseconds(record.queue_seconds)
    if record.asked is not None:
        line.asked_seconds = _microseconds(record.asked - started)
    if record.first_token is not None:
        line.first_token_seconds = _microseconds(record.first_token - started)
    if trace is not None and trace.sampled:
        line.trace_id = trace.trace.decode()
    return line


def _microseconds(seconds: float) -> float:
    """Rounded to them: what `round` does, in half its time."""
    return int(seconds * 1e6 + 0.5) / 1e6


class AccessLog:
    """Lines of requests, written by a thread of its own: no request waits for a disk or a pipe.

    A line is made at once, which is cheaper than to hand the interpreter to and fro between the event loop
    and a thread that makes lines. With `late`, for a `render` that takes long, it is made on the thread.
    `write` is called there. With `failures`, only requests that failed have a line."""

    def __init__(
        self, write: Callable[[bytes], None], render: Render, *, late: bool = False, failures: bool = False
    ) -> None:
        self._write = write
        self._render = render
        self._late = late
        self._failures = failures
        # Other processes write there too, and no line of one may end up within another's.
        self.shared = False
        self._queue: deque[Line | bytes] = deque()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        # Each is written by one thread alone.
        self._overflown = 0
        self._unwritten = 0

    @property
    def dropped(self) -> int:
        """Lines that were lost."""
        return self._overflown + self._unwritten

    @property
    def waiting(self) -> int:
        """Lines that are still to be written."""
        return len(self._queue)

    def start(self) -> None:
        self._thread.start()

    def record(self, record: Record) -> None:
        """One request that has ended."""
        if self._failures and record.outcome in GOOD:
            return
        if len(self._queue) >= MAX_QUEUE:
            self._overflown += 1
            return
        line = line_of(record)
        self._queue.append(line if self._late else self._render(line))

    def close(self) -> None:
        """Write what is left, for a second at most."""
        self._end.set()
        self._thread.join(END_SECONDS)

    def _run(self) -> None:
        while not self._end.wait(EVERY_SECONDS):
            self._drain()
        self._drain()

    def _drain(self) -> None:
        queue = self._queue
        while queue:
            batch = [queue.popleft() for _ in range(min(BATCH, len(queue)))]
            lines = [self._render(line) if isinstance(line, Line) else line for line in batch]
            data = b"".join(lines)
            try:
                for piece in pieces(data) if self.shared else (data,):
                    self._write(piece)
            except OSError:  # nobody reads us any more, or the disk is full
                self._unwritten += len(batch)


def configure(part: LogsPart, stream: TextIO | None = None) -> AccessLog | None:
    """Have all loggers of this process write to `stream` (standard error) as `part` says. The access log,
    where one is wanted, is to be started; its lines go the same way."""
    out = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(out)
    formatter: logging.Formatter
    render: Render
    if part.format == "console" or (part.format == "auto" and out.isatty()):
        formatter, render = _for_people(colors=out.isatty() and "NO_COLOR" not in os.environ)
        late = True
    else:
        formatter, render, late = _JsonLines(), _as_json, False
    handler.setFormatter(formatter)
    level = logging.getLevelName(part.level.upper())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # What libraries say at `debug` is about themselves, and may hold what went through them.
    root.setLevel(max(level, logging.INFO))
    logging.getLogger("dualgauge").setLevel(level)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)

    def write(data: bytes) -> None:
        handler.acquire()
        try:
            out.write(data.decode())
            out.flush()
        finally:
            handler.release()

    if not part.access or level > logging.WARNING:
        return None
    return AccessLog(write, render, late=late, failures=level > logging.INFO)


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        told = {
            "event": record.getMessage(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "timestamp": datetime.fromtimestamp(record.created, UTC),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return encode(told).decode()


def pieces(data: bytes) -> Iterator[bytes]:
    """Whole lines, as many in a piece as a pipe takes without mixing them with others'."""
    while len(data) > select.PIPE_BUF:
        end = data.rfind(b"\n", 0, select.PIPE_BUF) + 1 or data.find(b"\n") + 1 or len(data)
        yield data[:end]
        data = data[end:]
    if data:
        yield data


def _as_json(line: Line) -> bytes:
    return encode(line) + b"\n"


def _for_people(*, colors: bool) -> tuple[logging.Formatter, Render]:
    # Brings rich along, and takes a tenth of the start: here, where somebody looks.
    import structlog

    renderer = structlog.dev.ConsoleRenderer(
        colors=colors,
        sort_keys=False,
        # The default shows local variables, which may hold what a client has sent.
        exception_formatter=structlog.dev.plain_traceback,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.processors.TimeStamper(fmt=CLOCK, utc=False),
        ],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
    )

    def render(line: Line) -> bytes:
        told = msgspec.to_builtins(line, builtin_types=(datetime,))
        told["timestamp"] = told["timestamp"].astimezone().strftime(CLOCK)
        told["event"] = f"{told.pop('method')} {told.pop('route') or '-'} {told.pop('status')}"
        return str(renderer(None, "", told)).encode() + b"\n"

    return formatter, render
