"""What a supervisor does about a model that may not be opened."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from engines.integrity import IntegrityError
from engines.launch import StartError
from engines.supervise import Unit
from tests.engines.test_supervise import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def checked(world: World, answers: list[list[str]]) -> Unit:
    """A unit whose check finds these problems, one list for each start."""

    async def check() -> None:
        world.journal.append("check")
        if problems := answers.pop(0):
            raise IntegrityError(problems)

    return replace(world.unit(), check=check)


def test_a_model_that_is_refused_is_not_opened(world: World) -> None:
    with pytest.raises(StartError) as caught:
        asyncio.run(world.supervisor.start(checked(world, [["a has other contents", "b is missing"]])))
    assert caught.value.what == "was not started: its model is not what it should be"
    assert caught.value.lines == ("a has other contents", "b is missing")
    assert world.journal == ["check"]
    assert world.last("fast-0").state == "failed"


def test_a_model_is_checked_before_each_start(world: World) -> None:
    async def run() -> None:
        await world.supervisor.start(checked(world, [[], ["a has other contents"], []]))
        world.launcher.children[0].end(1)
        await world.until(lambda: world.last("fast-0").state == "ready" and len(world.launcher.children) == 2)
        assert any("a has other contents" in (state.error or "") for state in world.states)
        await world.supervisor.stop(["fast-0"])

    asyncio.run(run())
    begun = [entry for entry in world.journal if entry in ("check", "start fast-0")]
    assert begun == ["check", "start fast-0", "check", "check", "start fast-0"]
