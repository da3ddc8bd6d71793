"""A transport without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class Recorder(asyncio.Transport):
    """Keeps nothing; `on_write` sees what would be sent."""

    def __init__(self, on_write: Callable[[bytes], object] | None = None) -> None:
        super().__init__()
        self._on_write = on_write

    def write(self, data: Any) -> None:
        if self._on_write is not None:
            self._on_write(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...
