"""An engine that somebody else runs, drained for whoever works on it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.gateway.test_cli_up import Site, eventually


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """`fast-1` is at the address of `fast-0`, as far as the gateway knows another engine."""
    site = Site(tmp_path)
    beside = f"name: fast-1, tier: fast, kind: external, precision: awq, url: 'http://127.0.0.1:{site.fast}'"
    site.config.write_text(site.config.read_text() + f"  - {{{beside}}}\n")
    done = site.run("up", "-d")
    assert done.returncode == 0, done.stderr
    yield site
    site.close()


def served(site: Site) -> set[str]:
    """Which engines answer requests for fast."""
    body = {"model": "smollm2:fast", "messages": [{"role": "user", "content": "hello"}]}
    with httpx2.Client(base_url=site.base, trust_env=False) as client:
        replies = [client.post("/v1/chat/completions", json=body) for _ in range(20)]
    assert {reply.status_code for reply in replies} == {200}
    return {reply.headers["x-dualgauge-engine"] for reply in replies}


def answers(site: Site) -> bool:
    try:
        return httpx2.get(f"{site.base}/readyz", trust_env=False).status_code == 200
    except httpx2.TransportError:
        return False


def state(site: Site) -> str:
    found: str = {engine["name"]: engine["state"] for engine in site.status()["engines"]}["fast-1"]
    return found


def test_it_gets_nothing_from_drain_to_resume(site: Site) -> None:
    assert state(site) == "ready"
    assert site.run("engine", "drain", "fast-0").returncode == 0
    assert served(site) == {"fast-1"}
    assert site.run("engine", "resume", "fast-0").returncode == 0
    done = site.run("engine", "drain", "fast-1")
    assert "fast-1 is drained" in done.stdout, done.stderr
    assert state(site) == "drained"
    assert served(site) == {"fast-0"}
    run = site.state()
    assert run is not None
    assert run.gateway is not None
    assert run.gateway.pid is not None
    os.kill(run.gateway.pid, signal.SIGKILL)  # one that starts anew holds it from its start
    eventually(lambda: (now := site.state()) is not None and now.gateway != run.gateway)
    eventually(lambda: answers(site))
    assert served(site) == {"fast-0"}
    assert site.run("engine", "resume", "fast-1").returncode == 0
    eventually(lambda: state(site) == "ready")


@pytest.mark.parametrize("order", ["restart", "sleep", "wake", "resume"])
def test_what_else_cannot_be_done_to_it_is_said(site: Site, order: str) -> None:
    done = site.run("engine", order, "fast-1")
    assert done.returncode == 1
    why = "this needs one that is drained" if order == "resume" else "not started here: it can be drained"
    assert why in done.stderr
