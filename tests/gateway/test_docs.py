"""Every key of the configuration stands in docs/configuration.md, with its own row."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec
import pytest

from gateway.config import (
    Bounds,
    DecisionLogPart,
    EnginePart,
    File,
    Health,
    IntegrityPart,
    LimitsPart,
    LogsPart,
    ParityPart,
    Retries,
    SwapPart,
    Telemetry,
    TimeoutsPart,
    parse,
)
from gateway.identity import _Key

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "configuration.md").read_text("utf-8")
PARTS = {
    "limits": LimitsPart,
    "telemetry": Telemetry,
    "logs": LogsPart,
    "decision_log": DecisionLogPart,
    "timeouts": TimeoutsPart,
    "health": Health,
    "retries": Retries,
    "bounds": Bounds,
    "integrity": IntegrityPart,
    "parity": ParityPart,
    "swap": SwapPart,
}


def names(kind: type[msgspec.Struct]) -> list[str]:
    return [field.encode_name for field in msgspec.structs.fields(kind)]


@pytest.mark.parametrize(
    "key",
    [
        *(name for name in names(File) if name not in PARTS),
        *(f"{part}.{name}" for part, kind in PARTS.items() for name in names(kind)),
        *names(EnginePart),
        *names(_Key),
    ],
)
def test_every_key_has_a_row(key: str) -> None:
    assert any(f"`{key}`" in line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| "))


def test_parts_are_all_known() -> None:
    nested = {
        field.encode_name
        for field in msgspec.structs.fields(File)
        for kind in (field.type, *get_args(field.type))
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind is not EnginePart
    }
    assert nested == set(PARTS)


def test_the_example_is_valid(tmp_path: Path) -> None:
    example = PAGE.split("```yaml\n")[1].split("```")[0]
    config = parse(example, tmp_path / "dualgauge.yaml", {})
    assert [engine.tier for engine in config.engines] == ["fast", "exact"]
