"""The policies that come with the package, and policy texts by name or path."""

from __future__ import annotations

import contextlib
import re
from importlib import resources
from pathlib import Path

from policies.document import Diagnostic, ProblemsError, decode, unknown

SHIPPED = ("default", "strict", "thrifty")
SHIPPED_NAME = re.compile(r"[a-z]+")
"""What is taken for the name of a shipped policy where a path may stand as well."""


def shipped(name: str) -> tuple[str, str]:
    """The text of a shipped policy and the name of its file; KeyError where there is none of that name."""
    if name not in SHIPPED:
        raise KeyError(name)
    file = resources.files("policies") / f"{name}.yaml"
    return file.read_text(encoding="utf-8"), str(file)


def shipped_cases(name: str) -> tuple[str, str]:
    """The cases that come with a shipped policy, and the name of their file; KeyError as for `shipped`."""
    if name not in SHIPPED:
        raise KeyError(name)
    file = resources.files("policies") / "cases" / f"{name}.yaml"
    return file.read_text(encoding="utf-8"), str(file)


def beside(named: str, file: str) -> str:
    """A policy that `file` names: a shipped name as it is, a path as seen from where `file` is seen from."""
    if SHIPPED_NAME.fullmatch(named):
        return named
    path = Path(named)
    with contextlib.suppress(RuntimeError):  # nobody has that home: there is no such file either
        path = path.expanduser()
    return str(Path(file).parent / path)


def policy_text(policy: str) -> tuple[str, str]:
    """Text and file name of a policy given as a shipped name or a path. Raises ProblemsError."""
    if policy in SHIPPED:
        return shipped(policy)
    try:
        raw = Path(policy).read_bytes()
    except OSError as error:
        message = f"cannot read the policy: {error.strerror}"
        if SHIPPED_NAME.fullmatch(policy):
            message += f"; {unknown('policy', policy, SHIPPED)}"
        raise ProblemsError([Diagnostic(policy, 1, 1, "error", message)]) from None
    return decode(raw, policy), policy
