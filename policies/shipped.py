"""The policies that come with the package."""

from __future__ import annotations

from importlib import resources

SHIPPED = ("default", "strict", "thrifty")


def shipped(name: str) -> tuple[str, str]:
    """The text of a shipped policy and the name of its file; KeyError where there is none of that name."""
    if name not in SHIPPED:
        raise KeyError(name)
    file = resources.files("policies") / f"{name}.yaml"
    return file.read_text(encoding="utf-8"), str(file)
