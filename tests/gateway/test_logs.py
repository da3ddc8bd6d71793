"""Logs: a line for each request, JSON for machines, text for people, and nothing that a client said."""

import asyncio
import contextlib
import errno
import fcntl
import io
import json
import logging
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import pytest

from gateway.config import LogsPart
from gateway.relay.sse import Usage
from gateway.telemetry import logs
from gateway.telemetry.logs import AccessLog, configure, line_of
from gateway.telemetry.output import mixes
from gateway.telemetry.record import Record, TraceIds
from tests.support.client import ask, until
from tests.support.collector import over_http
from tests.support.engine import FakeEngine, engines, reply, reset, stream
from tests.support.serving import process, serving
from tests.support.shapes import CHAT

MARKED = "eagle-lands-at-midnight"
KEYS = "keys: [{name: ci, key: sk-secret}]"


@pytest.fixture
def _loggers() -> Iterator[None]:
    """Put back what `configure` changes for the whole process."""
    loggers = [logging.getLogger(name) for name in ("", "dualgauge", *logs.QUIET)]
    before = [(one, one.level, list(one.handlers)) for one in loggers]
    yield
    for one, level, handlers in before:
        one.setLevel(level)
        one.handlers[:] = handlers


class Log:
    """A file that stands for standard error, `out`."""

    def __init__(self, file: Path, out: TextIO) -> None:
        self._file = file
        self.out = out

    def text(self) -> str:
        """What is there when all messages have been written."""
        logging.getLogger().handlers[0].flush()
        return self._file.read_text()

    def lines(self) -> list[str]:
        return self.text().split("\n")[:-1]


@pytest.fixture
def log(tmp_path: Path, _loggers: None) -> Iterator[Log]:
    file = tmp_path / "log"
    with file.open("w") as out:
        yield Log(file, out)


def record(**changed: Any) -> Record:
    one = Record("req_1", 10.0, 1_790_000_000_000_000_000, "POST", "/v1/chat/completions", ended=10.5)
    for name, value in changed.items():
        setattr(one, name, value)
    return one


async def test_a_process_writes_json_lines(tmp_path: Path) -> None:
    engine = FakeEngine(stream(CHAT.stream))
    async with engines(engine):
        with process(tmp_path, {"fast": engine}, keys=KEYS) as served:

            def lines(logger: str) -> list[dict[str, Any]]:
                # A line that is being written is not whole yet.
                told = [json.loads(line) for line in served.log.read_text().split("\n")[:-1]]
                return [line for line in told if line["logger"] == logger]

            await until(lambda: any("-> ready" in line["event"] for line in lines("dualgauge.engines")))
            body, headers = CHAT.ask(stream=True), {"x-api-key": "sk-secret"}
            answer = await ask(served.port, CHAT.path, body, headers=headers)
            await ask(served.port, "/healthz", method="GET")
            await ask(served.port, "/nope", method="GET")
            await until(lambda: len(lines("dualgauge.access")) == 2)
            (line, unknown) = lines("dualgauge.access")
            assert datetime.fromisoformat(line.pop("timestamp")).tzinfo is not None
            seconds = [line.pop(name) for name in ("asked_seconds", "first_token_seconds", "seconds")]
            assert seconds == sorted(seconds)
            assert line.pop("decide_seconds") > 0
            assert line == {
                "level": "info",
                "logger": "dualgauge.access",
                "event": "request",
                "request_id": answer.headers["x-request-id"],
                "method": "POST",
                "route": "/v1/chat/completions",
                "status": 200,
                "outcome": "ok",
                "dialect": "openai.chat",
                "tenant": "ci",
                "model": "smollm2",
                "tier": "fast",
                "engine": "fast-0",
                "precision": "awq",
                "rule": "everything else",
                "reason": "no rule before it held",
                "stream": True,
                "attempts": 1,
                "prompt_tokens": CHAT.stream_usage.prompt,
                "completion_tokens": CHAT.stream_usage.completion,
            }
            assert (unknown["route"], unknown["status"], unknown["outcome"]) == ("", 404, "client_error")


