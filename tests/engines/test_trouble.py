from __future__ import annotations

from pathlib import Path

import pytest

from engines.trouble import LogFollower

AWQ = (
    "(EngineCore pid=7) WARNING 11-30 09:35:01 [awq.py:327] Layer 'x' is not supported by AWQMarlin. "
    "Falling back to unoptimized AWQ kernels.\n"
)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (AWQ, "slow AWQ kernels"),
        (
            "WARNING awq quantization is not fully optimized yet. The speed can be slower\n",
            "slow AWQ kernels",
        ),
        ("INFO Engine 000: Running: 9 reqs, Waiting: 2 reqs, Preemptions: 3, GPU KV cache\n", "preemption"),
        ("WARNING Sequence group 5 is preempted by PreemptionMode.RECOMPUTE mode\n", "preemption"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n", "out of memory"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered\n", "CUDA error"),
        ("INFO Engine 000: Running: 9 reqs, Corrupted: 2 reqs\n", "broken numbers"),
    ],
)
def test_lines_that_mean_trouble(tmp_path: Path, line: str, name: str) -> None:
    log = tmp_path / "log"
    log.write_text(f"INFO: fine\n{line}")
    (found,) = LogFollower(log).look()
    assert found.startswith(f"{name}: ")


@pytest.mark.parametrize(
    "line",
    [
        "INFO Engine 000: Running: 9 reqs, Waiting: 2 reqs, GPU KV cache usage: 80.0%\n",
        "INFO Engine 000: Running: 9 reqs, Preemptions: 0\n",
        "INFO Using AWQMarlin kernels\n",
        "INFO Corrupted: 0 reqs\n",
        'INFO: "POST /v1/completions HTTP/1.1" 200\n',
    ],
)
def test_lines_that_mean_none(tmp_path: Path, line: str) -> None:
    (tmp_path / "log").write_text(line)
    assert LogFollower(tmp_path / "log").look() == ()


def test_a_trouble_is_told_once_with_its_last_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    follower = LogFollower(log)
    assert follower.look() == ()
    log.write_text(AWQ * 3)
    (found,) = follower.look()
    assert found.startswith("slow AWQ kernels (3 times): ")
    assert found.endswith("Its log says: Layer 'x' is not supported by AWQMarlin. " + AWQ.strip()[-40:])
    assert follower.look() == (found,)


def test_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    log = tmp_path / "log"
    follower = LogFollower(log)
    log.write_text("CUDA out of ")
    assert follower.look() == ()
    with log.open("a") as more:
        more.write("memory\n")
    assert len(follower.look()) == 1


def test_a_log_that_was_begun_anew_is_read_from_its_start(tmp_path: Path) -> None:
    log = tmp_path / "log"
    follower = LogFollower(log)
    log.write_text("INFO: a long line that is fine\n" * 20)
    follower.look()
    log.write_text("CUDA out of memory\n")
    assert len(follower.look()) == 1
