"""What the gateway writes to standard error: JSON objects, a line each, or coloured text for people.

`configure` sets this up for everything that logs in this process; `AccessLog` has a line for each request. No
line holds a prompt, a reply or a key: records have facts only, and tracebacks come without local variables.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from queue import Full, Queue
from typing import Any, TextIO

import msgspec

from gateway.config import LogsPart
from gateway.telemetry.output import mixes, pieces, writing
from gateway.telemetry.record import GOOD, Outcome, Record

QUIET = ("uvicorn", "uvicorn.error")
"""Loggers that say at `info` what ours say already."""
MAX_QUEUE = 10_000
MAX_MESSAGES = 2000
CLOCK = "%H:%M:%S"
BATCH = 2000
"""Lines that are written at once, some 1 MiB: each write gives up the interpreter, and to get it back from a
busy event loop takes far longer than all else."""
EVERY_SECONDS = 0.2
END_SECONDS = 1.0
FLUSH_LOOK = 0.002
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""Characters that terminals obey, and how they are shown."""

encode = msgspec.json.Encoder().encode
encode_lines = msgspec.json.Encoder().encode_lines
Render = Callable[[Sequence["Line"]], bytes]


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

    `render` and `write` are called there, for many lines at once: a thread that made them one by one would
    hand the interpreter to and fro, which takes longer than to make them. With `failures`, only requests that
    failed have a line. `mixed`: what others write there may end up within what is written at once."""

    def __init__(
        self, write: Callable[[bytes], None], render: Render, *, failures: bool = False, mixed: bool = True
    ) -> None:
        self._write = write
        self._render = render
        self._failures = failures
        self._mixed = mixed
        # Other processes write there too, and no line of one may end up within another's.
        self.shared = False
        self._queue: deque[Line] = deque()
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
        self._queue.append(line_of(record))

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
            try:
                data = self._rendered(batch)
                for piece in pieces(data) if self.shared and self._mixed else (data,):
                    self._write(piece)
            except Exception:  # noqa: BLE001 - nobody reads us any more, the disk is full: lines, and nothing else
                self._unwritten += len(batch)

    def _rendered(self, lines: Sequence[Line]) -> bytes:
        """A line that cannot be rendered takes no other with it."""
        try:
            return self._render(lines)
        except Exception:  # noqa: BLE001 - whatever it is: it costs a line, and no thread
            if len(lines) > 1:
                return b"".join([self._rendered([line]) for line in lines])
            self._unwritten += 1
            return b""


class Messages(logging.Handler):
    """What loggers say, written by a thread of its own: else all requests, and the end, would wait for
    whoever reads standard error and has stopped. `write` is called there."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        super().__init__()
        self._write = write
        self._queue: Queue[bytes] = Queue(MAX_MESSAGES)
        # Each is written by one thread alone.
        self._overflown = 0
        self._unwritten = 0
        self._told = 0
        threading.Thread(target=self._run, name="messages", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._queue.put_nowait(f"{self.format(record)}\n".encode())
        except Full:
            self._overflown += 1
        except Exception:  # noqa: BLE001 - as every handler does
            self.handleError(record)

    def flush(self) -> None:
        """Return when all is written, after a second at most; `logging.shutdown` calls it."""
        end = time.monotonic() + END_SECONDS
        while self._queue.unfinished_tasks and time.monotonic() < end:
            time.sleep(FLUSH_LOOK)

    def _run(self) -> None:
        while True:
            message = self._queue.get()
            try:
                self._write(message)
            except OSError:  # nobody reads us any more, or the disk is full
                self._unwritten += 1
            else:
                self._tell_lost()
            self._queue.task_done()

    def _tell_lost(self) -> None:
        lost = self._overflown + self._unwritten
        if lost > self._told:
            told = {"name": "dualgauge.logs", "levelno": logging.WARNING, "levelname": "WARNING"}
            message = "%d messages before this one could not be written"
            self.emit(logging.makeLogRecord({**told, "msg": message, "args": (lost - self._told,)}))
            self._told = lost


def configure(part: LogsPart, stream: TextIO | None = None) -> AccessLog | None:
    """Have all loggers of this process write to `stream` (standard error) as `part` says. The access log,
    where one is wanted, is to be started; its lines go the same way."""
    given = sys.stderr if stream is None else stream
    # Python has none where the process was started without.
    out = Path(os.devnull).open("w") if given is None else given  # noqa: SIM115 - as long as the process
    formatter: logging.Formatter
    render: Render
    if part.format == "console" or (part.format == "auto" and out.isatty()):
        formatter, render = _for_people(colors=out.isatty() and "NO_COLOR" not in os.environ)
    else:
        formatter, render = _JsonLines(), encode_lines
    write = writing(out)
    handler = Messages(write)
    handler.setFormatter(formatter)
    level = logging.getLevelName(part.level.upper())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # What libraries say at `debug` is about themselves, and may hold what went through them.
    root.setLevel(max(level, logging.INFO))
    logging.getLogger("dualgauge").setLevel(level)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    if not part.access or level > logging.WARNING:
        return None
    return AccessLog(write, render, failures=level > logging.INFO, mixed=mixes(out))


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        told = {
            "event": _text(record.getMessage()),
            "level": record.levelname.lower(),
            "logger": record.name,
            "timestamp": datetime.fromtimestamp(record.created, UTC),
        }
        if record.exc_info:
            told["exception"] = _text(self.formatException(record.exc_info))
        return encode(told).decode()


def _text(told: str) -> str:
    """As UTF-8 can say it: the name of a file need not be text."""
    return told.encode("utf-8", "backslashreplace").decode()


def _for_people(*, colors: bool) -> tuple[logging.Formatter, Render]:
    # Brings rich along, and takes a tenth of the start: here, where somebody looks.
    import structlog

    renderer = structlog.dev.ConsoleRenderer(
        colors=colors,
        sort_keys=False,
        # The default shows local variables, which may hold what a client has sent.
        exception_formatter=structlog.dev.plain_traceback,
    )

    def tamed(_: object, __: str, told: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        # What others have answered, a collector say, is not to steer the terminal.
        return {k: _text(v).translate(CONTROLS) if isinstance(v, str) else v for k, v in told.items()}

    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.processors.TimeStamper(fmt=CLOCK, utc=False),
        ],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, tamed, renderer],
    )

    def shown(line: Line) -> str:
        told = msgspec.to_builtins(line, builtin_types=(datetime,))
        told["timestamp"] = told["timestamp"].astimezone().strftime(CLOCK)
        told["event"] = f"{told.pop('method')} {told.pop('route') or '-'} {told.pop('status')}"
        return f"{renderer(None, '', told)}\n"

    return formatter, lambda lines: "".join(map(shown, lines)).encode()
