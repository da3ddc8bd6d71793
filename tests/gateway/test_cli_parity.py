"""`up` refuses engines that cannot stand in for each other, before it starts one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.gateway.test_cli_up import Site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """The exact engine's folder has another chat template than the fast one's."""
    site = Site(tmp_path)
    model = site.folder / "model"
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}\n")
    other = Path(shutil.copytree(model, site.folder / "other"))
    (other / "chat_template.jinja").write_text("{{ messages[-1].content }}\n")
    text = site.config.read_text()
    exact = text.index("name: exact-0")
    site.config.write_text(text[:exact] + text[exact:].replace("./model", "./other"))
    yield site
    site.close()


def test_a_pair_that_differs_is_refused_with_the_difference(site: Site) -> None:
    done = site.run("up")
    assert done.returncode == 1
    assert "chat_template: fast-0 and exact-0 differ" in done.stderr
    assert 'template.default: "{{ messages[0].content }}" | "{{ messages[-1].content }}"' in done.stderr
    assert "parity: {allow: [chat_template]}" in done.stderr
    assert not site.paths.logs.exists()


def test_a_difference_that_is_accepted_by_its_hash_is_told_and_served(site: Site) -> None:
    (pinned,) = re.findall(r"sha256:[0-9a-f]{64}", site.run("up").stderr)
    site.config.write_text(site.config.read_text() + f"parity: {{accept: [{pinned}]}}\n")
    done = site.run("up", "-d")
    assert done.returncode == 0, done.stderr
    assert "allowed by `parity`: chat_template: fast-0 and exact-0 differ" in done.stdout


def test_a_difference_that_is_allowed_is_told_and_served(site: Site) -> None:
    site.config.write_text(site.config.read_text() + "parity: {allow: [chat_template]}\n")
    done = site.run("up", "-d")
    assert done.returncode == 0, done.stderr
    assert "allowed by `parity`: chat_template: fast-0 and exact-0 differ" in done.stdout
    assert httpx2.get(f"{site.base}/readyz").status_code == 200
