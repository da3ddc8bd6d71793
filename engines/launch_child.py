"""Runs one program and answers for everything it starts: nothing outlives it, nothing outlives its owner.

Run as a script, `python -I -S launch_child.py FD PROGRAM [ARG...]`, in a session of its own. FD is a socket
whose other end the owner holds:
  - the program's pid is written to it, one line of digits;
  - end of file (the owner is gone, however it went) stops the program, within `GRACE` seconds;
  - a byte `K` from the owner kills everything at once.
SIGTERM and SIGINT are passed on to the program. When the program ends, what it left running is killed, and
this process ends with its exit code, or 128 + the signal that ended it. As a subreaper it also inherits, and
ends, grandchildren that lost their parent or changed their session. Linux only; standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Iterator

GRACE = 10.0
LINGER = 2.0
TRACKERS = 5.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PASSED_ON = (signal.SIGTERM, signal.SIGINT)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _exec(argv: list[str], owner: int) -> None:
    """In the forked child: die with the parent, then become the program."""
    try:
        for signum in (*_PASSED_ON, signal.SIGCHLD, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(signum, signal.SIG_DFL)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == owner:
            os.execvp(argv[0], argv)  # noqa: S606
    except OSError as error:
        with contextlib.suppress(OSError):
            os.write(2, f"cannot run {argv[0]}: {error.strerror}\n".encode())
    os._exit(127)


def _children() -> Iterator[int]:
    me = str(os.getpid())
    for entry in os.listdir("/proc"):  # noqa: PTH208 - pathlib costs 20 ms of start
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as stat:  # noqa: PTH123
            fields = stat.read().rpartition(")")[2].split()
            if fields[1] == me and fields[0] != "Z":
                yield int(entry)


def _tracks(pid: int) -> bool:
    """Whether it is one of multiprocessing's trackers: they unlink shared memory when all others are gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as cmdline:  # noqa: PTH123
        return b"multiprocessing.resource_tracker" in cmdline.read()
    return False


def _kill_children(*, trackers: bool = False) -> None:
    for pid in _children():
        if trackers or not _tracks(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _reap(program: int) -> int | None:
    """Collect whoever ended; the program's wait status if it was among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, ended = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == program:
                status = ended
    return status


def _clear(linger: float) -> None:
    """End what the program left, after `linger` seconds; trackers get `TRACKERS` more to clean up."""
    end = time.monotonic() + linger
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] != 0:
                continue
        except ChildProcessError:
            return
        if time.monotonic() >= end:
            _kill_children(trackers=time.monotonic() >= end + TRACKERS)
        time.sleep(0.02)


def main(argv: list[str]) -> int:
    owner = int(argv[1])
    os.set_inheritable(owner, False)
    wake, waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    for signum in (*_PASSED_ON, signal.SIGCHLD):
        signal.signal(signum, lambda *_: None)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    me = os.getpid()
    program = os.fork()
    if program == 0:
        _exec(argv[2:], me)
    with contextlib.suppress(OSError):
        os.write(owner, f"{program}\n".encode())
    status, forced = _attend(program, owner, wake)
    _clear(0.0 if forced else LINGER)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _attend(program: int, owner: int, wake: int) -> tuple[int, bool]:
    """Wait for the program's end, obeying signals and the owner; its wait status, whether it was forced."""
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    poll.register(owner, select.POLLIN)
    end: float | None = None
    forced = False
    while True:
        left = None if end is None else max(0, int((end - time.monotonic()) * 1000))
        for fd, _ in poll.poll(left):
            if fd == wake:
                for signum in os.read(wake, 64):
                    if signum in _PASSED_ON:
                        os.kill(program, signum)
                continue
            try:
                order = os.read(owner, 64)
            except OSError:
                order = b""
            if not order:
                poll.unregister(owner)
                os.kill(program, signal.SIGTERM)
                end = time.monotonic() + GRACE
            elif b"K" in order:
                end = time.monotonic()
        status = _reap(program)
        if status is not None:
            return status, forced
        if end is not None and time.monotonic() >= end:
            _kill_children()
            forced = True
            end = time.monotonic() + 0.1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
