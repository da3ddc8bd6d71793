"""Prometheus's own programs from the PATH: promtool, and a server of a test's own."""

from __future__ import annotations

import shutil

import pytest

needs_prometheus = pytest.mark.skipif(
    shutil.which("promtool") is None or shutil.which("prometheus") is None,
    reason="no promtool and prometheus on the PATH (Debian: apt-get install prometheus)",
)
