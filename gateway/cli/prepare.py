"""From a configuration to all that a start needs: room, ports, an engine environment, models, a plan."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from engines import choice, demo, environments, hardware, home, hub, llamacpp, parity, plan
from engines.address import Address
from engines.hardware import Machine
from engines.plan import Placement, Plan
from engines.recipes import EnvironmentKind, recipe
from engines.spec import EngineSpec
from gateway.cli.deployment import Prepared
from gateway.cli.failures import Failure
from gateway.cli.preflight import Listener, Need, cpu_problem, disk_problem, free_ports, port_problems
from gateway.cli.starter import starter
from gateway.config import DEFAULT_FILE, FIRST_ENGINE_PORT, Config, HostPort, listening, read

if TYPE_CHECKING:
    from gateway.cli.view import View

DEFAULT_LISTEN = HostPort("127.0.0.1", 8080)
DEFAULT_ADMIN = 8081
DEMO = home.DEMO_PREFIX
DEMO_ROOM = 700_000_000
LOGS = 20_000_000
OWN_PYTHON = "DUALGAUGE_VLLM_PYTHON"


def first_config(path: Path, machine: Machine, listen: HostPort | None) -> tuple[str, ...]:
    """Write a configuration that fits this machine; returns why it is as it is."""
    address = listen or DEFAULT_LISTEN
    check_ports([_gateway_listener(address, "`listen`", ())])
    text, reasons = first_text(machine, address)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    return reasons


def first_text(machine: Machine, listen: HostPort) -> tuple[str, tuple[str, ...]]:
    """A configuration that fits this machine, and why it is as it is."""
    chosen = choice.choose(machine.gpus)
    admin = free_ports(DEFAULT_ADMIN, 1, taken=[listen.port])[0]
    ports = free_ports(FIRST_ENGINE_PORT, 2, taken=[listen.port, admin])
    return starter(chosen, ports, listen=str(listen), admin=f"127.0.0.1:{admin}"), chosen.reasons


def prepare(config: Config, listen: HostPort | None, view: View) -> Prepared:
    """Check, install, fetch, plan. Raises Failure, ParityError, PlanError, MakingError, ProblemsError,
    OSError."""
    address = override(config, listen)
    check(config, listen=address)
    return engines_of(config, address, view)


def engines_of(config: Config, listen: str | None, view: View) -> Prepared:
    """Install and fetch what the engines need, and place them. Raises as `prepare`."""
    machine = hardware.look()
    swap = None if config.swap is None else config.swap.tier
    draft = plan.plan(
        config.engines, machine, lambda spec: plan.facts_of(spec.model or "", _local(spec)), swap
    )
    if swap is not None and any(placement.gpu is None for placement in draft.placements):
        raise Failure("engines on the CPU cannot sleep: take `swap` out, or use a machine with an NVIDIA GPU")
    kinds = {p.spec.name: _kind(p) for p in draft.placements if p.spec.binary is None}
    check_machine(kinds.values(), machine)
    check_room(config, kinds.values())
    pythons = {kind: environment(kind, view) for kind in sorted(set(kinds.values()))}
    engines = {name: pythons[kind] for name, kind in kinds.items()}
    engines |= {p.spec.name: Path(p.spec.binary) for p in draft.placements if p.spec.binary is not None}
    folders = {p.spec.name: model_folder(p.spec, engines[p.spec.name], view) for p in draft.placements}
    for difference in parity.check(config.engines, folders, config.parity.allowance):
        view.say(f"  note: allowed by `parity`: {difference}", style="yellow")
    placed = plan.plan(
        config.engines, machine, lambda spec: plan.facts_of(spec.model or "", folders[spec.name]), swap
    )
    if placed.placements:
        show_plan(placed, view)
    signing = (
        environment("model-signing", view) if config.integrity.public_key and placed.placements else None
    )
    return Prepared(config, placed, engines, folders, listen, signing)


def _kind(placement: Placement) -> EnvironmentKind:
    if placement.spec.kind == "llama.cpp":
        return "llama.cpp"
    return environments.default_kind(0 if placement.gpu is None else 1)


def show_plan(placed: Plan, view: View) -> None:
    """Where each engine goes and what it may take, with bytes, before any is started."""
    view.say("Plan, one engine after the other:")
    for placement in placed.placements:
        spec = placement.spec
        view.say(f"  {spec.name} ({spec.tier}, {spec.precision}, {spec.model}) on {placement.describe()}")
    for note in placed.notes:
        view.say(f"  note: {note}", style="yellow")


def load(path: Path | None) -> Config:
    """The configuration named, or that of this folder. Raises Failure, ProblemsError."""
    file = path or Path(DEFAULT_FILE)
    if not file.is_file():
        raise Failure(
            f"there is no {file}; `dualgauge up` without --config writes one that fits this machine"
        )
    return read(file)


def override(config: Config, listen: HostPort | None) -> str | None:
    """The address that replaces the file's `listen`, where one was given that differs."""
    if listen is None or str(listen) == str(config.listen):
        return None
    try:
        return str(listening(config, listen).listen)
    except ValueError as exc:
        raise Failure(str(exc)) from None


