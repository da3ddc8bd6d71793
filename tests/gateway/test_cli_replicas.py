"""Several engines a tier, brought up by `up`: requests are spread, and one may leave."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator

import httpx2
import pytest

from tests.gateway.test_cli_up import Site, eventually, free_ports


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("replicas"))
    (port,) = free_ports(1)
    site.write()
    engine = f"name: fast-1, tier: fast, kind: vllm, model: ./model, precision: awq, port: {port}, gpu: 0"
    site.config.write_text(site.config.read_text() + f"  - {{{engine}}}\n")
    done = site.run("up", "-d")
    assert done.returncode == 0, done.stderr
    yield site
    site.close()


def served(site: Site, count: int) -> Counter[str]:
    """How many of so many requests each engine answered."""
    body = {"model": "smollm2:fast", "messages": [{"role": "user", "content": "hello"}]}
    with httpx2.Client(base_url=site.base, trust_env=False) as client:
        replies = [client.post("/v1/chat/completions", json=body) for _ in range(count)]
    assert {reply.status_code for reply in replies} == {200}
    return Counter(reply.headers["x-dualgauge-engine"] for reply in replies)


def state(site: Site, name: str) -> str:
    return {engine["name"]: engine["state"] for engine in site.status()["engines"]}[name]


def test_all_engines_of_a_tier_serve(site: Site) -> None:
    assert set(served(site, 40)) <= {"fast-0", "fast-1"}
    assert [state(site, name) for name in ("fast-0", "fast-1", "exact-0")] == ["ready"] * 3


def test_one_that_is_drained_leaves_its_requests_to_the_other(site: Site) -> None:
    assert site.run("engine", "drain", "fast-0").returncode == 0
    assert served(site, 10) == {"fast-1": 10}
    assert site.run("status").returncode == 0
    assert site.run("engine", "resume", "fast-0").returncode == 0
    eventually(lambda: state(site, "fast-0") == "ready")


def test_one_that_is_killed_leaves_its_requests_to_the_other(site: Site) -> None:
    run = site.state()
    assert run is not None
    pid = next(unit.pid for unit in run.engines if unit.name == "fast-1")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: state(site, "fast-1") != "ready")
    assert served(site, 10) == {"fast-0": 10}
    eventually(lambda: state(site, "fast-1") == "ready")