async def test_no_word_of_a_client_is_in_logs_traces_or_metrics(tmp_path: Path) -> None:
    """Nor of an engine: whatever becomes of the requests."""
    text = {"choices": [{"message": {"content": MARKED}}], "error": {"message": MARKED}}
    engine = FakeEngine(reply(text))
    scripts = [
        reply(text),
        reply(text, 400),
        reply(text, 500),
        reply(MARKED.encode()),
        stream(b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % MARKED.encode()),
        stream(b'data: {"x": "%b"}\n\n' % MARKED.encode(), end="reset"),
        reset,
    ]
    async with engines(engine), over_http() as collector:
        telemetry = {"otlp": collector.url, "sample": 1}
        with process(
            tmp_path, {"fast": engine}, keys=KEYS, telemetry=telemetry, logs={"level": "debug"}
        ) as served:
            await until(lambda: "-> ready" in served.log.read_text())
            for script in scripts:
                engine.scripts.append(script)
                body = CHAT.ask(
                    messages=[{"role": "user", "content": MARKED}],
                    metadata={"note": MARKED},
                    stream=True,
                )
                for key in ("sk-secret", "sk-wrong"):
                    headers = {"authorization": f"Bearer {key}", "x-note": MARKED}
                    await ask(served.port, CHAT.path, body, headers=headers)
            broken = b'{"model": "smollm2", "messages": ["' + MARKED.encode()
            await ask(served.port, CHAT.path, broken, headers={"x-api-key": "sk-secret"})
            metrics = (await ask(served.admin, "/metrics", method="GET")).body.decode()
            asked = 2 * len(scripts) + 1
            await until(lambda: served.log.read_text().count('"dualgauge.access"') == asked)
            await until(lambda: len(collector.spans()) >= 2 * len(scripts))
            for told in (served.log.read_text(), metrics, *(str(span) for span in collector.spans())):
                assert MARKED not in told
                assert "sk-secret" not in told
                assert "sk-wrong" not in told


@pytest.mark.usefixtures("_loggers")
def test_on_a_terminal_lines_are_coloured_text() -> None:
    """In a process of its own, whose standard error is a terminal."""
    code = """
import logging
from gateway.config import LogsPart
from gateway.telemetry.logs import configure
from gateway.telemetry.record import Record
access = configure(LogsPart())
access.start()
access.record(Record("req_1", 0.0, 0, "POST", "/v1/chat/completions", status=200, tier="fast", ended=0.5))
access.close()
logging.getLogger("dualgauge.gateway").warning("take care")
"""
    main, terminal = pty.openpty()
    env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    subprocess.run([sys.executable, "-c", code], stderr=terminal, check=True, env=env, timeout=60)
    os.close(terminal)
    told = os.read(main, 1 << 16).decode()
    os.close(main)
    first, second = told.splitlines()
    assert "\x1b[" in first
    assert "POST /v1/chat/completions 200" in first
    assert "fast" in first
    assert "take care" in second


@pytest.mark.parametrize(
    ("part", "outcomes"),
    [
        (LogsPart(format="json"), ["ok", "timeout"]),
        (LogsPart(format="json", level="warning"), ["timeout"]),
    ],
)
def test_a_level_of_warning_leaves_requests_that_failed(
    log: Log, part: LogsPart, outcomes: list[str]
) -> None:
    access = configure(part, log.out)
    assert access is not None
    access.start()
    access.record(record())
    access.record(record(outcome="timeout"))
    access.close()
    assert [json.loads(line)["outcome"] for line in log.lines()] == outcomes


@pytest.mark.parametrize("part", [LogsPart(access=False), LogsPart(level="error")])
def test_there_may_be_no_access_log(log: Log, part: LogsPart) -> None:
    assert configure(part, log.out) is None


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_traceback_has_no_values_of_variables(log: Log, form: Any) -> None:
    configure(LogsPart(format=form), log.out)

    def failing(prompt: str) -> None:
        raise ValueError("no")

    try:
        failing(MARKED)
    except ValueError:
        logging.getLogger("dualgauge.gateway").exception("it failed")
    assert "ValueError: no" in log.text()
    assert MARKED not in log.text()


