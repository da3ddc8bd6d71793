"""The dashboards as Grafana reads them: panels, queries, variables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana"
NAMES = ("operators", "tenants")


def text(name: str) -> str:
    return (FOLDER / "dashboards" / f"{name}.json").read_text("utf-8")


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text(name))
    return found


def panels(page: dict[str, Any]) -> list[dict[str, Any]]:
    """All but the rows."""
    return [panel for panel in page["panels"] if panel["type"] != "row"]


def queries(page: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(title of the panel, expression) of every query."""
    for panel in panels(page):
        yield from ((panel["title"], target["expr"]) for target in panel["targets"])


def variables(page: dict[str, Any]) -> dict[str, str]:
    """What each variable but the data source is filled with."""
    return {one["name"]: one["query"] for one in page["templating"]["list"] if one["name"] != "datasource"}


def metrics(expression: str) -> set[str]:
    return set(re.findall(r"\bdualgauge_\w+", expression))
