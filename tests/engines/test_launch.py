import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from engines import launch_child, runfile
from engines.launch import (
    AGAIN,
    Command,
    EngineProbe,
    HealthProbe,
    KeptChild,
    ProbeError,
    ProcessLauncher,
    describe_exit,
    rotate,
    stop,
    tail,
    telling_lines,
    wait_ready,
)

FAKE = Path(__file__).with_name("fake_engine.py")


def alive(pid: int) -> bool:
    return runfile.started(pid) != 0


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)


def shell(script: str) -> Command:
    return Command(("bash", "-c", script), dict(os.environ))


def run(command: Command, log: Path, use: Callable[[KeptChild], Awaitable[None]]) -> None:
    """Start it, use it, and see that nothing of its session is left."""

    async def go() -> int:
        child = await ProcessLauncher().start(command, log)
        try:
            await use(child)
        finally:
            child.kill()
            await child.wait()
        return child.keeper.pid

    session = asyncio.run(go())
    assert members(session) == []


def members(session: int) -> list[str]:
    """Pids of what runs in a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == session:
                found.append(stat.parent.name)
    return found


def test_output_goes_to_the_log_and_the_exit_code_comes_back(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "engine.log"

    async def use(child: KeptChild) -> None:
        assert await child.wait() == 7
        assert await child.wait() == 7

    run(shell("echo out; echo err >&2; exit 7"), log, use)
    assert log.read_text() == "out\nerr\n"


def test_a_second_start_appends(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"

    async def use(child: KeptChild) -> None:
        await child.wait()

    run(shell("echo one"), log, use)
    run(shell("echo two"), log, use)
    assert log.read_text() == f"one\n{AGAIN}two\n"
    assert tail(log) == "two\n"


def test_the_pid_is_the_programs_own(tmp_path: Path) -> None:
    async def use(child: KeptChild) -> None:
        line = Path(f"/proc/{child.pid}/cmdline")
        while "sleep\x0060" not in line.read_text():  # told of before it has become the program
            assert child.keeper.alive()
            await asyncio.sleep(0.01)
        assert child.keeper.alive()
        assert os.getsid(child.pid) == child.keeper.pid != os.getsid(0)

    run(Command(("sleep", "60"), dict(os.environ)), tmp_path / "log", use)


def test_a_program_that_does_not_exist_says_so(tmp_path: Path) -> None:
    async def use(child: KeptChild) -> None:
        assert await child.wait() == 127

    run(Command(("/no/such/program",), {}), tmp_path / "log", use)
    assert (tmp_path / "log").read_text() == "cannot run /no/such/program: No such file or directory\n"


def test_the_environment_is_the_one_given(tmp_path: Path) -> None:
    async def use(child: KeptChild) -> None:
        await child.wait()

    run(Command(("/usr/bin/env",), {"ONLY": "this"}), tmp_path / "log", use)
    names = {line.partition("=")[0] for line in (tmp_path / "log").read_text().splitlines()}
    assert names - {"LC_CTYPE"} == {"ONLY"}  # Python adds that one where no locale is set


def test_stop_asks_first(tmp_path: Path) -> None:
    async def use(child: KeptChild) -> None:
        await wait_for_text(tmp_path / "log", "here")
        assert await stop(child, grace=20.0) == 3

    run(shell("trap 'exit 3' TERM; echo here; while :; do sleep 0.05; done"), tmp_path / "log", use)


def test_stop_kills_what_does_not_listen(tmp_path: Path) -> None:
    async def use(child: KeptChild) -> None:
        await wait_for_text(tmp_path / "log", "here")
        assert await stop(child, grace=0.2) == 137

    run(shell("trap '' TERM; echo here; while :; do sleep 0.05; done"), tmp_path / "log", use)


async def wait_for_text(log: Path, text: str) -> None:
    while text not in tail(log):
        await asyncio.sleep(0.02)


def test_grandchildren_in_sessions_of_their_own_end_with_the_program(tmp_path: Path) -> None:
    async def use(child: KeptChild) -> None:
        assert await child.wait() == 0

    script = "setsid sh -c 'echo $$; exec sleep 60' & while ! [ -s log ]; do sleep 0.02; done; exit 0"
    command = Command(("bash", "-c", f"cd {tmp_path}; {script}"), dict(os.environ))
    run(command, tmp_path / "log", use)
    assert not alive(int((tmp_path / "log").read_text()))


def test_a_program_killed_with_9_takes_its_children_along(tmp_path: Path) -> None:
    async def use(child: KeptChild) -> None:
        await wait_for_text(tmp_path / "log", "\n")
        os.kill(child.pid, signal.SIGKILL)
        assert await child.wait() == 137

    run(shell("sleep 60 & echo $!; wait"), tmp_path / "log", use)
    assert not alive(int((tmp_path / "log").read_text()))


SHARED = """
import time
from multiprocessing import shared_memory