def test_other_loggers_write_in_the_same_way(log: Log) -> None:
    configure(LogsPart(format="json", level="debug"), log.out)
    logging.getLogger("uvicorn.error").error("a %s", "b")
    logging.getLogger("uvicorn.error").info("started")
    logging.getLogger("urllib3").debug("GET /")
    logging.getLogger("dualgauge.x").debug("fine")
    told = [json.loads(line) for line in log.lines()]
    assert [(line["logger"], line["level"], line["event"]) for line in told] == [
        ("uvicorn.error", "error", "a b"),
        ("dualgauge.x", "debug", "fine"),
    ]


def test_a_line_names_the_trace_that_is_exported() -> None:
    ids = TraceIds(b"a" * 32, b"b" * 16, None, True)
    assert line_of(record(trace=ids)).trace_id == "a" * 32
    ids.sampled = False
    assert line_of(record(trace=ids)).trace_id == ""


def test_a_line_has_what_is_known() -> None:
    line = line_of(record(usage=Usage(3, 4, 2), asked=10.1, first_token=10.25, queue_seconds=0.05))
    assert (line.prompt_tokens, line.completion_tokens, line.cached_tokens) == (3, 4, 2)
    assert (line.asked_seconds, line.first_token_seconds, line.queue_seconds) == (0.1, 0.25, 0.05)
    assert line.seconds == 0.5


@pytest.mark.parametrize("form", ["json", "console"])
def test_what_others_have_answered_does_not_steer_a_terminal(log: Log, form: Any) -> None:
    configure(LogsPart(format=form), log.out)
    logging.getLogger("dualgauge.traces").warning("it said: %s", "\x1b[2J\x9b31m\x07\x7f\r over\ttab")
    told = log.text().encode()
    assert b"\x1b[2J" not in told
    assert b"tab" in told
    if form == "console":
        assert rb"\x1b[2J\x9b31m\x07\x7f\x0d over" in told


@pytest.mark.parametrize("form", ["json", "console"])
def test_the_name_of_a_file_need_not_be_text(log: Log, form: Any) -> None:
    configure(LogsPart(format=form), log.out)
    logging.getLogger("dualgauge.gateway").warning("%s was changed", os.fsdecode(b"/etc/\xff.yaml"))
    (line,) = log.lines()
    assert "was changed" in line
    assert "udcff.yaml" in line


@contextlib.contextmanager
def full_pipe() -> Iterator[tuple[int, TextIO]]:
    """A pipe that nobody reads, filled to the brim: its reading end, and the one that stands for standard
    error."""
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing, "w") as out:
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
        os.write(writing, b"x" * 4095 + b"\n")
        yield reading, out


def read_all(fd: int, end: str) -> str:
    """What comes until it ends so."""
    told = b""
    while not told.endswith(end.encode()):
        told += os.read(fd, 1 << 16)
    return told.decode()


@pytest.mark.usefixtures("_loggers")
def test_nobody_waits_for_a_reader_that_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_MESSAGES", 3)
    monkeypatch.setattr(logs, "END_SECONDS", 0.1)
    gateway = logging.getLogger("dualgauge.gateway")
    with full_pipe() as (reading, out):
        access = configure(LogsPart(format="json"), out)
        assert access is not None
        access.start()
        access.record(record())
        access.close()
        for number in range(10):
            gateway.warning("message %d", number)
        logging.getLogger().handlers[0].flush()
        told = read_all(reading, "}\n")
        while "could not be written" not in told:
            told += read_all(reading, "}\n")
    lines = [json.loads(line) for line in told.split("\n")[1:-1]]
    assert lines[0]["event"] == "request"
    kept = [line["event"] for line in lines if line["event"].startswith("message")]
    assert kept == [f"message {number}" for number in range(len(kept))]
    assert f"{10 - len(kept)} messages before this one could not be written" in lines[-1]["event"]


@pytest.mark.usefixtures("_loggers")
def test_a_file_that_does_not_block_is_waited_for() -> None:
    with full_pipe() as (reading, out):
        os.set_blocking(out.fileno(), False)
        configure(LogsPart(format="json"), out)
        logging.getLogger("dualgauge.gateway").warning("take care")
        told = read_all(reading, "}\n")
    assert json.loads(told.split("\n")[1])["event"] == "take care"


