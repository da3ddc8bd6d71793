from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from engines.choice import choose
from engines.hardware import GIB, MIB, Gpu, Machine
from gateway.cli.preflight import (
    Listener,
    Need,
    cpu_problem,
    disk_problem,
    free_ports,
    port_owner,
    port_problems,
)
from gateway.cli.starter import starter
from gateway.config import Config, parse


def listener(port: int, host: str = "127.0.0.1") -> Listener:
    return Listener(host, port, "the gateway", "change `listen`")


def test_a_free_port_is_no_problem() -> None:
    assert port_problems([listener(free_ports(20000, 1)[0])]) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_taken_port_names_its_process(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (problem,) = port_problems([listener(port, host)])
        owner = port_owner(port)
    assert owner is not None
    assert owner.endswith(f"(pid {os.getpid()})")
    assert problem == f"{host}:{port} (the gateway) is in use by {owner}. Stop that, or change `listen`."


def test_a_port_over_ipv6_has_an_owner_too() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        owner = port_owner(port)
        (problem,) = port_problems([listener(port, "::1")])
    assert problem.startswith(f"[::1]:{port} (the gateway) is in use by ")
    assert owner is not None
    assert f"pid {os.getpid()}" in owner


def test_every_taken_port_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        found = port_problems([listener(server.getsockname()[1]) for server in (one, two)])
    assert len(found) == 2


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    (problem,) = port_problems([listener(20000, "192.0.2.1")])
    assert "cannot be listened on" in problem


def test_a_connection_from_a_port_is_no_owner_of_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as caller:
        caller.connect(server.getsockname())
        assert port_owner(caller.getsockname()[1]) is None


def test_free_ports_leave_out_those_taken_and_those_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        found = free_ports(first, 2, taken=[first + 1])
    assert len(set(found)) == 2
    assert first not in found
    assert first + 1 not in found


def test_needs_on_one_file_system_are_added_up(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    half = free * 2 // 3
    assert disk_problem([Need(tmp_path, half, "a")]) is None
    problem = disk_problem([Need(tmp_path / "envs", half, "a"), Need(tmp_path / "models", half, "b")])
    assert problem is not None
    for word in ("no disk space", "a ", "b ", str(tmp_path / "envs"), f"file system of {tmp_path}"):
        assert word in problem


def test_nothing_needed_is_no_problem() -> None:
    assert disk_problem([]) is None


@pytest.mark.parametrize(
    ("architecture", "flags", "word"),
    [
        ("x86_64", {"avx2"}, None),
        ("x86_64", {"avx2", "avx512f"}, None),
        ("x86_64", {"sse4_2"}, "AVX2"),
        ("x86_64", set(), None),
        ("aarch64", {"asimd"}, "aarch64"),
    ],
)
def test_which_processors_run_the_cpu_engines(architecture: str, flags: set[str], word: str | None) -> None:
    problem = cpu_problem(Machine((), (0,), GIB, GIB, architecture, frozenset(flags)))
    assert problem is None if word is None else problem is not None and word in problem


def written(*gpus: Gpu) -> tuple[Config, str]:
    text = starter(choose(gpus), [8101, 8102], listen="127.0.0.1:8080", admin="127.0.0.1:8081")
    return parse(text, Path("/site/dualgauge.yaml"), {}), text


def card(size: int, index: int = 0, capability: tuple[int, int] = (8, 9)) -> Gpu:
    return Gpu(index, "card", size * GIB, size * GIB - 480 * MIB, capability)


def test_the_file_for_a_machine_without_a_gpu_is_the_demo_pair() -> None:
    config, text = written()
    assert config.model == "smollm2"
    assert [(e.name, e.tier, e.precision, e.model) for e in config.engines] == [
        ("fast-0", "fast", "awq", "demo/smollm2-135m-awq"),
        ("exact-0", "exact", "bf16", "demo/smollm2-135m-bf16"),
    ]
    assert [e.url for e in config.engines] == ["http://127.0.0.1:8101", "http://127.0.0.1:8102"]
    assert all(e.gpu is None and e.share is None for e in config.engines)
    assert "no NVIDIA GPU is seen" in text


@pytest.mark.parametrize("gpus", [[card(24)], [card(24), card(24, 1)], [card(96)]])
def test_the_file_for_gpus_holds_the_chosen_pair(gpus: list[Gpu]) -> None:
    config, text = written(*gpus)
    choice = choose(gpus)
    assert choice.pair is not None
    assert config.model == choice.pair.name
    for engine, placed in zip(config.engines, choice.placements, strict=True):
        assert (engine.model, engine.gpu, engine.share) == (placed.spec.model, placed.gpu, placed.share)
        assert engine.args[engine.args.index("--max-model-len") + 1] == str(choice.context)
        many = engine.args[engine.args.index("--max-num-seqs") + 1]
        assert many == str(placed.settings.work.sequences)
    assert "is the largest pair of the table that fits" in text


def test_on_gpus_without_bfloat16_both_engines_use_float16() -> None:
    config, _ = written(card(16, capability=(7, 5)))
    fast, exact = config.engines
    assert exact.precision == "fp16"
    assert fast.args[fast.args.index("--dtype") + 1] == "float16"


def test_every_line_of_the_file_is_short() -> None:
    for gpus in ([], [card(24)], [card(24), card(24, 1)]):
        text = written(*gpus)[1]
        assert max(len(line) for line in text.splitlines() if "args" not in line) <= 110
