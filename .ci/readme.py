"""Prints the shell commands that README.md gives under a heading: what CI runs is what readers are told.

Usage: python .ci/readme.py HEADING
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def commands(text: str, heading: str) -> list[str]:
    """The contents of the `sh` blocks of a section, in order. Raises LookupError where it has none."""
    _, found, section = f"\n{text}".partition(f"\n## {heading}\n")
    section = section.partition("\n## ")[0]
    blocks = re.findall(r"^```sh\n(.*?)\n```$", section, re.MULTILINE | re.DOTALL)
    if not found or not blocks:
        raise LookupError(f"README.md has no shell commands under `## {heading}`")
    return blocks


if __name__ == "__main__":
    print("\n".join(commands(README.read_text("utf-8"), sys.argv[1])))
