"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from gateway.config import DEFAULT_FILE

F = TypeVar("F", bound=Callable[..., Any])


def config_option(name: str, text: str) -> Callable[[F], F]:
    """`--config FILE`, given to the command as `name`; `text` says what the file is to it."""
    return click.option(
        "--config",
        name,
        type=click.Path(path_type=Path, dir_okay=False),
        default=DEFAULT_FILE,
        show_default=True,
        help=text,
    )


running_config = config_option("file", "The configuration that runs.")