memory = shared_memory.SharedMemory(create=True, size=4096)
print(memory.name, flush=True)
time.sleep(60)
"""


def test_shared_memory_of_a_killed_program_is_cleaned_up(tmp_path: Path) -> None:
    async def use(child: KeptChild) -> None:
        await wait_for_text(tmp_path / "log", "\n")
        assert Path("/dev/shm", tail(tmp_path / "log").strip()).exists()
        os.kill(child.pid, signal.SIGKILL)
        await child.wait()

    run(Command((sys.executable, "-c", SHARED), dict(os.environ)), tmp_path / "log", use)
    assert not Path("/dev/shm", tail(tmp_path / "log").split()[0]).exists()


def test_shared_memory_is_cleaned_up_after_a_forced_end_too(tmp_path: Path) -> None:
    async def use(child: KeptChild) -> None:
        await wait_for_text(tmp_path / "log", "\n")
        child.kill()
        await child.wait()

    run(Command((sys.executable, "-c", SHARED), dict(os.environ)), tmp_path / "log", use)
    assert not Path("/dev/shm", tail(tmp_path / "log").split()[0]).exists()


OWNER = """
import asyncio, sys
from pathlib import Path
from engines.launch import Command, ProcessLauncher

async def main():
    command = Command(("bash", "-c", sys.argv[1]), {"PATH": "/usr/bin:/bin"})
    child = await ProcessLauncher().start(command, Path(sys.argv[2]))
    print(child.pid, child.keeper.pid, flush=True)
    await child.wait()

asyncio.run(main())
"""


def owner(script: str, log: Path) -> tuple[subprocess.Popen[str], int, int]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, script, str(log)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    program, keeper = map(int, process.stdout.readline().split())
    process.stdout.close()
    return process, program, keeper


def test_nothing_outlives_an_owner_that_is_killed_with_9(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process, program, keeper = owner("setsid sleep 60 & echo $!; wait", log)
    eventually(lambda: tail(log) != "")
    process.kill()
    process.wait()
    eventually(lambda: not alive(program) and not alive(keeper) and not alive(int(tail(log))))


def test_a_program_does_not_outlive_a_keeper_that_is_killed_with_9(tmp_path: Path) -> None:
    process, program, keeper = owner("sleep 60; exit 0", tmp_path / "log")
    os.kill(keeper, signal.SIGKILL)
    eventually(lambda: not alive(program))
    process.wait()


def test_what_a_killed_keeper_left_is_found_and_swept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process, program, keeper = owner("sleep 60 & echo $!; wait", log)
    eventually(lambda: tail(log) != "")
    identity = runfile.process(keeper)
    os.kill(keeper, signal.SIGKILL)
    process.wait()
    eventually(lambda: not alive(program))
    orphan = int(tail(log))
    unit = runfile.UnitState("fast-0", "http://127.0.0.1:1", str(log), keeper=identity)
    state = runfile.Run("f", identity, runfile.boot_id(), "ready", "", "", engines=(unit,))
    assert runfile.leftovers(state) == (orphan,)
    assert runfile.sweep(state) == 1
    assert not alive(orphan)


@contextlib.contextmanager
def session() -> Iterator[runfile.Process]:
    """The leader of a session of its own."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        try:
            yield runfile.process(process.pid)
        finally:
            process.kill()


