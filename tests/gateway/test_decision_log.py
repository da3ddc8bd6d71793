"""The file of the decision log: whole lines only, none lost at a rotation, bounded where the disk is not."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.telemetry import decision_log
from gateway.telemetry.decision_files import MAX_LINE, backwards, lines, older, whole
from gateway.telemetry.decision_log import DecisionLog
from policies.compile import compile_policy
from policies.logged import Fields

RULES = "rules: [{name: a, when: {header: {x-a: [1, 2]}}, send: exact}, {name: b, send: fast}]"
FIELDS = Fields([compile_policy(f"version: 1\n{RULES}", "p")])


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_log, "EVERY_SECONDS", 0.005)
    monkeypatch.setattr(decision_log, "AGAIN_SECONDS", 0.005)


class Lost:
    def __init__(self) -> None:
        self.lines = 0

    def __call__(self, lines: int) -> None:
        self.lines += lines


@pytest.fixture
def lost() -> Lost:
    return Lost()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "decisions.jsonl"


def log(path: Path, lost: Lost, *, size: int = 1 << 20, keep: int = 1000) -> DecisionLog:
    made = DecisionLog(path, size, keep, lost)
    made.start()
    return made


def line(number: int, room: int = 0) -> bytes:
    return json.dumps({"n": number, "room": "x" * room}).encode() + b"\n"


def written(path: Path) -> list[bytes]:
    return [placed.data or b"?" for placed in lines(whole(path), lambda _: None)]


def numbers(path: Path) -> list[int]:
    """What was appended, in the order of the files; every line must be JSON."""
    found = [json.loads(data) for data in written(path)]
    return [one["n"] for one in found if "n" in one]


def eventually(condition: Callable[[], bool], seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_lines_are_written_soon_and_all_of_them_at_the_end(path: Path, lost: Lost) -> None:
    made = log(path, lost)
    made.append(None, line(0))
    eventually(lambda: numbers(path) == [0])
    for number in range(1, 5000):
        made.append(None, line(number))
    made.close(5)
    assert numbers(path) == list(range(5000))
    assert lost.lines == 0


def test_only_the_owner_may_read_it(path: Path, lost: Lost) -> None:
    log(path, lost).close(5)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_rotation_loses_and_tears_nothing(path: Path, lost: Lost) -> None:
    made = log(path, lost, size=1000)
    for number in range(500):
        made.append(FIELDS, line(number, number % 50))
        if number % 100 == 0:
            time.sleep(0.01)
    made.close(5)
    files = whole(path)
    assert len(files) > 20
    assert files[-1] == path
    assert all(file.stat().st_size <= 1000 for file in files)
    assert numbers(path) == list(range(500))
    assert lost.lines == 0


def test_each_file_tells_its_fields_first_and_once(path: Path, lost: Lost) -> None:
    made = log(path, lost, size=1000)
    for number in range(100):
        made.append(FIELDS, line(number))
    made.close(5)
    for file in whole(path):
        first, *rest = file.read_bytes().splitlines(keepends=True)
        assert first == FIELDS.line
        assert FIELDS.line not in rest
        assert rest


def test_no_more_files_are_kept_than_asked(path: Path, lost: Lost) -> None:
    made = log(path, lost, size=200, keep=3)
    for number in range(100):
        made.append(None, line(number))
    made.close(5)
    assert [number for number, _ in older(path)] == [3, 2, 1]
    found = numbers(path)
    assert found == list(range(found[0], 100))


def test_compressed_files_move_up_with_the_others(path: Path, lost: Lost) -> None:
    made = log(path, lost, size=200)
    for number in range(20):
        made.append(None, line(number))
    made.close(5)
    oldest = older(path)[0][1]
    oldest.with_name(f"{oldest.name}.gz").write_bytes(gzip.compress(oldest.read_bytes()))
    oldest.unlink()
    made = log(path, lost, size=200)
    for number in range(20, 40):
        made.append(None, line(number))
    made.close(5)
    assert whole(path)[0].suffix == ".gz"
    assert numbers(path) == list(range(40))


def test_a_line_that_is_larger_than_a_file_has_one_of_its_own(path: Path, lost: Lost) -> None:
    made = log(path, lost, size=100)
    for number in range(3):
        made.append(None, line(number, 500))
    made.close(5)
    assert numbers(path) == [0, 1, 2]
    assert len(whole(path)) == 3


def test_a_second_start_goes_on_in_the_same_file(path: Path, lost: Lost) -> None:
    for number in range(3):
        made = log(path, lost)
        made.append(FIELDS, line(number))
        made.close(5)
    assert whole(path) == [path]
    assert numbers(path) == [0, 1, 2]


def test_what_a_crash_left_unfinished_is_cut_off(path: Path, lost: Lost) -> None:
    path.parent.mkdir()
    path.write_bytes(line(0) + line(1)[:-5])
    made = log(path, lost)
    made.append(None, line(2))
    made.close(5)
    assert numbers(path) == [0, 2]


def test_a_file_that_is_taken_away_is_made_anew(path: Path, lost: Lost) -> None:
    """As logrotate does it."""
    made = log(path, lost)
    made.append(FIELDS, line(0))
    eventually(lambda: path.stat().st_size > 0)
    path.rename(path.with_name("taken"))
    made.append(FIELDS, line(1))
    made.close(5)
    assert path.read_bytes() == FIELDS.line + line(1)
    assert path.with_name("taken").read_bytes() == FIELDS.line + line(0)


def test_two_gateways_do_not_write_one_file(path: Path, lost: Lost) -> None:
    made = log(path, lost)
    with pytest.raises(OSError, match=r"decision_log\.path: .* is written by another gateway"):
        log(path, lost)
    made.close(5)


def test_a_file_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path, lost: Lost) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"decision_log\.path: .*file/decisions\.jsonl cannot be written: "):
        log(tmp_path / "file" / "decisions.jsonl", lost)


def test_lines_that_the_disk_does_not_take_are_bounded_counted_and_told_once(
    path: Path, lost: Lost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(decision_log, "MAX_QUEUE", 100)
    made = DecisionLog(path, 1 << 20, 1, lost)  # not started: a disk that hangs
    for number in range(250):
        made.append(None, line(number))
    assert lost.lines == 150
    assert caplog.text.count("the disk cannot keep up") == 1
    made.start()
    made.close(5)
    assert numbers(path) == list(range(100))


FULL_DISK = """
import logging, resource, signal, sys, time
from pathlib import Path
from gateway.telemetry import decision_log
from gateway.telemetry.decision_log import DecisionLog
logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(message)s")
decision_log.EVERY_SECONDS = decision_log.AGAIN_SECONDS = 0.005
path, lost = Path(sys.argv[1]), []
log = DecisionLog(path, 1 << 20, 1, lost.append)
log.start()
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1005, hard))
for number in range(300):
    log.append(None, b'{"n":%d}\\n' % number)