def check(config: Config, *, listen: str | None) -> None:
    """What needs no download to be known wrong. Raises Failure, ProblemsError, OSError."""
    from gateway.snapshots import read_snapshot

    read_snapshot(config)
    address = HostPort.parse(listen) if listen else config.listen
    if address.port == 0 or config.admin.port == 0:
        raise Failure("`dualgauge up` needs fixed ports: write a number other than 0 in `listen` and `admin`")
    check_ports(listeners(config, address))
    for spec in config.engines:
        if spec.binary is not None and not (Path(spec.binary).is_file() and os.access(spec.binary, os.X_OK)):
            raise Failure(f"engine `{spec.name}`: `binary` {spec.binary} is no program that may be run")


def check_machine(kinds: Iterable[str], machine: Machine) -> None:
    """Whether the CPU engines run on this processor. Raises Failure."""
    problem = cpu_problem(machine) if "vllm-cpu" in kinds else None
    if problem and OWN_PYTHON not in os.environ:
        raise Failure(f"{problem} Use a machine with an NVIDIA GPU, or engines of `kind: external`.")


def listeners(config: Config, listen: HostPort) -> Iterator[Listener]:
    """Every address that the gateway and the engines will take."""
    file = config.path.name
    ports = {spec.name: Address.parse(spec.url).port for spec in config.engines if spec.launched}
    yield _gateway_listener(listen, f"`listen` in {file}", (config.admin.port, *ports.values()))
    yield Listener(config.admin.host, config.admin.port, "the admin port", f"change `admin` in {file}")
    for name, port in ports.items():
        yield Listener("127.0.0.1", port, f"engine {name}", f"change its `port` in {file}")


def _gateway_listener(address: HostPort, key: str, taken: Iterable[int]) -> Listener:
    spare = free_ports(address.port + 1, 1, taken)
    option = f"use --listen {HostPort(address.host, spare[0])}, or change {key}" if spare else f"change {key}"
    return Listener(address.host, address.port, "the gateway", option)


def check_ports(wanted: Iterable[Listener]) -> None:
    problems = port_problems(wanted)
    if problems:
        raise Failure("\n       ".join(problems))


def environment(kind: EnvironmentKind, view: View) -> Path:
    """The program of a kind: for vLLM the operator's own interpreter where there is one, else that of our
    environment, installed where needed; for llama.cpp the server itself."""
    own = os.environ.get(OWN_PYTHON)
    if own is not None and kind in ("vllm", "vllm-cpu"):
        if not os.access(own, os.X_OK):
            raise Failure(f"{OWN_PYTHON}={own} is no program; name the Python of a place that has vLLM")
        return Path(own)
    with view.making(f"engines' environment ({kind})") as progress:
        python = environments.install(kind, home=home.data_home(), progress=progress).python
    return llamacpp.binary_in(python) if kind == "llama.cpp" else python


def _local(spec: EngineSpec) -> Path | None:
    """The folder of a model that is on this machine already."""
    model = spec.model or ""
    if not Path(model).is_absolute():
        return None
    return _gguf(spec) if spec.kind == "llama.cpp" else Path(model)


def _gguf(spec: EngineSpec) -> Path:
    """The file that llama-server opens. Raises Failure."""
    model = spec.model or ""
    if not Path(model).is_absolute():
        raise Failure(f"engine `{spec.name}`: write the GGUF file's path as `model` (or {DEMO}{demo.SMALL})")
    try:
        return llamacpp.file_of(Path(model))
    except llamacpp.ModelError as error:
        raise Failure(f"engine `{spec.name}`: {error}") from None


def model_folder(spec: EngineSpec, python: Path, view: View) -> Path:
    """What the engine will open, a folder or a GGUF file: given, made here, or downloaded where it is not in
    the cache."""
    model = spec.model or ""
    if spec.kind == "llama.cpp":
        if model != f"{DEMO}{demo.SMALL}":
            return _gguf(spec)
        with view.making(f"model {model}") as progress:
            return llamacpp.file_of(demo.make_gguf(home=home.data_home(), progress=progress))
    if Path(model).is_absolute():
        if not (Path(model) / "config.json").is_file():
            raise Failure(f"engine `{spec.name}`: {model} is no model folder (it has no config.json)")
        return Path(model)
    with view.making(f"model {model}") as progress:
        if not model.startswith(DEMO):
            return hub.fetch(model, python, progress)
        name = model.removeprefix(DEMO)
        if name not in (demo.EXACT, demo.FAST):
            known = f"{DEMO}{demo.EXACT} and {DEMO}{demo.FAST}"
            raise Failure(f"engine `{spec.name}`: there is no {model}, only {known}")
        pair = demo.make(python=python, home=home.data_home(), progress=progress)
        return pair.exact if name == demo.EXACT else pair.fast


def check_room(config: Config, kinds: Iterable[EnvironmentKind]) -> None:
    """Whether the disk can take what is still to be installed and made. Raises Failure.

    The room for a hub's model is seen when its size is known, before its download.
    """
    data = home.data_home()
    needs = [Need(config.folder, LOGS, "logs")]
    for kind in sorted(set(kinds)):
        wanted = recipe(kind)
        own = OWN_PYTHON in os.environ and kind.startswith("vllm")
        if not own and environments.find(wanted, data) is None:
            needs.append(Need(home.environments(data), wanted.room, f"the environment {kind}"))
    demo_wanted = any(spec.launched and (spec.model or "").startswith(DEMO) for spec in config.engines)
    if demo_wanted and demo.find(home.models(data)) is None:
        needs.append(Need(home.models(data), DEMO_ROOM, "the demo models"))
    problem = disk_problem(needs)
    if problem:
        raise Failure(f"{problem} Free some, or put the data elsewhere with DUALGAUGE_HOME.")
