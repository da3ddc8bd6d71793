"""What an engine's command line says, in any of the spellings that vLLM takes."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"(-?\d+(?:\.\d+)?)([kKmMgGtT]?)")
_SCALES = {
    "": 1,
    **{letter: 1000**power for power, letter in enumerate("kmgt", 1)},
    **{letter: 1024**power for power, letter in enumerate("KMGT", 1)},
}
OTHER_MODEL = (
    *("-m", "--model", "-mu", "--model-url", "-dr", "--docker-repo"),
    *("-hf", "-hfr", "--hf-repo", "-hff", "--hf-file", "--models-dir", "--models-preset"),
)
"""Options by which llama-server would open another model than the one that was checked."""
SLEEP_MODE = "--enable-sleep-mode"


def has_option(args: Sequence[str], *names: str) -> bool:
    """Whether a command line sets one of these options."""
    return any(_spelt(arg) in names for arg in args)


def option(args: Sequence[str], *names: str) -> str | None:
    """The last value that a command line gives to one of these options; empty for a bare flag at the end."""
    found = None
    for at, arg in enumerate(args):
        if _spelt(arg) in names:
            _, equals, value = arg.partition("=")
            found = value if equals else (args[at + 1] if at + 1 < len(args) else "")
    return found


def number(args: Sequence[str], *names: str) -> int | None:
    """The value as vLLM reads it: `8k` is 8,000, `8K` is 8,192. None: not given, or nothing above zero."""
    value = option(args, *names)
    match = _NUMBER.fullmatch(value.strip()) if value else None
    if match is None:
        return None
    amount = int(float(match[1]) * _SCALES[match[2]])
    return amount if amount > 0 else None


def _spelt(arg: str) -> str:
    return arg.split("=", 1)[0].replace("_", "-") if arg.startswith("-") else ""
