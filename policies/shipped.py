"""The policies that come with the package, and policy texts by name or path."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from policies.document import Diagnostic, ProblemsError

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
    return str(Path(file).parent / Path(named).expanduser())


def policy_text(policy: str) -> tuple[str, str]:
    """Text and file name of a policy given as a shipped name or a path. Raises OSError, ProblemsError."""
    if policy in SHIPPED:
        return shipped(policy)
    try:
        return Path(policy).read_bytes().decode("utf-8"), policy
    except UnicodeDecodeError as error:
        message = f"not UTF-8: byte {error.start} cannot be read"
        raise ProblemsError([Diagnostic(policy, 1, 1, "error", message)]) from None
