"""libnuma, the one library of the system that vLLM's CPU build needs and Debian's smallest systems leave out.

Without it vLLM can be imported, and every start of an engine dies with a missing operator.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence

from engines.making import MakingError, Progress, silent

LIBRARY = "libnuma.so.1"
UPDATE = ("apt-get", "update", "-q")
INSTALL = ("apt-get", "install", "-qy", "--no-install-recommends", "libnuma1")

Run = Callable[[Sequence[str]], bool]


def loadable() -> bool:
    """Whether the system has the library."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def run(command: Sequence[str]) -> bool:
    """Whether a command could be run and succeeded; what it says is dropped."""
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=env, check=False)
    except OSError:
        return False
    return done.returncode == 0


def may_install() -> bool:
    """Whether this is Debian's kind of system and we are its root."""
    return os.geteuid() == 0 and shutil.which(INSTALL[0]) is not None


def ensure(
    progress: Progress = silent,
    *,
    present: Callable[[], bool] = loadable,
    allowed: Callable[[], bool] = may_install,
    run: Run = run,
) -> None:
    """See that the library is there: as root on Debian and its kin install it, else say how.

    Raises MakingError.
    """
    if present():
        return
    if allowed():
        progress("installing Debian's libnuma1")
        # The lists of packages are updated only where they are missing or too old.
        if (run(INSTALL) or (run(UPDATE) and run(INSTALL))) and present():
            return
    raise MakingError(
        f"vLLM's CPU build needs {LIBRARY}, and this system has none. Install it and run the same command "
        "again: `apt-get install libnuma1` on Debian and Ubuntu, `dnf install numactl-libs` on Fedora"
    )
