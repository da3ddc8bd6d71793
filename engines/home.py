"""Where Dualgauge keeps what it installs and makes: engine environments, models, logs of making them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

DEMO_PREFIX = "demo/"
"""What names of models begin with that are made on this machine, below `models`."""


def data_home(env: Mapping[str, str] = os.environ) -> Path:
    """$DUALGAUGE_HOME, else $XDG_DATA_HOME/dualgauge, else ~/.local/share/dualgauge. Nothing is created."""
    own = env.get("DUALGAUGE_HOME")
    if own:
        return Path(own).expanduser().absolute()
    data = env.get("XDG_DATA_HOME", "")
    if Path(data).is_absolute():  # the XDG specification says to ignore a relative one
        return Path(data) / "dualgauge"
    user = env.get("HOME")
    return (Path(user) if user else Path.home()) / ".local" / "share" / "dualgauge"


def environments(home: Path) -> Path:
    return home / "envs"


def models(home: Path) -> Path:
    return home / "models"


def made(model: str, env: Mapping[str, str] = os.environ) -> Path | None:
    """Where a model is, or would be, that is made on this machine; None for the name of another."""
    if not model.startswith(DEMO_PREFIX):
        return None
    return models(data_home(env)) / model.removeprefix(DEMO_PREFIX)


def logs(home: Path) -> Path:
    return home / "logs"
