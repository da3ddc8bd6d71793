"""The alerts fire when they should, say what to do, and are made of metrics that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.prometheus import needs_prometheus

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "prometheus"
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"] for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
CHECKS: list[dict[str, Any]] = [
    check
    for test in yaml.safe_load((FOLDER / "rules_test.yml").read_text())["tests"]
    for check in test["alert_rule_test"]
]


def promtool(*arguments: str) -> None:
    done = subprocess.run(
        ["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_promtool_accepts_the_rules() -> None:
    promtool("check", "rules", "--lint-fatal", "rules.yml")


@needs_prometheus
def test_promtool_accepts_the_configuration() -> None:
    promtool("check", "config", "--lint-fatal", "prometheus.yml")


@needs_prometheus
def test_the_alerts_fire_when_they_should() -> None:
    promtool("test", "rules", "rules_test.yml")


@pytest.mark.parametrize("alert", ALERTS)
@pytest.mark.parametrize("fires", [True, False], ids=["fires", "does not fire"])
def test_each_alert_is_tested(alert: str, fires: bool) -> None:
    assert any(check["alertname"] == alert and bool(check["exp_alerts"]) == fires for check in CHECKS)


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_says_how_bad_it_is_and_what_to_do(alert: str) -> None:
    rule = ALERTS[alert]
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(rule["annotations"]) == {"summary", "runbook"}
    # A runbook is read in a pager, where nothing of it is filled in.
    assert "{{" not in rule["annotations"]["runbook"]


def test_each_alert_is_in_the_documents() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text("utf-8")
    assert re.findall(r"^\| `(Dualgauge\w+)` \|", page, re.MULTILINE) == list(ALERTS)
