"""In what two texts differ, as a few lines for people: `-` is what only the first has, `+` what only the
second has. White space is made visible, since it is all that differs between many chat templates."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator

LINES = 8
WIDTH = 160
MAX = 200_000
"""Characters up to which lines are matched, which takes long for long texts."""
_PIECE = re.compile(r"[^\n]*?[%}]\}\n?|[^\n]*\n|[^\n]+")
"""Many templates are one line: each of their tags ends one too."""


def lines(before: str, after: str) -> Iterator[str]:
    """At most `LINES` of them, then how many more there are."""
    if max(len(before), len(after)) > MAX:
        yield f"- {len(before):,} characters"
        yield f"+ {len(after):,} characters"
        return
    found = difflib.unified_diff(_PIECE.findall(before), _PIECE.findall(after), lineterm="", n=0)
    changed = [line for line in found if line.startswith(("+", "-")) and not line.startswith(("+++", "---"))]
    for line in changed[:LINES]:
        text = json.dumps(line[1:], ensure_ascii=False)
        yield f"{line[0]} {text if len(text) <= WIDTH else text[:WIDTH] + '…'}"
    if len(changed) > LINES:
        yield f"and {len(changed) - LINES} more lines"
