"""`dualgauge engine …` as an operator runs it: real processes, a real gateway, fake engines, 50 streams."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx2
import pytest

from tests.gateway.test_cli_up import Site, eventually

STREAMS = 50
TOKENS = 20
PACED = '[--pace, "0.3"]'
# Long enough for a command that a busy machine starts slowly.
SLOW = '[--pace, "0.8"]'
SLEEPING = '[--enable-sleep-mode, --pace, "0.3"{more}]'


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.close()


def up(site: Site, *, fast: str = PACED, exact: str = PACED) -> None:
    site.write(fast=fast, exact=exact, more="parity: {allow: [max_length]}\n")
    done = site.run("up", "-d")
    assert done.returncode == 0, done.stderr


def engine(site: Site, *args: str) -> str:
    done = site.run("engine", *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def run_engine(site: Site, *args: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway.cli", "engine", *args),
        cwd=site.folder,
        env=site.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    return process.returncode or 0, said.decode()


async def streams(site: Site, during: Callable[[], Awaitable[None]], tier: str = "fast") -> list[str]:
    """What `STREAMS` streams of a tier were told, all of them under way when `during` begins."""
    limits = httpx2.Limits(max_connections=STREAMS)
    async with httpx2.AsyncClient(base_url=site.base, timeout=60, limits=limits, trust_env=False) as client:
        begun = asyncio.Semaphore(0)

        async def read() -> str:
            body = {
                "model": f"smollm2:{tier}",
                "messages": [{"role": "user", "content": "hello"}],
                "max_tokens": TOKENS,
                "stream": True,
            }
            async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
                parts = []
                async for part in reply.aiter_text():
                    if not parts:
                        begun.release()
                    parts.append(part)
                return "".join(parts)

        async with asyncio.TaskGroup() as group:
            reading = [group.create_task(read()) for _ in range(STREAMS)]
            for _ in range(STREAMS):
                await begun.acquire()
            await during()
        return [task.result() for task in reading]


def whole(texts: list[str]) -> bool:
    return all(
        text.endswith("data: [DONE]\n\n") and text.count('"content"') == TOKENS and "error" not in text
        for text in texts
    )


def test_a_restart_under_50_streams_drops_none(site: Site) -> None:
    up(site)
    before = site.engine("fast")

    async def during() -> None:
        code, said = await run_engine(site, "restart", "fast-0")
        assert code == 0, said
        assert f"{STREAMS} requests still run on fast-0" in said
        assert said.endswith("fast-0 was restarted and serves\n")

    texts = asyncio.run(streams(site, during))
    assert whole(texts)
    after = site.engine("fast")
    assert after.state == "ready"
    assert after.pid != before.pid
    assert after.restarts == before.restarts + 1


def test_a_drained_engine_gets_nothing_until_it_is_resumed(site: Site) -> None:
    up(site)

    async def during() -> None:
        code, said = await run_engine(site, "drain", "fast-0")
        assert code == 0, said
        assert len(in_flight(site)) == 0

    assert whole(asyncio.run(streams(site, during)))
    assert ask(site, "fast").status_code == 503
    assert "fast-0: drained" in ask(site, "fast").text
    assert ask(site, "exact").status_code == 200
    assert site.status()["engines"][0]["state"] == "drained"
    engine(site, "resume", "fast-0")
    eventually(lambda: ask(site, "fast").status_code == 200)


def in_flight(site: Site) -> list[str]:
    url = f"http://127.0.0.1:{site.admin}/admin/status"
    engines = httpx2.get(url, trust_env=False).json()["engines"]
    return [engine["name"] for engine in engines if engine["in_flight"]]


def ask(site: Site, tier: str) -> httpx2.Response:
    body = {"model": f"smollm2:{tier}", "messages": [{"role": "user", "content": "hello"}]}
    return httpx2.post(f"{site.base}/v1/chat/completions", json=body, trust_env=False, timeout=30)


def test_a_drained_engine_stays_so_when_it_crashes(site: Site) -> None:
    up(site)
    engine(site, "drain", "fast-0")
    before = site.engine("fast")
    assert before.keeper is not None
    assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)
    eventually(lambda: site.engine("fast").restarts == 1 and site.engine("fast").state == "drained")
    assert ask(site, "fast").status_code == 503


def test_a_gateway_that_is_started_anew_holds_what_is_drained(site: Site) -> None:
    up(site)
    engine(site, "drain", "fast-0")
    run = site.state()
    assert run is not None
    assert run.gateway is not None
    assert run.gateway.pid is not None
    os.kill(run.gateway.pid, signal.SIGKILL)

    def answer() -> int:
        try:
            return ask(site, "fast").status_code
        except httpx2.HTTPError:
            return 0

    codes: list[int] = []
    end = time.monotonic() + 60
    while codes[-3:] != [503, 503, 503] and time.monotonic() < end:
        codes.append(answer())
        time.sleep(0.05)
    assert set(codes) <= {0, 503}
    eventually(lambda: ask(site, "exact").status_code == 200)


def test_who_leaves_a_drain_gives_the_engine_back(site: Site) -> None:
    up(site, fast=SLOW)

    async def during() -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway.cli", "engine", "drain", "fast-0"),
            cwd=site.folder,
            env=site.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert process.stdout is not None
        first = await process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, _ = await process.communicate()
        assert b"still run" in first
        assert b"as before" in rest

    assert whole(asyncio.run(streams(site, during)))
    eventually(lambda: site.engine("fast").state == "ready")
    eventually(lambda: ask(site, "fast").status_code == 200)


def test_sleep_and_wake_under_streams_drop_none(site: Site) -> None:
    up(site, fast=SLEEPING.format(more=""))

    async def during() -> None:
        code, said = await run_engine(site, "sleep", "fast-0")
        assert code == 0, said
        assert ask(site, "fast").status_code == 503

    assert whole(asyncio.run(streams(site, during)))
    assert site.engine("fast").state == "asleep"
    assert engine(site, "wake", "fast-0") == "fast-0 is awake\n"
    eventually(lambda: ask(site, "fast").status_code == 200)
    assert site.engine("fast").restarts == 0


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("gibberish", "its answers make no sense"),
        ("error", "it would not wake up: 500"),
    ],
)
def test_an_engine_that_wakes_badly_is_restarted(site: Site, fault: str, why: str) -> None:
    up(site, fast=SLEEPING.format(more=f", --wake-fault, {fault}"))
    engine(site, "sleep", "fast-0")
    said = engine(site, "wake", "fast-0")
    assert said.startswith("fast-0 was restarted, since ")
    assert why in said
    assert site.engine("fast").restarts == 1
    eventually(lambda: ask(site, "fast").status_code == 200)


@pytest.mark.parametrize(
    ("order", "said"),
    [
        (("restart", "fast-9"), "no engine `fast-9` runs here: fast-0, exact-0"),
        (("wake", "fast-0"), "fast-0 is ready; this needs one that is asleep"),
        (("resume", "fast-0"), "fast-0 is ready; this needs one that is drained"),
        (("sleep", "exact-0"), "exact-0 has no sleep mode: write --enable-sleep-mode into its `args`"),
    ],
)
def test_what_cannot_be_done_says_why(running: Site, order: tuple[str, ...], said: str) -> None:
    done = running.run("engine", *order)
    assert done.returncode == 1
    assert said in done.stderr


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("engine"))
    up(site)
    yield site
    site.close()


def test_the_socket_is_its_owners_alone(running: Site) -> None:
    assert running.paths.control.stat().st_mode & 0o777 == 0o600


def test_without_an_up_nobody_listens(site: Site) -> None:
    done = site.run("engine", "drain", "fast-0")
    assert done.returncode == 1
    assert "no `dualgauge up` runs for dualgauge.yaml" in done.stderr


def test_a_restart_that_fails_is_tried_again(site: Site) -> None:
    up(site)
    python = site.folder / "python"
    shutil.copy(python, site.folder / "python.good")
    python.write_text("#!/bin/sh\nexit 3\n")
    done = site.run("engine", "restart", "fast-0")
    assert done.returncode == 1
    assert "ended with exit code 3 before it was ready; it is tried again" in done.stderr
    shutil.copy(site.folder / "python.good", python)
    eventually(lambda: site.engine("fast").state == "ready")
    eventually(lambda: ask(site, "fast").status_code == 200)
