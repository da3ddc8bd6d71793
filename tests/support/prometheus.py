"""Prometheus's own programs from the PATH: promtool, and a server of a test's own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.serving import free_port

FOLDER = Path(__file__).parents[2] / "deploy" / "prometheus"
EVERY = "250ms"
needs_prometheus = pytest.mark.skipif(
    shutil.which("promtool") is None or shutil.which("prometheus") is None,
    reason="no promtool and prometheus on the PATH (Debian: apt-get install prometheus)",
)


class Prometheus:
    def __init__(self, url: str) -> None:
        self._url = url

    async def get(self, path: str, **arguments: str) -> Any:
        """The `data` of an answer of the HTTP API. Raises AssertionError where it is an error."""
        return await asyncio.to_thread(self._get, path, arguments)

    def _get(self, path: str, arguments: dict[str, str]) -> Any:
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as exc:
            raise AssertionError(f"{url}: {exc.read().decode()}") from None

    async def values(self, expression: str) -> list[float]:
        """The numbers that an instant query gives, without NaN."""
        found = (await self.get("query", query=expression))["result"]
        numbers = [float(one["value"][1]) for one in found]
        return [number for number in numbers if not math.isnan(number)]


@contextlib.asynccontextmanager
async def prometheus(folder: Path, admin: int) -> AsyncIterator[Prometheus]:
    """A server with the files of deploy/prometheus, which asks a gateway's admin port 4 times a second."""
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": EVERY, "evaluation_interval": EVERY}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (folder / "targets.yml").write_text(yaml.safe_dump([{"targets": [f"127.0.0.1:{admin}"]}]))
    shutil.copy(FOLDER / "rules.yml", folder)
    address = f"127.0.0.1:{free_port()}"
    options = {
        "config.file": "prometheus.yml",
        "web.listen-address": address,
        "storage.tsdb.path": "data",
        "log.level": "warn",
    }
    command = ["prometheus", *(f"--{name}={value}" for name, value in options.items())]
    log = folder / "prometheus.log"
    with log.open("w") as output:
        child = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
    server = Prometheus(f"http://{address}")
    try:
        async with asyncio.timeout(30):
            while not await _answers(server):
                assert child.poll() is None, log.read_text()
                await asyncio.sleep(0.05)
        yield server
    finally:
        child.kill()
        await asyncio.to_thread(child.wait)


async def _answers(server: Prometheus) -> bool:
    try:
        return bool(await server.values('up{job="dualgauge"} == 1'))
    except (OSError, AssertionError):
        return False
