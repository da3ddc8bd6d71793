"""Of what `dualgauge bench` measures: crossing points, results that are kept, memory, perplexity."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.bench import configurations, load, memory, perplexity, results, spent
from engines.bench.crossing import Crossing, crossing
from engines.bench.results import FULL, QUICK, TEXTS, Host, Measured, Results, ResultsError, Score, Spent
from tests.engines.test_llamacpp import BINARY, MODEL, placed

HOST = Host("a processor", 2, 1 << 30, (), "Linux")
SPEEDS = st.dictionaries(st.integers(1, 1024), st.floats(0.01, 1e6), min_size=1, max_size=8)


# where one stops being faster


def test_the_crossing_lies_where_the_line_between_two_levels_meets_one() -> None:
    # twice as fast at 8, half as fast at 32: half way between them on logarithmic scales
    assert crossing({8: 200.0, 32: 100.0}, {8: 100.0, 32: 200.0}) == Crossing(
        "at", (8, 32), (8,), 32, pytest.approx(16.0)
    )


def test_levels_of_one_engine_alone_do_not_count() -> None:
    assert crossing({1: 10.0}, {2: 10.0}) is None


@given(SPEEDS, SPEEDS)
def test_above_the_crossing_no_level_is_won_and_the_level_below_is(
    fast: dict[int, float], other: dict[int, float]
) -> None:
    found = crossing(fast, other)
    both = sorted(fast.keys() & other.keys())
    if found is None:
        assert not both
        return
    won = [level for level in both if fast[level] > other[level]]
    assert found.levels == tuple(both)
    assert found.wins == tuple(won)
    if found.kind == "at":
        assert found.first is not None
        assert found.level is not None
        assert not [level for level in won if level >= found.first]
        assert [level for level in both if won[-1] < level < found.first] == []
        assert won[-1] * 0.999 <= found.level <= found.first * 1.001
    else:
        assert (both[-1] in won) == (found.kind == "beyond")
        assert bool(won) == (found.kind == "beyond")


@given(SPEEDS, SPEEDS, st.floats(0.5, 2.0))
def test_the_unit_of_speed_does_not_move_the_crossing(
    fast: dict[int, float], other: dict[int, float], factor: float
) -> None:
    one = crossing(fast, other)
    two = crossing({k: v * factor for k, v in fast.items()}, {k: v * factor for k, v in other.items()})
    if one is not None and two is not None and one.wins == two.wins and one.level and two.level:
        assert two.level == pytest.approx(one.level, rel=1e-3)


# results


def begun(*rows: Measured) -> Results:
    return Results(results.VERSION, 1.0, HOST, QUICK, list(rows))


def test_a_row_that_was_not_at_hand_is_filled_by_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results.store(path, begun(Measured("a", "A", identity="1"), Measured("b", "B", problem="not installed")))
    found = results.resume(path, begun(Measured("a", "A", identity="1"), Measured("b", "B", identity="2")))
    assert found.configurations[1] == Measured("b", "B", identity="2")


def test_figures_of_what_is_no_longer_at_hand_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    score = {"prose": Score(2.0, 3, "x")}
    results.store(path, begun(Measured("a", "A", identity="1", scores=score)))
    found = results.resume(path, begun(Measured("a", "A", problem="gone")))
    assert found.configurations[0].scores == score


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}'])
def test_a_broken_file_says_how_to_go_on(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ResultsError, match="--fresh"):
        results.load(path)


@pytest.mark.parametrize("workload", [QUICK, FULL])
def test_every_level_has_as_many_requests_as_it_has_at_a_time(workload: results.Workload) -> None:
    assert all(workload.requests(level) >= level for level in (*workload.levels, 1, 3, 500))


# memory


def test_the_memory_of_a_process_counts_its_children() -> None:
    block = 64 << 20
    hold = f"x = bytearray(b'x' * {block}); print(1, flush=True); input()"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", nested], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert len(memory.tree(process.pid)) == 2
        assert memory.resident(process.pid) > block
        process.communicate(b"\n")


def test_a_process_that_is_gone_holds_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert memory.resident(process.pid) == 0


def test_our_own_memory_is_read() -> None:
    assert memory.resident(os.getpid()) > 1 << 20


# who listens


def test_a_port_is_that_of_the_process_that_listens_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert memory.listens(os.getpid(), port)
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
            assert not memory.listens(other.pid, port)
            other.communicate(b"\n")
    assert not memory.listens(os.getpid(), port)


# perplexity


def test_perplexity_of_equal_chances_is_their_number() -> None:
    assert perplexity.perplexity([math.log(1 / 8)] * 5) == pytest.approx(8.0)


def test_a_text_of_one_token_has_none() -> None:
    with pytest.raises(ValueError, match="one token"):
        perplexity.perplexity([])


@pytest.mark.parametrize("name", TEXTS)
def test_the_texts_ship_and_are_long_enough(name: str) -> None:
    assert len(perplexity.text_of(name)) > 1500


# what a run takes


def test_what_a_child_used_is_ours_and_not_that_of_others() -> None:
    before = spent.now()
    subprocess.run([sys.executable, "-c", "while __import__('time').process_time() < 0.5: pass"], check=True)
    found = spent.now().since(before)
    assert found.cpu >= 0.4  # the kernel counts in ticks
    assert found.seconds >= 0.4


def test_what_is_neither_idle_nor_ours_is_that_of_others(tmp_path: Path) -> None:
    second = os.sysconf("SC_CLK_TCK")

    def at(user: int, idle: int, wait: int, guest: int) -> Spent:
        fields = [field * second for field in (user, 0, 0, idle, wait, 0, 0, 0, guest, 0)]
        (tmp_path / "stat").write_text(f"cpu  {' '.join(map(str, fields))}\ncpu0 1 1 1\n")
        return spent.now(tmp_path)

    before = at(user=1000, idle=5000, wait=0, guest=500)
    found = at(user=1030, idle=5060, wait=10, guest=530).since(before)
    assert found.idle == pytest.approx(70)
    assert found.others == pytest.approx(30, abs=1)  # less what this test used
    assert found.disturbed == pytest.approx(0.3, abs=0.01)


def test_a_run_that_goes_on_adds_to_what_the_first_took(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    first = begun(Measured("a", "A", identity="1"))
    first.spent = Spent(60.0, 50.0, 10.0, 60.0)
    results.store(path, first)
    found = results.resume(path, begun(Measured("a", "A", identity="1"))).spent
    assert found is not None
    assert found + Spent(6.0, 5.0, 1.0, 6.0) == Spent(66.0, 55.0, 11.0, 66.0)


def test_a_run_that_took_nothing_was_not_disturbed() -> None:
    assert Spent(0.0, 0.0, 0.0, 0.0).disturbed == 0.0


# what load generator and servers are told


def told(order: list[str], option: str) -> str:
    return order[order.index(option) + 1]


def test_no_connection_is_used_twice() -> None:
    order = load.arguments("http://a", "m", Path("/m"), QUICK, requests=16, level=8)
    assert told(order, "--header") == "Connection=close"


def test_no_two_levels_are_asked_the_same_prompts() -> None:
    orders = [
        load.arguments("http://a", "m", Path("/m"), QUICK, requests=QUICK.requests(level), level=level)
        for level in QUICK.levels
    ]
    assert len({told(order, "--seed") for order in orders}) == len(orders)


async def allowed() -> None:
    pass


def llama_server(inherited: dict[str, str], **fields: Any) -> configurations.Configuration:
    placement = placed(**fields)
    return configurations.served(
        "gguf", placement, BINARY, MODEL, Path("/m"), QUICK, 19600, inherited, frozenset(), allowed
    )


def test_a_llama_server_sends_no_pings_while_it_is_measured() -> None:
    assert llama_server({}).command.env["LLAMA_ARG_SSE_PING_INTERVAL"] == "-1"


def test_pings_that_the_operator_wants_are_left() -> None:
    name = "LLAMA_ARG_SSE_PING_INTERVAL"
    assert llama_server({}, env={name: "5"}).command.env[name] == "5"
    assert llama_server({name: "7"}).command.env[name] == "7"


def test_each_slot_of_a_llama_server_has_room_for_a_request() -> None:
    argv = list(llama_server({}).command.argv)
    assert told(argv, "--parallel") == "128"
    room = int(told(argv, "--ctx-size")) // 128
    assert room >= max(QUICK.input_tokens + QUICK.output_tokens, QUICK.scored)
