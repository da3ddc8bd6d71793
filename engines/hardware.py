"""What the machine has: NVIDIA GPUs, cores, memory, disk.

GPUs are read through NVML where `nvidia-ml-py` is installed (the extra `gpu`): it also tells what the driver
keeps for itself. Else by `nvidia-smi`, which needs no package.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

MIB = 1 << 20
GIB = 1 << 30
FIELDS = ("index", "name", "memory.total", "memory.free")
QUERY = ("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
CAPABILITY_QUERY = ("nvidia-smi", "--query-gpu=index,compute_cap", "--format=csv,noheader,nounits")

Runner = Callable[[Sequence[str]], str]
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *(?:([mg])(?:i?b)?)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU; `total`, `free` and `reserved` are bytes, `capability` is CUDA's, as in (8, 9).

    `reserved` is what the driver keeps for itself, where that is known.
    """

    index: int
    name: str
    total: int
    free: int
    capability: tuple[int, int] | None = None
    reserved: int | None = None

    @property
    def visible(self) -> int:
        """The memory that CUDA shows, of which vLLM's shares are parts: less what the driver reserves.

        By PyTorch's out-of-memory messages: 23.64 of 23.99 GiB on an RTX 4090, 14.56 of 15 on a T4, 79.1 of
        80 on an A100.
        """
        usual = max(int(0.45 * GIB), self.total * 11 // 1000)
        return self.total - (usual if self.reserved is None else self.reserved)


@dataclass(frozen=True, slots=True)
class Machine:
    """`cpus` are the cores this process may use, by the kernel's numbers; `memory` and `available` are bytes.

    `cpu_flags` and `processor` are empty where the system does not tell them. Memory limits of a container
    are counted in.
    """

    gpus: tuple[Gpu, ...]
    cpus: tuple[int, ...]
    memory: int
    available: int
    architecture: str = "x86_64"
    cpu_flags: frozenset[str] = frozenset()
    processor: str = ""


def parse_gpus(text: str, capabilities: str = "") -> tuple[Gpu, ...]:
    """GPUs from what `QUERY` printed, by index; lines without memory figures (MIG, lost GPUs) are left out.

    `capabilities` is what `CAPABILITY_QUERY` printed, or nothing: drivers before 510 do not know it.
    """
    known = dict(filter(None, map(_capability, capabilities.splitlines())))
    gpus = []
    for line in text.splitlines():
        index, _, rest = line.partition(",")
        name, _, figures = rest.strip().partition(",")
        while figures.count(",") > 1:  # a name may hold a comma; the last two fields are the figures
            more, _, figures = figures.partition(",")
            name = f"{name},{more}"
        try:
            total, free = (int(figure) * MIB for figure in figures.split(","))
            number = int(index)
        except ValueError:
            continue
        gpus.append(Gpu(number, name.strip(), total, free, known.get(number)))
    return tuple(sorted(gpus, key=lambda gpu: gpu.index))


def _capability(line: str) -> tuple[int, tuple[int, int]] | None:
    try:
        index, version = line.split(",")
        major, minor = version.strip().split(".")
        return int(index), (int(major), int(minor))
    except ValueError:
        return None


def run(command: Sequence[str]) -> str:
    """The command's output; empty where it is missing, fails or does not answer in 20 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def gpus(runner: Runner = run) -> tuple[Gpu, ...]:
    """The GPUs that nvidia-smi sees; none where there is no driver."""
    listed = runner(QUERY)
    return parse_gpus(listed, runner(CAPABILITY_QUERY)) if listed else ()


def load_nvml() -> Any | None:
    """NVML's Python binding, started; None where it is not installed or there is no driver."""
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


def nvml_gpus(nvml: Any) -> tuple[Gpu, ...]:
    """The GPUs that NVML sees, by index; those that do not tell their memory (MIG, lost) are left out. None
    where it fails: a driver that was updated under it, a binding too old to know what is reserved."""
    found = []
    try:
        count = nvml.nvmlDeviceGetCount() if hasattr(nvml, "nvmlMemory_v2") else 0
    except nvml.NVMLError:
        return ()
    for index in range(count):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
            name, capability = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetCudaComputeCapability(handle)
        except nvml.NVMLError:
            continue
        found.append(Gpu(index, name, memory.total, memory.free, tuple(capability), memory.reserved))
    return tuple(found)


def imagined(index: int, size: str) -> Gpu:
    """A GPU that is not there, idle: `24GiB`, `24GB` (as cards are sold, who mean GiB), `24`, `8188MiB`.

    Raises ValueError.
    """
    match = _SIZE.fullmatch(size.strip())
    total = int(float(match[1]) * (MIB if (match[2] or "g").lower() == "m" else GIB)) if match else 0
    if not GIB <= total <= 4096 * GIB:
        raise ValueError(f"`{size}` is no size of a GPU: write 24GiB, or 24564MiB as nvidia-smi shows it")
    gpu = Gpu(index, f"{gib(total)} GPU", total, total)
    return Gpu(index, gpu.name, total, gpu.visible)


def parse_meminfo(text: str) -> tuple[int, int]:
    """Total and available bytes from /proc/meminfo."""
    found = {}
    for line in text.splitlines():
        key, _, rest = line.partition(":")
        amount = rest.split()
        if key in ("MemTotal", "MemAvailable") and amount:
            found[key] = int(amount[0]) * 1024
    total = found.get("MemTotal", 0)
    return total, found.get("MemAvailable", total)


def parse_cpu_flags(text: str) -> frozenset[str]:
    """Instruction-set names of the first core in /proc/cpuinfo."""
    return frozenset(_of_first_core(text, "flags", "Features").split())


def parse_processor(text: str) -> str:
    """The model of the first core in /proc/cpuinfo, empty where it has none, as on ARM."""
    return _of_first_core(text, "model name")


def _of_first_core(cpuinfo: str, *keys: str) -> str:
    for line in cpuinfo.splitlines():
        key, _, rest = line.partition(":")
        if key.strip() in keys:
            return rest.strip()
    return ""


def look(
    runner: Runner = run,
    *,
    root: Path = Path("/"),
    nvml: Callable[[], Any | None] = load_nvml,
    env: Mapping[str, str] = os.environ,
) -> Machine:
    """The machine as it is now. `root` is where proc and sys are found.

    An empty CUDA_VISIBLE_DEVICES hides the GPUs, as it does from CUDA.
    """
    total, available = parse_meminfo(_read(root / "proc/meminfo"))
    limit, used = _cgroup(root)
    if limit is not None and limit < total:
        total, available = limit, min(available, max(0, limit - used))
    hidden = env.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    cpuinfo = _read(root / "proc/cpuinfo")
    driver = None if hidden else nvml()
    seen = nvml_gpus(driver) if driver is not None else ()
    return Machine(
        gpus=() if hidden else seen or gpus(runner),  # drivers before 510 tell NVML less
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        memory=total,
        available=available,
        architecture=platform.machine(),
        cpu_flags=parse_cpu_flags(cpuinfo),
        processor=parse_processor(cpuinfo),
    )


def _cgroup(root: Path) -> tuple[int | None, int]:
    """This container's memory limit and what it uses, in bytes (cgroup v2); no limit: (None, 0)."""
    folder = root / "sys/fs/cgroup"
    try:
        return int(_read(folder / "memory.max")), int(_read(folder / "memory.current"))
    except ValueError:
        return None, 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def disk_free(path: Path) -> tuple[int, Path]:
    """Bytes that this user can still write where `path` is or would be, and the folder that exists there."""
    folder = existing(path)
    return shutil.disk_usage(folder).free, folder


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there, as far as this user may see."""
    path = path.absolute()
    while not _seen(path):
        path = path.parent
    return path


def _seen(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:  # Python 3.14 says False by itself
        return False


def gib(count: int) -> str:
    """Bytes for people: `14.2 GiB`."""
    return f"{count / GIB:.1f} GiB"
