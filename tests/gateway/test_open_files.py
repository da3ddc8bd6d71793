"""A gateway may open as many files as the system lets it, not only as many as a shell is given."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource
from gateway.server import allow_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
allow_open_files({wanted})
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "left"),
    [(256, 512, 400, "400 512"), (256, 512, 4096, "512 512"), (500, 512, 400, "500 512")],
)
def test_the_limit_is_raised_and_never_lowered(soft: int, hard: int, wanted: int, left: str) -> None:
    program = PROGRAM.format(soft=soft, hard=hard, wanted=wanted)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == left


def test_a_process_that_was_given_no_standard_files_has_some() -> None:
    """Else its first sockets would be these."""
    program = """
import os
from gateway.server import keep_standard_files
keep_standard_files()
assert [os.readlink(f"/proc/self/fd/{number}") for number in range(3)] == [os.devnull] * 3
"""
    argv = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, program]
    assert subprocess.run(argv, check=False).returncode == 0
