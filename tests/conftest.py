"""Runs `async def` tests: each on an event loop of its own, the one that production uses, with a time limit;
a test that leaves a task behind fails."""

from __future__ import annotations

import asyncio
import inspect
import signal

import pytest
import uvloop
from hypothesis import settings

# A shell that runs the tests in the background has them ignore SIGINT, and so would all that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LIMIT_SECONDS = 60

settings.register_profile("thorough", max_examples=10_000, deadline=None)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}

    async def run() -> None:
        before = asyncio.all_tasks()
        async with asyncio.timeout(LIMIT_SECONDS):
            await test(**given)
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - before
        assert not left, f"tasks left behind: {left}"

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    return True
