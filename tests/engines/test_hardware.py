from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines.hardware import (
    CAPABILITY_QUERY,
    GIB,
    MIB,
    QUERY,
    Gpu,
    disk_free,
    gpus,
    imagined,
    load_nvml,
    look,
    nvml_gpus,
    parse_cpu_flags,
    parse_gpus,
    parse_meminfo,
    parse_processor,
    run,
)


def test_the_query_is_the_one_whose_output_is_parsed() -> None:
    assert QUERY == (
        "nvidia-smi",
        "--query-gpu=index,name,memory.total,memory.free",
        "--format=csv,noheader,nounits",
    )


def test_two_gpus_are_read_in_the_order_of_their_index() -> None:
    text = "1, NVIDIA L40S, 46068, 45200\n0, NVIDIA GeForce RTX 4090, 24564, 24060\n"
    assert parse_gpus(text) == (
        Gpu(0, "NVIDIA GeForce RTX 4090", 24564 * MIB, 24060 * MIB),
        Gpu(1, "NVIDIA L40S", 46068 * MIB, 45200 * MIB),
    )


def test_capabilities_go_to_their_gpu() -> None:
    text = "0, Tesla T4, 15360, 15000\n1, NVIDIA A100, 40960, 40000\n"
    found = parse_gpus(text, "0, 7.5\n1, 8.0\n")
    assert [gpu.capability for gpu in found] == [(7, 5), (8, 0)]


@pytest.mark.parametrize(
    "text",
    ["", "\n", "No devices were found\n", "0, NVIDIA A100, [N/A], [N/A]\n", "0, NVIDIA A100\n", ", , ,\n"],
)
def test_what_holds_no_figures_is_no_gpu(text: str) -> None:
    assert parse_gpus(text) == ()


def test_a_comma_in_a_name_is_part_of_it() -> None:
    assert parse_gpus("0, Odd, Inc. Card, 8192, 8000\n") == (
        Gpu(0, "Odd, Inc. Card", 8192 * MIB, 8000 * MIB),
    )


def test_a_driver_that_knows_no_capability_still_lists_its_gpus() -> None:
    def old_driver(command: Sequence[str]) -> str:
        return "0, Tesla V100, 16384, 16000\n" if command == QUERY else ""

    assert gpus(old_driver) == (Gpu(0, "Tesla V100", 16384 * MIB, 16000 * MIB),)


def test_without_a_driver_nothing_more_is_asked() -> None:
    asked = []

    def missing(command: Sequence[str]) -> str:
        asked.append(command)
        return ""

    assert gpus(missing) == ()
    assert CAPABILITY_QUERY not in asked


def test_a_missing_or_failing_command_says_nothing() -> None:
    assert run(("no-such-command-here",)) == ""
    assert run(("false",)) == ""
    assert run(("echo", "x")) == "x\n"


@pytest.mark.parametrize(
    ("total", "shown"), [(24564 * MIB, 23.64 * GIB), (15360 * MIB, 14.56 * GIB), (81920 * MIB, 79.14 * GIB)]
)
def test_cuda_shows_a_little_less_than_the_card_has(total: int, shown: float) -> None:
    visible = Gpu(0, "card", total, total).visible
    assert visible <= shown
    assert visible == pytest.approx(shown, rel=0.005)


def test_what_the_driver_says_it_keeps_counts_more_than_what_is_usual() -> None:
    assert Gpu(0, "card", 24 * GIB, 24 * GIB, reserved=300 * MIB).visible == 24 * GIB - 300 * MIB


class LostError(Exception):
    """What NVML raises."""


def driver() -> Any:
    """NVML with one good GPU and one that is lost."""

    def memory(handle: int, version: int) -> Any:
        if handle == 1:
            raise LostError
        assert version == 2
        return SimpleNamespace(total=24564 * MIB, reserved=340 * MIB, free=24000 * MIB, used=224 * MIB)

    return SimpleNamespace(
        NVMLError=LostError,
        nvmlMemory_v2=2,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetName=lambda handle: "NVIDIA GeForce RTX 4090",
        nvmlDeviceGetCudaComputeCapability=lambda handle: [8, 9],
    )


def test_nvml_tells_what_the_driver_keeps_and_lost_gpus_are_left_out() -> None:
    card = Gpu(0, "NVIDIA GeForce RTX 4090", 24564 * MIB, 24000 * MIB, (8, 9), 340 * MIB)
    assert nvml_gpus(driver()) == (card,)
    assert card.visible == 24224 * MIB