def run_of(keeper: runfile.Process) -> runfile.Run:
    unit = runfile.UnitState("x", "", "", keeper=keeper)
    mine = runfile.process(os.getpid())
    return runfile.Run("f", mine, runfile.boot_id(), "ready", "", "", engines=(unit,))


def test_a_session_is_known_by_its_leader() -> None:
    with session() as leader:
        assert runfile.leftovers(run_of(leader)) == (leader.pid,)


def test_a_session_number_that_somebody_else_has_now_is_left_alone() -> None:
    with session() as leader:
        assert runfile.leftovers(run_of(runfile.Process(leader.pid, leader.started - 1))) == ()


def test_a_session_whose_leader_was_never_seen_alive_is_left_alone() -> None:
    with session() as leader:
        assert runfile.leftovers(run_of(runfile.Process(leader.pid, 0))) == ()


def test_processes_of_a_session_led_from_outside_the_container_are_left_alone() -> None:
    """Their session reads 0, and so does the start of what is not there."""
    assert runfile.leftovers(run_of(runfile.Process(0, 1))) == ()


def test_the_state_of_another_boot_means_nothing() -> None:
    leader = os.getsid(0)
    unit = runfile.UnitState("x", "", "", keeper=runfile.process(leader))
    state = runfile.Run("f", runfile.process(os.getpid()), "another boot", "ready", "", "", engines=(unit,))
    assert runfile.leftovers(state) == ()


def test_the_run_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    unit = runfile.UnitState("fast-0", "http://127.0.0.1:1", "log", state="ready", pid=5, restarts=2)
    state = runfile.Run("f", runfile.Process(1, 2), "boot", "ready", "b", "a", gateway=unit, engines=(unit,))
    runfile.write(tmp_path / "deep" / "run.json", state)
    assert runfile.read(tmp_path / "deep" / "run.json") == state
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["run.json"]


@pytest.mark.parametrize("text", ["", "{", '{"config": 1}', "[]"])
def test_a_run_file_that_is_not_ours_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    assert runfile.read(tmp_path / "run.json") is None


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    with runfile.hold(tmp_path / "lock") as first, runfile.hold(tmp_path / "lock") as second:
        assert (first, second) == (True, False)
    with runfile.hold(tmp_path / "lock") as again:
        assert again


def fake(port: int, *options: str) -> Command:
    return Command((sys.executable, str(FAKE), "--port", str(port), *options), dict(os.environ))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def ready(child: KeptChild, port: int, model: str = "smollm2") -> list[str]:
    seen: list[str] = []
    await wait_ready(
        child,
        EngineProbe(f"http://127.0.0.1:{port}", model),
        timeout=30.0,
        on_warming=lambda: seen.append("warming"),
        sleep=asyncio.sleep,
    )
    return seen


def test_an_engine_is_waited_for_until_it_is_healthy_and_warm(tmp_path: Path) -> None:
    port = free_port()

    async def use(child: KeptChild) -> None:
        assert await ready(child, port) == ["warming"]

    run(fake(port, "--slow", "0.6"), tmp_path / "log", use)
    requests = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("INFO")]
    assert '"GET /health HTTP/1.1" 503' in requests[0]
    assert '"POST /v1/completions HTTP/1.1" 200' in requests[-1]


def test_an_engine_that_dies_is_not_waited_for(tmp_path: Path) -> None:
    port = free_port()

    async def use(child: KeptChild) -> None:
        with pytest.raises(ChildProcessError) as caught:
            await ready(child, port)
        assert caught.value.args == (1,)

    run(fake(port, "--die", "ValueError: no"), tmp_path / "log", use)


