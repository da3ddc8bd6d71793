"""What `dualgauge doctor` finds on this machine: driver, memory, ports, disk, files, clock.

Each finding says what to do; none of the checks changes anything.
"""

from __future__ import annotations

import ctypes
import re
import resource
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from engines import plan
from engines.hardware import Gpu, Machine, Runner
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
OPEN_FILES = 4096
TIME_ERROR = 5
LITERAL = re.compile(r"\b(?:admin_token|api_key)\s*:\s*(?![\"']?\$\{)[^\s#]")
"""A secret written out, where a `${NAME}` would keep it elsewhere."""


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
        yield Finding(
            "fault",
            f"no NVIDIA GPU is seen, and {names} is to run on one",
            "see what `nvidia-smi` says: install the driver, load it (`modprobe nvidia`), in a container use "
            "`--gpus all`; or leave `gpu` out to run on the CPU",
        )
    known = {gpu.index: gpu for gpu in machine.gpus}
    for spec in wanted:
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


def memory(specs: Sequence[EngineSpec], machine: Machine) -> Iterator[Finding]:
    """Whether the engines that are started here fit, by the same plan that starts them."""
    launched = [spec for spec in specs if spec.kind == "vllm"]
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
        what, _, do = problem.partition(". ")
        yield Finding("fault", what, do.rstrip(".") or "change the port")


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
    log = config.decision_log
    if log is not None:
        problem = disk_problem([Need(Path(log.path).parent, log.size * (log.keep + 1), "the decision log")])
        if problem is not None:
            yield Finding(
                "warning", problem, "free some, or lower `decision_log.size` or `keep`: lines are lost else"
            )


def files(config: Config) -> Iterator[Finding]:
    """Who may read and change what decides: the configuration, its keys, its policy, its models."""
    secret = bool(LITERAL.search(config.path.read_text("utf-8")))
    yield from _file(config.path, "has a token or key in plain" if secret else None)
    if config.keys is not None and config.keys.is_file():
        plain = re.search(r"\bkey\s*:", config.keys.read_text("utf-8")) is not None
        yield from _file(config.keys, "has keys in plain" if plain else "has the keys' hashes")
    policy = Path(config.policy)
    if policy.is_absolute() and policy.exists():
        yield from _file(policy, None)
    for spec in config.engines:
        folder = Path(spec.model or "")
        if folder.is_absolute() and folder.is_dir():
            yield from _file(folder, None)


def _file(path: Path, secret: str | None) -> Iterator[Finding]:
    """`secret` is why others must not read it."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        # A group may be its owner's alone, as Ubuntu makes them.
        who, level = ("everybody", FAULT) if mode & stat.S_IWOTH else ("its group", WARNING)
        yield Finding(level, f"{path} (mode {mode:o}) can be changed by {who}", f"chmod go-w {path}")
    if secret is not None and mode & (stat.S_IRGRP | stat.S_IROTH):
        who = "everybody" if mode & stat.S_IROTH else "its group"
        level = FAULT if "plain" in secret else WARNING
        yield Finding(level, f"{path} (mode {mode:o}) {secret} and can be read by {who}", f"chmod 600 {path}")


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
