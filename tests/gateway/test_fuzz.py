"""Whatever is sent: an answer, never a 5xx, and nothing that hurts an engine reaches one."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.fuzz import PATHS, bodies, target


def test_odd_requests_are_answered_and_hurt_nobody(tmp_path: Path) -> None:
    with target(tmp_path) as aimed:

        @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.sampled_from(PATHS), bodies())
        def some(path: str, raw: bytes) -> None:
            aimed.ask(path, raw)

        some()
        assert aimed.served.clean
        assert {200, 400} <= aimed.statuses.keys()