time.sleep(0.2)
data = path.read_bytes()
assert data.endswith(b"\\n") and 980 < len(data) <= 1005, data[-20:]
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
log.close(5)
assert not lost
"""


def test_a_full_disk_tears_no_line_and_loses_none_once_there_is_room(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    assert numbers(path) == list(range(300))
    assert done.stderr.count("cannot be written: File too large; it is tried again") == 1
    assert done.stderr.count("is written again") == 1


def test_files_are_read_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    for name, text in (("d.jsonl", "5\n"), ("d.jsonl.1", "4\n"), ("d.jsonl.2", "3\n"), ("d.jsonl.10", "1\n")):
        (tmp_path / name).write_text(text)
    (tmp_path / "d.jsonl.9.gz").write_bytes(gzip.compress(b"2\n"))
    for name in ("d.jsonl.0", "d.jsonl.1.tmp", "d.jsonl.old", "dxjsonl.3"):
        (tmp_path / name).write_text("no\n")
    assert b"".join(written(path)) == b"1\n2\n3\n4\n5\n"


def test_a_rotation_while_files_are_read_changes_nothing(path: Path, lost: Lost) -> None:
    made = log(path, lost, size=1000, keep=3)
    for number in range(40):
        made.append(None, line(number))
    made.close(5)
    expected = numbers(path)
    reading = lines(whole(path), lambda _: None)
    found = [next(reading)]
    made = log(path, lost, size=1000, keep=3)
    for number in range(40, 400):
        made.append(None, line(number))
    made.close(5)
    found += reading
    assert [json.loads(one.data or b"")["n"] for one in found][: len(expected)] == expected


def test_a_file_that_cannot_be_opened_is_told(tmp_path: Path) -> None:
    (found,) = lines([tmp_path / "none"], lambda _: None)
    assert (found.number, found.data, found.why) == (1, None, "No such file or directory")


def test_progress_ends_at_the_bytes_that_the_files_have(tmp_path: Path) -> None:
    (tmp_path / "d").write_bytes(b"one\ntwo\n")
    (tmp_path / "d.1.gz").write_bytes(gzip.compress(b"zero\n"))
    seen: list[int] = []
    files = whole(tmp_path / "d")
    assert len(list(lines(files, seen.append))) == 3
    assert seen[-1] == sum(file.stat().st_size for file in files)


def test_a_line_without_end_is_read_in_part_and_passed_over(tmp_path: Path) -> None:
    (tmp_path / "d").write_bytes(b"a\n" + b"x" * (3 * MAX_LINE) + b"\nb\n")
    found = list(lines([tmp_path / "d"], lambda _: None))
    assert [(placed.number, len(placed.data or b"")) for placed in found] == [(1, 2), (2, MAX_LINE), (3, 2)]


def test_a_cut_compressed_file_says_where_it_ends(tmp_path: Path) -> None:
    data = gzip.compress(os.urandom(1 << 16).hex().encode() + b"\n")
    (tmp_path / "d.gz").write_bytes(data[: len(data) // 2])
    *_, last = lines([tmp_path / "d.gz"], lambda _: None)
    assert last.data is None
    assert "end" in last.why


@pytest.mark.parametrize("count", [0, 1, 10, 5000])
def test_lines_from_the_last_to_the_first(tmp_path: Path, count: int) -> None:
    expected = [line(number, number % 90) for number in range(count)]
    half = count // 2
    (tmp_path / "d").write_bytes(b"".join(expected[half:]))
    (tmp_path / "d.1").write_bytes(b"".join(expected[:half]))
    assert [data + b"\n" for data in backwards(whole(tmp_path / "d"))] == expected[::-1]
