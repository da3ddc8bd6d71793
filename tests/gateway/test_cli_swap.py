"""Two tiers that take turns on one GPU: `up`, a real gateway, and stand-ins that sleep as vLLM does."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.gateway.test_cli_up import Site, eventually

NVIDIA_SMI = """#!/bin/sh
case "$1" in
*compute_cap*) echo "0, 8.9" ;;
*) echo "0, Stand-in, 24576, 24000" ;;
esac
"""
SWAP = """
swap: {{residence: 1s, batch: 4, patience: 300ms, idle: {idle}, budget: {budget}, wait: {wait}}}
parity: {{allow: [max_length]}}
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A machine with one GPU."""
    site = Site(tmp_path)
    (site.folder / "bin" / "nvidia-smi").write_text(NVIDIA_SMI)
    site.env["DUALGAUGE_HOME"] = str(site.folder / "home")
    yield site
    site.close()


def up(
    site: Site, *, exact: str = "[]", fast: str = "[]", idle: str = "1s", wait: str = "60s", budget: int = 50
) -> None:
    site.write(fast=fast, exact=exact, more=SWAP.format(idle=idle, wait=wait, budget=budget).lstrip())
    done = site.run("up", "-d")
    assert done.returncode == 0, done.stderr


def states(site: Site) -> tuple[str, str]:
    return site.engine("fast").state, site.engine("exact").state


async def ask(site: Site, tier: str, count: int, **more: object) -> list[httpx2.Response]:
    async with httpx2.AsyncClient(base_url=site.base, timeout=120, trust_env=False) as client:
        body = {"model": f"smollm2:{tier}", "messages": [{"role": "user", "content": "hello"}], **more}
        asks = [client.post("/v1/chat/completions", json=body) for _ in range(count)]
        return await asyncio.gather(*asks)


def test_exact_sleeps_until_it_is_needed_and_sleeps_again(site: Site) -> None:
    up(site)
    assert states(site) == ("ready", "asleep")
    replies = asyncio.run(ask(site, "exact", 6))
    assert [reply.status_code for reply in replies] == [200] * 6
    assert {reply.headers["x-dualgauge-engine"] for reply in replies} == {"exact-0"}
    eventually(lambda: states(site) == ("ready", "asleep"))
    assert asyncio.run(ask(site, "fast", 1))[0].headers["x-dualgauge-engine"] == "fast-0"
    assert site.engine("exact").restarts == 0
    eventually(lambda: "turn of tier fast" in site.status()["swap"])
    said = site.run("status").stdout
    assert "swap: it is the turn of tier fast; exact may be woken 49 more times within an hour" in said


def test_who_asks_for_either_tier_is_served_by_it_in_its_turn(site: Site) -> None:
    up(site, fast='[--pace, "0.1"]', exact='[--pace, "0.1"]')

    async def both() -> list[tuple[int, str, bool]]:
        stream = {"stream": True, "max_tokens": 5}
        asked = [ask(site, tier, 10, **stream) for tier in ("fast", "exact", "fast")]
        found = await asyncio.gather(*asked)
        return [
            (reply.status_code, reply.headers["x-dualgauge-engine"], reply.text.endswith("[DONE]\n\n"))
            for replies in found
            for reply in replies
        ]

    served = asyncio.run(both())
    assert served == [
        *[(200, "fast-0", True)] * 10,
        *[(200, "exact-0", True)] * 10,
        *[(200, "fast-0", True)] * 10,
    ]


@pytest.mark.parametrize("fault", ["gibberish", "error"])
def test_an_engine_that_wakes_badly_is_restarted_before_it_serves(site: Site, fault: str) -> None:
    up(site, exact=f"[--wake-fault, {fault}]", idle="1m")
    (reply,) = asyncio.run(ask(site, "exact", 1))
    assert reply.status_code == 200
    assert "!!!" not in reply.text
    assert site.engine("exact").restarts == 1


def test_one_that_ends_while_it_sleeps_is_started_in_its_turn(site: Site) -> None:
    up(site, idle="1m")
    before = site.engine("exact")
    assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)
    eventually(lambda: site.engine("exact").pid is None)
    assert states(site) == ("ready", "asleep")
    (reply,) = asyncio.run(ask(site, "exact", 1))
    assert reply.status_code == 200
    assert site.engine("exact").restarts == 1


def test_without_a_swap_left_a_request_waits_so_long_and_is_refused(site: Site) -> None:
    up(site, budget=1, wait="2s")
    assert asyncio.run(ask(site, "exact", 1))[0].status_code == 200
    eventually(lambda: states(site) == ("ready", "asleep"))
    (reply,) = asyncio.run(ask(site, "exact", 1))
    assert reply.status_code == 503
    assert "exact-0: asleep" in reply.json()["error"]["message"]
    assert asyncio.run(ask(site, "fast", 1))[0].status_code == 200


@pytest.mark.parametrize("order", ["sleep", "wake", "restart"])
def test_who_takes_turns_is_not_woken_by_hand(site: Site, order: str) -> None:
    up(site)
    done = site.run("engine", order, "exact-0")
    assert done.returncode == 1
    assert "exact-0 takes turns with the other tier" in done.stderr


def test_an_engine_that_cannot_sleep_ends_the_start(site: Site) -> None:
    site.write(exact="[--sleep-fault, error]", more=SWAP.format(idle="1s", wait="60s", budget=50).lstrip())
    done = site.run("up")
    assert done.returncode == 1
    assert "exact-0 cannot take turns: exact-0: it would not go to sleep: 500" in done.stderr
    assert site.all_gone()


def test_on_a_cpu_nobody_can_take_turns(site: Site) -> None:
    (site.folder / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    site.write(more=SWAP.format(idle="1s", wait="60s", budget=50).lstrip())
    done = site.run("up")
    assert done.returncode == 1
    assert "engines on the CPU cannot sleep" in done.stderr
