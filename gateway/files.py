"""The text files that a deployment names."""

from __future__ import annotations

from pathlib import Path

from policies.document import Diagnostic, ProblemsError


def read_text(path: Path) -> str:
    """A file's text. Raises ProblemsError, which names the file and, in one that is not UTF-8, the place."""
    try:
        raw = path.read_bytes()
    except OSError as exc:
        raise ProblemsError([_problem(path, 1, 1, f"cannot be read: {exc.strerror or exc}")]) from None
    try:
        return raw.decode()
    except UnicodeDecodeError as exc:
        before = raw[: exc.start]
        line, column = before.count(b"\n") + 1, len(before) - (before.rfind(b"\n") + 1) + 1
        raise ProblemsError([_problem(path, line, column, "this is not UTF-8: save it as UTF-8")]) from None


def _problem(path: Path, line: int, column: int, message: str) -> Diagnostic:
    return Diagnostic(str(path), line, column, "error", message)
