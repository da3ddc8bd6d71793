import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.launch import Command, ProbeError, Proof, StartError
from engines.runfile import Process, UnitState
from engines.supervise import LIMIT, OperationError, Supervisor, Unit, delay

NOTHING = Command((), {})


class Time:
    """A clock that stands still unless somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []
        self.frozen = False

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await (asyncio.get_running_loop().create_future() if self.frozen else asyncio.sleep(0))


class FakeChild:
    def __init__(self, pid: int, journal: list[str], name: str, *, stubborn: bool = False) -> None:
        self.pid = pid
        self.keeper = Process(pid + 1000, 1)
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._journal, self._name, self._stubborn = journal, name, stubborn

    async def wait(self) -> int:
        return await asyncio.shield(self.ended)

    def terminate(self) -> None:
        self._journal.append(f"terminate {self._name}")
        if not self._stubborn:
            self.end(143)

    def kill(self) -> None:
        self._journal.append(f"kill {self._name}")
        self.end(137)

    def end(self, code: int) -> None:
        if not self.ended.done():
            self.ended.set_result(code)


class FakeLauncher:
    """Starts children that end at once with the codes given, then ones that live."""

    def __init__(self, journal: list[str]) -> None:
        self.journal = journal
        self.codes: list[int] = []
        self.children: list[FakeChild] = []
        self.stubborn = False

    async def start(self, command: Command, log: Path) -> FakeChild:
        await asyncio.sleep(0)
        name = log.stem
        self.journal.append(f"start {name}")
        child = FakeChild(len(self.children) + 1, self.journal, name, stubborn=self.stubborn)
        self.children.append(child)
        if self.codes and (code := self.codes.pop(0)) >= 0:
            child.end(code)
        return child


class FakeProbe:
    def __init__(self, name: str, journal: list[str], checks: int, fault: Exception | None) -> None:
        self._name, self._journal, self._checks, self._fault = name, journal, checks, fault

    async def healthy(self) -> bool:
        await asyncio.sleep(0)
        self._checks -= 1
        if self._checks < 0:
            self._journal.append(f"healthy {self._name}")
        return self._checks < 0

    async def warm_up(self) -> Proof:
        await asyncio.sleep(0)
        if self._fault is not None:
            raise self._fault
        self._journal.append(f"warm {self._name}")
        return Proof(notes=(f"{self._name} is proven",))

    async def close(self) -> None:
        self._journal.append(f"closed {self._name}")


class World:
    """One supervisor with all that is handed in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal: list[str] = []
        self.states: list[UnitState] = []
        self.time = Time()
        self.launcher = FakeLauncher(self.journal)
        self.supervisor = Supervisor(
            self.launcher, self.states.append, clock=self.time, sleep=self.time.sleep
        )

    def unit(
        self, name: str = "fast-0", device: str = "gpu:0", checks: int = 2, fault: Exception | None = None
    ) -> Unit:
        return Unit(
            name=name,
            url="http://127.0.0.1:1",
            command=NOTHING,
            log=self.folder / f"{name}.log",
            device=device,
            probe=lambda: FakeProbe(name, self.journal, checks, fault),
            timeout=10.0,
            grace=5.0,
            tier="fast",
        )

    def history(self, name: str) -> list[str]:
        found: list[str] = []
        for state in self.states:
            if state.name == name and (not found or found[-1] != state.state):
                found.append(state.state)
        return found

    def last(self, name: str) -> UnitState:
        return next(state for state in reversed(self.states) if state.name == name)

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(10_000):
            if condition():
                return
            await asyncio.sleep(0)
        raise AssertionError(f"never came true; journal: {self.journal}")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_delays_double_up_to_a_minute() -> None:
    assert [delay(n) for n in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_an_engine_is_ready_after_health_and_one_completion(world: World) -> None:
    asyncio.run(world.supervisor.start(world.unit()))
    assert world.history("fast-0") == ["starting", "warming", "ready"]
    assert world.journal == ["start fast-0", "healthy fast-0", "warm fast-0", "closed fast-0"]
    assert world.last("fast-0").pid == 1


def test_two_engines_of_one_gpu_start_one_after_the_other(world: World) -> None:
    async def both() -> None:
        await asyncio.gather(
            world.supervisor.start(world.unit("fast-0")), world.supervisor.start(world.unit("exact-0"))
        )

    asyncio.run(both())
    assert world.journal.index("warm fast-0") < world.journal.index("start exact-0")


def test_engines_of_two_gpus_do_not_wait_for_each_other(world: World) -> None:
    async def both() -> None:
        await asyncio.gather(
            world.supervisor.start(world.unit("fast-0", "gpu:0")),
            world.supervisor.start(world.unit("exact-0", "gpu:1")),
        )

    asyncio.run(both())
    assert world.journal.index("start exact-0") < world.journal.index("healthy fast-0")


def test_death_at_the_first_start_is_an_error_with_the_telling_lines(world: World) -> None:
    (world.folder / "fast-0.log").write_text("INFO: hello\nValueError: no such model\n")
    world.launcher.codes = [1]
    with pytest.raises(StartError) as caught:
        asyncio.run(world.supervisor.start(world.unit()))
    assert caught.value.what == "ended with exit code 1 before it was ready"
    assert caught.value.lines == ("ValueError: no such model",)
    assert caught.value.log == world.folder / "fast-0.log"
    assert world.last("fast-0").state == "failed"
    assert world.last("fast-0").pid is None


def test_an_engine_that_never_gets_healthy_is_ended(world: World) -> None:
    with pytest.raises(StartError, match="was not healthy after 10 s"):
        asyncio.run(world.supervisor.start(world.unit(checks=10_000)))
    assert world.journal[-1] == "kill fast-0"


def test_a_failing_warm_up_is_an_error(world: World) -> None:
    unit = world.unit(fault=ProbeError("the warm-up completion got 500"))
    with pytest.raises(StartError, match="started, but the warm-up completion got 500"):
        asyncio.run(world.supervisor.start(unit))
    assert world.journal[-1] == "kill fast-0"


def test_a_cancelled_start_leaves_nothing_running(world: World) -> None:
    async def cancel() -> None:
        starting = asyncio.create_task(world.supervisor.start(world.unit(checks=10_000)))
        await world.until(lambda: "start fast-0" in world.journal)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(cancel())
    assert "kill fast-0" in world.journal
    assert world.launcher.children[0].ended.done()


def test_a_start_that_is_cancelled_while_the_process_is_made_ends_it(world: World) -> None:
    async def cancel() -> None:
        starting = asyncio.create_task(world.supervisor.start(world.unit()))
        await world.until(lambda: world.history("fast-0") == ["starting"])
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(cancel())
    assert world.journal == ["start fast-0", "kill fast-0"]


def test_a_crashed_engine_is_restarted_after_a_second(world: World) -> None:
    async def crash() -> None:
        await world.supervisor.start(world.unit())
        world.time.slept.clear()
        world.launcher.children[0].end(137)
        await world.until(lambda: world.history("fast-0").count("ready") == 2)
        await world.supervisor.stop(["fast-0"])

    asyncio.run(crash())
    assert world.history("fast-0")[:7] == [
        "starting",
        "warming",
        "ready",
        "backoff",
        "starting",
        "warming",
        "ready",
    ]
    assert world.time.slept[0] == 1.0
    assert world.last("fast-0").restarts == 1
    backoff = next(state for state in world.states if state.state == "backoff")
    assert backoff.error is not None
    assert "SIGKILL" in backoff.error
    assert backoff.pid is None


def test_failures_in_a_row_wait_longer_and_end_in_giving_up(world: World) -> None:
    async def crash() -> None:
        await world.supervisor.start(world.unit())
        world.launcher.codes = [1] * 10
        world.time.slept.clear()
        world.launcher.children[0].end(1)
        await world.until(lambda: world.last("fast-0").state == "failed")

    asyncio.run(crash())
    assert [seconds for seconds in world.time.slept if seconds >= 1] == [1.0, 2.0, 4.0, 8.0]
    assert len(world.launcher.children) == LIMIT
    error = world.last("fast-0").error
    assert error is not None
    assert "given up after 5 failures in a row" in error


@pytest.mark.parametrize(("served", "pauses"), [(179.0, [1.0, 2.0]), (180.0, [1.0, 1.0])])
def test_three_healthy_minutes_forgive_earlier_failures(
    world: World, served: float, pauses: list[float]
) -> None:
    async def crash() -> None:
        await world.supervisor.start(world.unit(checks=0))
        world.time.slept.clear()
        for starts in (2, 3):
            world.time.now += served
            world.launcher.children[-1].end(1)
            await world.until(lambda starts=starts: world.history("fast-0").count("ready") == starts)
        await world.supervisor.stop(["fast-0"])

    asyncio.run(crash())
    assert world.time.slept == pauses


def test_a_restart_waits_while_another_engine_of_the_gpu_starts(world: World) -> None:
    async def crash() -> None:
        await world.supervisor.start(world.unit("fast-0"))
        slow = asyncio.create_task(world.supervisor.start(world.unit("exact-0", checks=30)))
        await world.until(lambda: "start exact-0" in world.journal)
        world.launcher.children[0].end(1)
        await slow
        await world.until(lambda: world.journal.count("start fast-0") == 2)
        await world.supervisor.stop(["fast-0", "exact-0"])

    asyncio.run(crash())
    second = [at for at, entry in enumerate(world.journal) if entry == "start fast-0"][1]
    assert world.journal.index("warm exact-0") < second


def test_the_other_engine_is_left_alone_by_a_crash(world: World) -> None:
    async def crash() -> None:
        await world.supervisor.start(world.unit("fast-0"))
        await world.supervisor.start(world.unit("exact-0"))
        world.launcher.children[0].end(137)
        await world.until(lambda: world.history("fast-0").count("ready") == 2)
        assert not world.launcher.children[1].ended.done()
        await world.supervisor.stop(["fast-0", "exact-0"])

    asyncio.run(crash())
    assert world.history("exact-0") == ["starting", "warming", "ready", "stopping", "stopped"]


def test_one_that_hangs_is_killed_and_started_again(world: World) -> None:
    async def hang() -> None:
        await world.supervisor.start(world.unit())
        world.supervisor.kill_hung("fast-0", "no new token for 30 s")
        world.supervisor.kill_hung("fast-0", "no new token for 32 s")
        await world.until(lambda: world.history("fast-0").count("ready") == 2)
        await world.supervisor.stop(["fast-0"])

    asyncio.run(hang())
    pause = next(state for state in world.states if state.state == "backoff")
    assert pause.error == "no new token for 32 s; next start in 1 s"
    assert world.last("fast-0").restarts == 1
    assert len(world.launcher.children) == 2


def test_one_that_is_drained_is_not_killed_as_hung(world: World) -> None:
    async def nothing_runs() -> None: ...

    async def drained() -> None:
        await world.supervisor.start(world.unit())
        await world.supervisor.drain("fast-0", nothing_runs)
        world.supervisor.kill_hung("fast-0", "no new token for 30 s")
        assert "kill fast-0" not in world.journal
        await world.supervisor.stop(["fast-0"])

    asyncio.run(drained())


def test_stop_ends_all_and_restarts_nothing(world: World) -> None:
    async def stop() -> None:
        await world.supervisor.start(world.unit("fast-0"))
        await world.supervisor.start(world.unit("exact-0"))
        await world.supervisor.stop(["fast-0", "exact-0"])
        for _ in range(100):
            await asyncio.sleep(0)

    asyncio.run(stop())
    assert len(world.launcher.children) == 2
    assert {world.last(name).state for name in ("fast-0", "exact-0")} == {"stopped"}
    assert "kill fast-0" not in world.journal


def test_stop_during_a_pause_starts_nothing_more(world: World) -> None:
    async def stop() -> None:
        await world.supervisor.start(world.unit(checks=0))
        world.time.frozen = True
        world.launcher.children[0].end(1)
        await world.until(lambda: world.last("fast-0").state == "backoff")
        await world.supervisor.stop(["fast-0"])

    asyncio.run(stop())
    assert len(world.launcher.children) == 1
    assert world.last("fast-0").state == "stopped"


def test_stop_during_a_restart_ends_what_was_started(world: World) -> None:
    async def stop() -> None:
        await world.supervisor.start(world.unit(checks=3))
        world.launcher.children[0].end(1)
        await world.until(lambda: len(world.launcher.children) == 2)
        await world.supervisor.stop(["fast-0"])

    asyncio.run(stop())
    assert world.launcher.children[1].ended.done()
    assert len(world.launcher.children) == 2


def test_kill_ends_everything_while_a_stop_waits(world: World) -> None:
    async def kill() -> None:
        world.launcher.stubborn = True
        await world.supervisor.start(world.unit())
        stopping = asyncio.create_task(world.supervisor.stop(["fast-0"]))
        await world.until(lambda: "terminate fast-0" in world.journal)
        world.supervisor.kill()
        await stopping

    asyncio.run(kill())
    assert world.journal[-1] == "kill fast-0"
    assert world.last("fast-0").state == "stopped"


def test_a_port_that_another_process_serves_is_not_taken_for_ours(tmp_path: Path) -> None:
    async def main() -> None:
        server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        world = World(tmp_path)
        async with server:
            with pytest.raises(StartError, match="another process answers"):
                await world.supervisor.start(replace(world.unit("fast-0"), url=url))
        assert world.launcher.children == []

    asyncio.run(main())


# what an operator asks for


class FakeSleeper:
    def __init__(
        self, journal: list[str], fault: ProbeError | None = None, tells: bool | None = False
    ) -> None:
        self._journal, self._fault, self._tells = journal, fault, tells

    async def asleep(self) -> bool | None:
        return self._tells

    async def sleep(self) -> None:
        self._journal.append("sleep")

    async def wake(self) -> None:
        self._journal.append("wake")
        if self._fault is not None:
            raise self._fault


def sleeping(world: World, fault: ProbeError | None = None) -> Unit:
    sleeper: Any = FakeSleeper(world.journal, fault)
    return replace(world.unit(), sleeper=sleeper)


class Requests:
    """Requests that run on an engine, until they are let go."""

    def __init__(self, journal: list[str]) -> None:
        self._journal = journal
        self.ended = asyncio.Event()

    async def idle(self) -> None:
        self._journal.append("waits")
        await self.ended.wait()
        self._journal.append("idle")


def test_a_restart_waits_for_requests_and_is_no_failure(world: World) -> None:
    async def main() -> None:
        await world.supervisor.start(world.unit())
        requests = Requests(world.journal)
        restarting = asyncio.create_task(world.supervisor.restart("fast-0", requests.idle))
        await world.until(lambda: "waits" in world.journal)
        assert world.last("fast-0").state == "draining"
        assert not world.launcher.children[0].ended.done()
        requests.ended.set()
        await restarting
        await world.supervisor.stop(["fast-0"])

    asyncio.run(main())
    at = world.journal.index
    assert at("idle") < at("terminate fast-0")
    assert world.history("fast-0")[2:7] == ["ready", "draining", "stopping", "starting", "warming"]
    assert "backoff" not in world.history("fast-0")
    assert world.last("fast-0").restarts == 1


def test_a_restart_now_waits_for_nobody(world: World) -> None:
    async def main() -> None:
        await world.supervisor.start(world.unit())
        await world.supervisor.restart("fast-0", None)
        await world.supervisor.stop(["fast-0"])

    asyncio.run(main())
    assert "draining" not in world.history("fast-0")
    assert len(world.launcher.children) == 2


def test_an_engine_that_was_given_up_can_be_restarted(world: World) -> None:
    async def main() -> None:
        await world.supervisor.start(world.unit())
        world.launcher.codes = [1] * (LIMIT - 1)
        world.launcher.children[0].end(1)
        await world.until(lambda: world.last("fast-0").state == "failed")
        await world.supervisor.restart("fast-0", None)
        assert world.last("fast-0").state == "ready"
        world.launcher.children[-1].end(1)
        await world.until(lambda: world.history("fast-0")[-1] == "ready" and len(world.launcher.children) > 6)
        await world.supervisor.stop(["fast-0"])

    asyncio.run(main())


def test_a_pause_after_a_crash_is_cut_short_by_a_restart(world: World) -> None:
    async def main() -> None:
        await world.supervisor.start(world.unit(checks=0))
        world.time.frozen = True
        world.launcher.children[0].end(1)
        await world.until(lambda: world.last("fast-0").state == "backoff")
        world.time.frozen = False
        await world.supervisor.restart("fast-0", None)
        await world.supervisor.stop(["fast-0"])

    asyncio.run(main())
    assert len(world.launcher.children) == 2


def test_a_drain_that_is_given_up_gives_the_engine_back(world: World) -> None:
    async def main() -> None:
        await world.supervisor.start(world.unit())
        draining = asyncio.create_task(world.supervisor.drain("fast-0", Requests(world.journal).idle))
        await world.until(lambda: world.last("fast-0").state == "draining")
        draining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await draining
        assert world.last("fast-0").state == "ready"
        await world.supervisor.stop(["fast-0"])

    asyncio.run(main())


def test_one_thing_at_a_time_is_done_to_an_engine(world: World) -> None:
    async def main() -> None:
        await world.supervisor.start(world.unit())
        requests = Requests(world.journal)
        draining = asyncio.create_task(world.supervisor.drain("fast-0", requests.idle))
        await world.until(lambda: world.last("fast-0").state == "draining")
        with pytest.raises(OperationError, match="fast-0 is draining: wait until that has ended"):
            await world.supervisor.restart("fast-0", None)
        requests.ended.set()
        await draining
        await world.supervisor.stop(["fast-0"])

    asyncio.run(main())


def test_a_crash_while_it_drains_is_told_and_mended(world: World) -> None:
    async def main() -> None:
        await world.supervisor.start(world.unit())
        requests = Requests(world.journal)
        draining = asyncio.create_task(world.supervisor.drain("fast-0", requests.idle))
        await world.until(lambda: world.last("fast-0").state == "draining")
        world.launcher.children[0].end(137)
        await world.until(lambda: world.last("fast-0").state == "backoff")
        requests.ended.set()
        with pytest.raises(OperationError, match="ended by itself meanwhile"):
            await draining
        await world.until(lambda: world.last("fast-0").state == "ready")
        await world.supervisor.stop(["fast-0"])

    asyncio.run(main())
    assert len(world.launcher.children) == 2


def test_a_drained_engine_stays_so_after_a_crash(world: World) -> None:
    async def main() -> None:
        requests = Requests(world.journal)
        requests.ended.set()
        await world.supervisor.start(world.unit())
        await world.supervisor.drain("fast-0", requests.idle)
        world.launcher.children[0].end(137)
        await world.until(lambda: world.history("fast-0")[-3:] == ["starting", "warming", "drained"])
        await world.supervisor.resume("fast-0")
        assert world.last("fast-0").state == "ready"
        await world.supervisor.stop(["fast-0"])

    asyncio.run(main())


def test_it_sleeps_when_nothing_runs_and_is_proven_when_it_wakes(world: World) -> None:
    async def main() -> None:
        requests = Requests(world.journal)
        requests.ended.set()
        await world.supervisor.start(sleeping(world))
        world.journal.clear()
        await world.supervisor.sleep("fast-0", requests.idle)
        assert world.last("fast-0").state == "asleep"
        assert await world.supervisor.wake("fast-0") is None
        await world.supervisor.stop(["fast-0"])

    asyncio.run(main())
    assert world.journal == [
        *("waits", "idle", "sleep", "wake", "warm fast-0", "closed fast-0", "terminate fast-0"),
    ]
    assert world.history("fast-0")[2:] == [
        *("ready", "draining", "asleep", "waking", "ready", "stopping", "stopped"),
    ]


def test_one_without_sleep_mode_serves_on_undisturbed(world: World) -> None:
    async def main() -> None:
        sleeper: Any = FakeSleeper(world.journal, tells=None)
        await world.supervisor.start(replace(world.unit(), sleeper=sleeper))
        world.journal.clear()
        with pytest.raises(OperationError, match=r"fast-0 has no sleep mode: write --enable-sleep-mode"):
            await world.supervisor.sleep("fast-0", Requests(world.journal).idle)
        assert world.journal == []
        assert world.history("fast-0")[-1] == "ready"
        await world.supervisor.stop(["fast-0"])

    asyncio.run(main())


def test_one_that_does_not_wake_is_started_anew(world: World) -> None:
    async def main() -> None:
        requests = Requests(world.journal)
        requests.ended.set()
        await world.supervisor.start(sleeping(world, ProbeError("it did not wake up")))
        await world.supervisor.sleep("fast-0", requests.idle)
        assert await world.supervisor.wake("fast-0") == "it did not wake up"
        assert world.last("fast-0").state == "ready"
        await world.supervisor.stop(["fast-0"])

    asyncio.run(main())
    assert len(world.launcher.children) == 2


def test_what_cannot_sleep_says_so(world: World) -> None:
    async def main() -> None:
        await world.supervisor.start(world.unit())
        with pytest.raises(OperationError, match="fast-0 cannot sleep"):
            await world.supervisor.sleep("fast-0", Requests(world.journal).idle)
        assert world.last("fast-0").state == "ready"
        await world.supervisor.stop(["fast-0"])

    asyncio.run(main())


def test_a_proof_and_the_log_are_in_the_state(world: World) -> None:
    async def main() -> None:
        await world.supervisor.start(world.unit())
        assert world.last("fast-0").notes == ("fast-0 is proven",)
        assert world.last("fast-0").warnings == ()
        (world.folder / "fast-0.log").write_text("CUDA error: unspecified launch failure\n")
        world.supervisor.look()
        (warning,) = world.last("fast-0").warnings
        assert warning.startswith("CUDA error: ")
        changes = len(world.states)
        world.supervisor.look()
        assert len(world.states) == changes
        await world.supervisor.stop(["fast-0"])

    asyncio.run(main())


def test_two_supervisors_start_on_one_gpu_one_after_the_other(tmp_path: Path) -> None:
    async def main() -> tuple[World, World]:
        worlds = World(tmp_path), World(tmp_path)
        for world in worlds:
            world.supervisor = Supervisor(
                world.launcher, world.states.append, clock=world.time, locks=tmp_path / "locks"
            )
        one, other = worlds
        other.journal = other.launcher.journal = one.journal
        first = asyncio.create_task(one.supervisor.start(one.unit("fast-0", checks=2)))
        await one.until(lambda: "start fast-0" in one.journal)
        await asyncio.gather(first, other.supervisor.start(other.unit("exact-0")))
        for world, name in ((one, "fast-0"), (other, "exact-0")):
            await world.supervisor.stop([name])
        return worlds

    one, other = asyncio.run(main())
    assert one.journal.index("warm fast-0") < one.journal.index("start exact-0")
    waiting = next(state for state in other.states if state.state == "waiting")
    assert waiting.error == f"another `dualgauge up` (pid {os.getpid()}) starts an engine on gpu:0"


def test_one_that_ends_while_it_sleeps_is_started_when_it_is_woken(world: World) -> None:
    async def main() -> None:
        requests = Requests(world.journal)
        requests.ended.set()
        await world.supervisor.start(sleeping(world))
        await world.supervisor.sleep("fast-0", requests.idle)
        world.launcher.children[0].end(137)
        await world.until(lambda: world.last("fast-0").pid is None)
        assert world.last("fast-0").state == "asleep"
        assert len(world.launcher.children) == 1
        why = await world.supervisor.wake("fast-0")
        assert why is not None
        assert "SIGKILL" in why
        assert world.last("fast-0").state == "ready"
        await world.supervisor.stop(["fast-0"])

    asyncio.run(main())
    assert "wake" not in world.journal
    assert len(world.launcher.children) == 2
