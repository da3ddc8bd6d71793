"""The text files that a deployment names."""

from __future__ import annotations

from pathlib import Path

from policies.document import Diagnostic, ProblemsError, decode

UNREADABLE = "cannot be read: "


def read_text(path: Path) -> str:
    """A file's text. Raises ProblemsError, which names the file and, in one that is not UTF-8, the place."""
    try:
        raw = path.read_bytes()
    except OSError as exc:
        message = f"{UNREADABLE}{exc.strerror or exc}"
        raise ProblemsError([Diagnostic(str(path), 1, 1, "error", message)]) from None
    return decode(raw, str(path))