async def test_a_gateway_serves_and_ends_whose_log_is_not_read(tmp_path: Path) -> None:
    engine = FakeEngine(reply(CHAT.reply))
    async with engines(engine):
        with full_pipe() as (_, out), process(tmp_path, {"fast": engine}, output=out) as served:
            async with asyncio.timeout(20):
                while (await ask(served.port, CHAT.path, CHAT.ask())).status != 200:
                    await asyncio.sleep(0.01)
                served.process.terminate()
                assert await asyncio.to_thread(served.process.wait) == 0


def test_a_line_that_a_full_disk_has_cut_is_no_part_of_the_next(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(LogsPart(format="json"), log.out)
    write, full = os.write, iter([False, True])

    def short(fd: int, data: Any) -> int:
        match next(full, None):
            case False:
                return write(fd, data[:10])
            case True:
                raise OSError(errno.ENOSPC, "No space left on device")
            case _:
                return write(fd, data)

    monkeypatch.setattr(os, "write", short)
    for number in range(2):
        logging.getLogger("dualgauge.gateway").warning("message %d", number)
    cut, second, lost = log.lines()
    assert len(cut) == 10
    assert json.loads(second)["event"] == "message 1"
    assert json.loads(lost)["event"] == "1 messages before this one could not be written"


@pytest.mark.usefixtures("_loggers")
def test_what_somebody_has_put_in_the_place_of_standard_error_is_written_to() -> None:
    out = io.StringIO()
    configure(LogsPart(format="json"), out)
    logging.getLogger("dualgauge.gateway").warning("take care")
    logging.getLogger().handlers[0].flush()
    assert json.loads(out.getvalue())["event"] == "take care"


def test_without_a_standard_error_it_starts_all_the_same() -> None:
    code = """
import logging
from gateway.config import LogsPart
from gateway.telemetry.logs import configure
assert configure(LogsPart()) is not None
logging.getLogger("dualgauge.gateway").warning("nobody hears it")
"""
    argv = ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, code]
    subprocess.run(argv, check=True, timeout=60)


def test_lines_that_cannot_be_written_are_counted() -> None:
    def write(data: bytes) -> None:
        raise BrokenPipeError

    access = AccessLog(write, lambda lines: b"x\n" * len(lines))
    access.start()
    for _ in range(3):
        access.record(record())
    access.close()
    assert access.dropped == 3


def test_the_queue_of_lines_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_QUEUE", 2)
    written: list[bytes] = []
    access = AccessLog(written.append, lambda lines: b"x\n" * len(lines))
    for _ in range(3):
        access.record(record())
    access.start()
    access.close()
    assert (b"".join(written), access.dropped) == (b"x\nx\n", 1)


def test_a_line_that_cannot_be_rendered_takes_no_other_with_it() -> None:
    written: list[bytes] = []
    access = AccessLog(written.append, logs.encode_lines)
    for model in ("a", "\ud800", "b"):
        access.record(record(model=model))
    access.start()
    access.close()
    shown = [json.loads(line)["model"] for line in b"".join(written).splitlines()]
    assert (shown, access.dropped) == (["a", "b"], 1)


@pytest.mark.parametrize(("mixed", "writes"), [(True, 3), (False, 1)])
def test_lines_of_several_processes_go_whole(mixed: bool, writes: int) -> None:
    written: list[bytes] = []
    access = AccessLog(written.append, lambda lines: b"%b\n" % (b"x" * 3000) * len(lines), mixed=mixed)
    access.shared = True
    for _ in range(3):
        access.record(record())
    access.start()
    access.close()
    assert len(written) == writes
    assert b"".join(written).splitlines() == [b"x" * 3000] * 3


def test_writes_to_a_file_are_whole(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        assert not mixes(file)


def test_writes_to_a_pipe_may_be_mixed() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing, "w") as pipe:
        assert mixes(pipe)


def test_writes_to_what_is_no_file_may_be_mixed() -> None:
    assert mixes(io.StringIO())


def test_lines_are_rendered_on_the_thread() -> None:
    written: list[bytes] = []
    access = AccessLog(written.append, lambda lines: threading.current_thread().name.encode())
    access.start()
    access.record(record())
    access.close()
    assert written == [b"access-log"]


async def test_lost_lines_are_a_metric(tmp_path: Path) -> None:
    async with serving(tmp_path, {"fast": "http://127.0.0.1:9"}, wait=False) as served:
        assert "dualgauge_access_log_dropped_total 0.0" in served.metrics().decode()