def test_a_driver_that_fails_under_nvml_shows_no_gpus() -> None:
    failing = driver()

    def fails() -> int:
        raise failing.NVMLError

    failing.nvmlDeviceGetCount = fails
    assert nvml_gpus(failing) == ()


def test_a_binding_that_is_too_old_shows_no_gpus() -> None:
    old = driver()
    del old.nvmlMemory_v2
    assert nvml_gpus(old) == ()


def test_nvml_is_asked_before_nvidia_smi(tmp_path: Path) -> None:
    def forbidden(command: Sequence[str]) -> str:
        pytest.fail("nvidia-smi was asked")

    machine = look(forbidden, root=machine_root(tmp_path, "max\n"), nvml=driver, env={})
    assert [gpu.name for gpu in machine.gpus] == ["NVIDIA GeForce RTX 4090"]


@pytest.mark.parametrize("value", ["", "-1"])
def test_gpus_that_are_hidden_from_cuda_are_hidden_from_us(tmp_path: Path, value: str) -> None:
    env = {"CUDA_VISIBLE_DEVICES": value}
    assert look(root=machine_root(tmp_path, "max\n"), nvml=driver, env=env).gpus == ()


def test_without_a_driver_there_is_no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def fails() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fails)
    assert load_nvml() is None


@pytest.mark.parametrize(
    ("size", "total"),
    [
        ("24GiB", 24 * GIB),
        ("24 GB", 24 * GIB),
        ("24", 24 * GIB),
        ("7.5g", 7 * GIB + GIB // 2),
        ("8188MiB", 8188 * MIB),
    ],
)
def test_a_gpu_that_is_not_there_has_a_size(size: str, total: int) -> None:
    gpu = imagined(1, size)
    assert (gpu.index, gpu.total) == (1, total)
    assert gpu.free == gpu.visible < total


@pytest.mark.parametrize("size", ["", "large", "24TiB", "-1GiB", "0", "24 GiB GiB", "1e3", "99999"])
def test_what_is_no_size_is_refused(size: str) -> None:
    with pytest.raises(ValueError, match="is no size of a GPU"):
        imagined(0, size)


def test_meminfo_gives_bytes() -> None:
    assert parse_meminfo("MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    600 kB\n") == (
        1000 * 1024,
        600 * 1024,
    )


def test_meminfo_of_an_old_kernel_has_no_available() -> None:
    assert parse_meminfo("MemTotal: 1000 kB\n") == (1000 * 1024, 1000 * 1024)


def test_cpu_flags_are_those_of_the_first_core() -> None:
    text = "processor : 0\nflags\t\t: fpu avx2 avx512f\n\nprocessor : 1\nflags\t\t: fpu\n"
    assert parse_cpu_flags(text) == {"fpu", "avx2", "avx512f"}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor : 0\nmodel name\t: Intel(R) Xeon(R): 2\n\nmodel name\t: other\n", "Intel(R) Xeon(R): 2"),
        ("processor : 0\nFeatures : fp asimd\n", ""),
    ],
)
def test_the_processor_is_that_of_the_first_core(text: str, name: str) -> None:
    assert parse_processor(text) == name


def machine_root(folder: Path, limit: str) -> Path:
    (folder / "proc").mkdir()
    (folder / "proc/meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemAvailable: {12 << 20} kB\n")
    (folder / "proc/cpuinfo").write_text("flags : avx2\n")
    (folder / "sys/fs/cgroup").mkdir(parents=True)
    (folder / "sys/fs/cgroup/memory.max").write_text(limit)
    (folder / "sys/fs/cgroup/memory.current").write_text(f"{GIB}\n")
    return folder


def test_a_container_has_no_more_memory_than_its_limit(tmp_path: Path) -> None:
    machine = look(lambda _: "", root=machine_root(tmp_path, f"{4 * GIB}\n"), nvml=lambda: None)
    assert (machine.memory, machine.available) == (4 * GIB, 3 * GIB)
    assert machine.cpu_flags == {"avx2"}
    assert machine.gpus == ()
    assert machine.cpus


def test_without_a_limit_the_memory_is_the_machines(tmp_path: Path) -> None:
    machine = look(lambda _: "", root=machine_root(tmp_path, "max\n"), nvml=lambda: None)
    assert (machine.memory, machine.available) == (16 * GIB, 12 * GIB)


def test_disk_space_of_a_folder_that_is_yet_to_be_made(tmp_path: Path) -> None:
    free, where = disk_free(tmp_path / "a" / "b")
    assert free > 0
    assert where == tmp_path
