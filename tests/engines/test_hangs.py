"""Engines that live and do not work are found; others are left alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from engines.hangs import Hangs, fetch
from engines.health import Schedule
from engines.spec import EngineSpec
from tests.support.engine import FakeEngine, engines, hang, reply

FIGURES = b"vllm:num_requests_running %d\nvllm:generation_tokens_total %d\n"


class World:
    """Two engines, a clock that each probe moves by 10 s, and what was restarted."""

    def __init__(self) -> None:
        self.now = 0.0
        self.probes = 0
        self.health: Callable[[int], int | Exception] = lambda _: 200
        self.figures: Callable[[int], tuple[int, int]] = lambda _: (1, 5)
        self.restarted: list[tuple[str, str]] = []

    async def ask(self, spec: EngineSpec, path: str, seconds: float) -> tuple[int, bytes]:
        if spec.name == "well":
            return 200, FIGURES % (1, self.probes) if path == "/metrics" else b""
        if path == "/health":
            self.probes += 1
            self.now += 10
            answer = self.health(self.probes)
            if isinstance(answer, Exception):
                raise answer
            return answer, b""
        return 200, FIGURES % self.figures(self.probes)

    def kill(self, name: str, why: str) -> None:
        self.restarted.append((name, why))

    def run(self, probes: int) -> list[tuple[str, str]]:
        """What was restarted, and why, in so many probes."""
        specs = [EngineSpec(n, "fast", "vllm", "http://h:1", "m", "awq") for n in ("hung", "well")]
        hangs = Hangs(specs, Schedule(0, 3, 1, 30), self.kill, lambda: self.now, self.ask)

        async def main() -> None:
            task = asyncio.create_task(hangs.run())
            async with asyncio.timeout(20):
                while self.probes < probes:
                    await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        asyncio.run(main())
        return self.restarted


def test_c31_one_that_makes_no_token_behind_a_good_health_is_restarted() -> None:
    assert World().run(6) == [("hung", "no new token for 30 s with 1 requests")]


def test_it_has_as_long_again_after_a_restart() -> None:
    assert len(World().run(9)) == 2


def test_one_that_does_not_answer_any_more_is_restarted() -> None:
    world = World()
    world.figures = lambda _: (0, 5)
    world.health = lambda probe: 200 if probe < 3 else TimeoutError("timed out")
    assert world.run(5) == [("hung", "no answer for 30 s, timed out")]


@pytest.mark.parametrize(
    ("health", "figures"),
    [
        (lambda _: 200, lambda _: (0, 5)),
        (lambda _: 200, lambda probe: (3, probe)),
        (lambda probe: 200 if probe % 3 else TimeoutError(), lambda _: (0, 5)),
        (lambda _: ConnectionRefusedError("refused"), lambda _: (0, 5)),
    ],
    ids=["idle", "works", "answers now and then", "has never answered"],
)
def test_others_are_left_alone(
    health: Callable[[int], int | Exception], figures: Callable[[int], tuple[int, int]]
) -> None:
    world = World()
    world.health, world.figures = health, figures
    assert world.run(30) == []


async def test_an_engine_is_asked_over_http() -> None:
    engine = FakeEngine()
    engine.health_script = reply(b"no", 503)
    async with engines(engine):
        spec = EngineSpec("e", "fast", "vllm", engine.url, "m", "awq")
        assert await fetch(spec, "/health", 5) == (503, b"no")
        engine.health_script = hang
        with pytest.raises(TimeoutError):
            await fetch(spec, "/health", 0.05)
    with pytest.raises(OSError, match="/health"):
        await fetch(spec, "/health", 5)