def test_a_warm_up_that_fails_says_what_came_back(tmp_path: Path) -> None:
    port = free_port()

    async def use(child: KeptChild) -> None:
        with pytest.raises(ProbeError, match=r"got 500: .*the model is broken"):
            await ready(child, port)

    run(fake(port, "--warm-up", "500"), tmp_path / "log", use)


def test_an_engine_without_completions_counts_as_warm(tmp_path: Path) -> None:
    port = free_port()

    async def use(child: KeptChild) -> None:
        assert await ready(child, port) == ["warming"]

    run(fake(port, "--warm-up", "404"), tmp_path / "log", use)


def test_an_engine_that_serves_another_model_is_not_ready(tmp_path: Path) -> None:
    port = free_port()

    async def use(child: KeptChild) -> None:
        with pytest.raises(ProbeError, match="does not exist"):
            await ready(child, port, model="other")

    run(fake(port), tmp_path / "log", use)


def test_health_of_a_port_where_nobody_listens() -> None:
    async def ask() -> bool:
        probe = HealthProbe(f"http://127.0.0.1:{free_port()}", "/healthz")
        try:
            return await probe.healthy()
        finally:
            await probe.close()

    assert asyncio.run(ask()) is False


def test_the_previous_log_is_kept_once(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    rotate(log)
    for text in ("one", "two"):
        log.write_text(text)
        rotate(log)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"engine.log.1": "two"}


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "ended with exit code 0"),
        (1, "ended with exit code 1"),
        (143, "was ended by SIGTERM"),
        (137, "was ended by SIGKILL (out of memory, perhaps: see `dmesg`)"),
        (255, "ended with exit code 255"),
    ],
)
def test_exit_codes_in_words(code: int, text: str) -> None:
    assert describe_exit(code) == text


VLLM = """\
(EngineCore pid=812) INFO 11-30 09:41:02 [cpu_worker.py:88] starting
(EngineCore pid=812) ERROR 11-30 09:41:03 [core.py:1021] EngineCore failed to start.
(EngineCore pid=812) ERROR 11-30 09:41:03 [core.py:1021] Traceback (most recent call last):
(EngineCore pid=812) ERROR 11-30 09:41:03 [core.py:1021]   File "core.py", line 1, in f
(EngineCore pid=812) ERROR 11-30 09:41:03 [core.py:1021] ValueError: To serve at least one request with the \
model's max seq len, 2.0 GiB KV cache is needed.
(EngineCore pid=812) Process EngineCore:
(EngineCore pid=812) Traceback (most recent call last):
(EngineCore pid=812)   File "core.py", line 1, in f
(EngineCore pid=812) ValueError: To serve at least one request with the model's max seq len, \
2.0 GiB KV cache is needed.
(APIServer pid=800) Traceback (most recent call last):
(APIServer pid=800)   File "utils.py", line 2, in g
(APIServer pid=800) RuntimeError: Engine core initialization failed. See root cause above.
resource_tracker.py:254: UserWarning: There appear to be 1 leaked semaphore
"""


NO_ROOM = (
    "ValueError: To serve at least one request with the model's max seq len, 2.0 GiB KV cache is needed."
)
PYDANTIC = """\
Traceback (most recent call last):
  File "x.py", line 1
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, no such folder
    For further information visit https://example.org

bye
"""
USAGE = "vllm serve: error: unrecognized arguments: --nope"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (VLLM, (NO_ROOM,)),
        (f"usage: vllm serve [-h]\n{USAGE}\n", (USAGE,)),
        (PYDANTIC, tuple(PYDANTIC.splitlines()[2:4])),
        ("one\ntwo\n\nthree\n", ("one", "two", "three")),
        ("", ()),
    ],
)
def test_the_telling_lines_of_a_log(text: str, lines: tuple[str, ...]) -> None:
    assert telling_lines(text) == lines


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("x" * 1000 + "end")
    assert tail(log, 4) == "xend"
    assert tail(tmp_path / "none") == ""


def test_the_keeper_needs_nothing_but_the_standard_library() -> None:
    script = f"import sys; sys.path[:0] = []; import runpy; runpy.run_path({launch_child.__file__!r})"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
