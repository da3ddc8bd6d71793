"""One deployment while it runs: engines in turn, then the gateway; at the end the other way round.

The gateway drains first (no new requests, the running ones finish), the engines end after it. Whatever goes
wrong on the way up, nothing is left running.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from engines import home, llamacpp, runfile, vllm
from engines.hangs import Hangs
from engines.health import Schedule
from engines.integrity import Checker, Expected
from engines.launch import Command, EngineProbe, HealthProbe, Launcher, StartError, rotate
from engines.plan import Placement, Plan
from engines.proving import Prover
from engines.runfile import Paths, Run, UnitState
from engines.sleeping import Sleeper
from engines.spec import EngineSpec
from engines.supervise import OperationError, Supervisor, Unit
from engines.swap import Arbiter, Rules, Swapper
from gateway.cli import control
from gateway.cli.beside import Beside
from gateway.cli.control import ControlError, Order, Say
from gateway.cli.gate import Gate, GateError
from gateway.config import Config, SwapPart

GATEWAY = "gateway"
ENGINE_START = 1800.0
ENGINE_STOP = 20.0
GATEWAY_START = 60.0
GATEWAY_MARGIN = 5.0
LOOK_AT_LOGS = 2.0
SERVED_SECONDS = 10.0
"""A hosted engine loads its SDK for some seconds."""
ELSEWHERE_SECONDS = 1.0
"""Where an engine is not started here, and may be down."""
SERVED_LOOK = 0.05

Listener = Callable[[Run], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that a start needs: where each engine runs, by which program (vLLM's interpreter, or llama-server),
    and with which model. `signing` is the interpreter that checks signatures, where they are asked for.
    """

    config: Config
    plan: Plan
    programs: Mapping[str, Path]
    models: Mapping[str, Path]
    listen: str | None = None
    signing: Path | None = None

    @property
    def base_url(self) -> str:
        return f"{self.listening}/v1"

    @property
    def listening(self) -> str:
        """The gateway's address as a client on this machine writes it."""
        if self.listen is None:
            return self.config.listen.url
        return type(self.config.listen).parse(self.listen).url


def engine_units(prepared: Prepared, paths: Paths, env: Mapping[str, str] = os.environ) -> list[Unit]:
    """One unit for each engine that we start, in the order of starting."""
    prover = Prover(prepared.config.parity.allowance)
    return [_engine_unit(placement, prepared, paths, env, prover) for placement in prepared.plan.placements]


def _engine_unit(
    placement: Placement, prepared: Prepared, paths: Paths, env: Mapping[str, str], prover: Prover
) -> Unit:
    spec = placement.spec

    def probe() -> EngineProbe:
        log = paths.log(spec.name)
        prove = partial(prover.prove, spec=spec, placement=placement, log=log)
        return EngineProbe(spec.url, spec.served_model, spec.api_key, prove)

    return Unit(
        name=spec.name,
        url=spec.url,
        command=_command(placement, prepared, env),
        log=paths.log(spec.name),
        device=placement.device,
        probe=probe,
        timeout=ENGINE_START,
        grace=ENGINE_STOP,
        tier=spec.tier,
        sleeper=Sleeper(spec) if spec.kind == "vllm" else None,
        check=checker(spec, prepared).check,
    )


def _command(placement: Placement, prepared: Prepared, env: Mapping[str, str]) -> Command:
    name = placement.spec.name
    program, model = prepared.programs[name], prepared.models[name]
    if placement.spec.kind == "llama.cpp":
        return llamacpp.command(placement, program, model, env, prepared.plan.machine.cpu_flags)
    return vllm.command(placement, program, str(model), env)


def checker(spec: EngineSpec, prepared: Prepared) -> Checker:
    """What must hold of an engine's model before each start."""
    integrity = prepared.config.integrity
    expected = Expected(
        args=spec.args,
        allow=spec.allow,
        pinned=spec.manifest,
        manifest_required=integrity.manifest == "required",
        public_key=Path(integrity.public_key) if integrity.public_key else None,
        python=prepared.signing,
    )
    return Checker(prepared.models[spec.name], expected)


def gateway_unit(prepared: Prepared, paths: Paths, env: Mapping[str, str] = os.environ) -> Unit:
    config, url = prepared.config, prepared.listening
    # -P: a folder called `gateway` where the operator stands is not ours
    argv = (sys.executable, "-P", "-m", "gateway.cli", "serve", "--config", str(config.path))
    override = ("--listen", prepared.listen) if prepared.listen else ()
    return Unit(
        name=GATEWAY,
        url=url,
        command=Command((*argv, *override), {**env, "PYTHONUNBUFFERED": "1"}),
        log=paths.log(GATEWAY),
        device=GATEWAY,
        probe=lambda: HealthProbe(url, "/healthz"),
        timeout=GATEWAY_START,
        grace=config.shutdown_grace + GATEWAY_MARGIN,
    )


class Deployment:
    """Drives a supervisor and keeps the run file. `listener` hears of every change."""

    def __init__(
        self,
        prepared: Prepared,
        paths: Paths,
        launcher: Launcher,
        listener: Listener,
        *,
        engines: Sequence[Unit],
        gateway: Unit,
    ) -> None:
        self._engines = tuple(engines)
        self._gateway = gateway
        self._paths = paths
        self._listener = listener
        self._run = Run(
            config=str(prepared.config.path),
            owner=runfile.process(os.getpid()),
            boot=runfile.boot_id(),
            phase="starting",
            base_url=prepared.base_url,
            admin_url=prepared.config.admin.url,
            longest_stop=gateway.grace + max((unit.grace for unit in engines), default=0.0),
            gateway=_initial(gateway),
            engines=tuple(map(_initial, engines)),
        )
        self._supervisor = Supervisor(
            launcher, self._changed, clock=time.monotonic, locks=home.data_home() / "locks"
        )
        self._config = prepared.config
        self._gate = Gate(prepared.config)
        self._beside = Beside(prepared.config.engines, lambda: self._publish(beside=self._beside.units))
        self._run = msgspec.structs.replace(self._run, beside=self._beside.units)
        health = prepared.config.health
        self._hangs = Hangs(
            [placement.spec for placement in prepared.plan.placements],
            Schedule(health.every, health.down_after, health.up_after, health.stalled_after),
            self._supervisor.kill_hung,
            time.monotonic,
        )

    async def run(self, stop: asyncio.Event, hurry: asyncio.Event) -> bool:
        """Start everything, return after `stop` was set and all has ended; `hurry` cuts the ending short.

        Returns whether it was all ready before.

        Raises StartError where a first start fails, OSError where the run file cannot be written; nothing is
        left running then.
        """
        runfile.write(self._paths.state, self._run)
        for unit in (*self._engines, self._gateway):
            rotate(unit.log)
        failure: str | None = None
        try:
            up = await _first(self._start(), stop.wait())
            up = up and await _first(self._all_served(), stop.wait())
            if up:
                self._publish(phase="ready")
                await self._attend(stop)
        except StartError as error:
            failure = "\n".join([f"{error.name} {error.what}", *error.lines])
            raise
        finally:
            await self._end(hurry, failure)
        return up

    async def _all_served(self) -> None:
        """Return once the gateway has found an engine of every tier; not much later where one stays away."""
        if self._config.swap is not None:
            return  # one tier sleeps
        elsewhere = any(spec.kind == "external" for spec in self._config.engines)
        end = time.monotonic() + (ELSEWHERE_SECONDS if elsewhere else SERVED_SECONDS)
        probe = HealthProbe(self._gateway.url, "/readyz")
        try:
            while not await probe.healthy() and time.monotonic() < end:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(SERVED_LOOK)
        finally:
            await probe.close()

    async def _attend(self, stop: asyncio.Event) -> None:
        """What is done while all serves: orders, holds, logs, engines that hang."""
        work = (self._gate.run(), self._look_at_logs(), self._hangs.run())
        tasks = [asyncio.create_task(part) for part in work]
        if self._config.swap is not None:
            tasks.append(asyncio.create_task(self._swapper(self._config.swap).run()))
        try:
            async with control.listening(self._paths.control, self._carry_out, self._waits):
                await stop.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_at_logs(self) -> None:
        while True:
            self._supervisor.look()
            await asyncio.sleep(LOOK_AT_LOGS)

    def _waits(self, name: str) -> bool:
        units = (*self._run.engines, *self._run.beside)
        return any(unit.name == name and unit.state == "draining" for unit in units)

    async def _carry_out(self, order: Order, say: Say) -> str:
        name, supervisor = order.engine, self._supervisor
        asleep = any(unit.name == name and unit.state == "asleep" for unit in self._run.engines)
        if self._config.swap is not None and (order.do in ("sleep", "wake") or asleep):
            raise ControlError(f"{name} takes turns with the other tier: `swap` wakes it when it is needed")

        async def idle() -> None:
            await self._gate.idle(name, lambda left: say(f"{left} requests still run on {name}"))

        beside = self._beside if name in self._beside else None
        try:
            match order.do:
                case "drain":
                    await (beside or supervisor).drain(name, idle)
                    return f"{name} is drained; `dualgauge engine resume {name}` gives it requests again"
                case "resume":
                    await (beside or supervisor).resume(name)
                    return f"{name} gets requests again"
                case _ if beside is not None:
                    raise ControlError(f"{name} is not started here: it can be drained and resumed, no more")
                case "restart":
                    await supervisor.restart(name, None if order.now else idle)
                    return f"{name} was restarted and serves"
                case "sleep":
                    await supervisor.sleep(name, idle)
                    return f"{name} is asleep; `dualgauge engine wake {name}` wakes it"
                case "wake":
                    why = await supervisor.wake(name)
                    return f"{name} is awake" if why is None else f"{name} was restarted, since {why}"
        except (OperationError, GateError) as error:
            raise ControlError(str(error)) from None

    async def _start(self) -> None:
        """Whoever sleeps first starts first: the others take the memory that it leaves."""
        swap = self._config.swap
        sleepers = [unit for unit in self._engines if swap is not None and unit.tier == swap.tier]
        for unit in sleepers:
            await self._supervisor.start(unit)
            try:
                await self._supervisor.sleep(unit.name, _nothing_runs)
            except OperationError as error:
                raise StartError(unit.name, f"cannot take turns: {error}", unit.log) from None
        for unit in (*(unit for unit in self._engines if unit not in sleepers), self._gateway):
            await self._supervisor.start(unit)

    def _swapper(self, swap: SwapPart) -> Swapper:
        rules = Rules(swap.residence, swap.batch, swap.patience, swap.idle, swap.budget)
        tiers: dict[str, list[str]] = {tier: [] for tier in self._config.tiers}
        for unit in self._engines:
            tiers[unit.tier or ""].append(unit.name)
        (base,) = (tier for tier in tiers if tier != swap.tier)
        arbiter = Arbiter(rules, base, swap.tier, since=time.monotonic())
        return Swapper(
            arbiter,
            tiers,
            self._supervisor,
            self._gate.demand,
            self._gate.idle,
            lambda text: self._publish(swap=text),
            clock=time.monotonic,
        )

    async def _end(self, hurry: asyncio.Event, failure: str | None) -> None:
        self._publish(phase="stopping")
        ending = asyncio.ensure_future(self._wind_down())
        hurrying = asyncio.ensure_future(hurry.wait())
        await asyncio.wait({ending, hurrying}, return_when=asyncio.FIRST_COMPLETED)
        hurrying.cancel()
        if not ending.done():
            self._supervisor.kill()
        await ending
        if failure is None:
            self._paths.state.unlink(missing_ok=True)
        else:
            self._publish(phase="failed", error=failure)

    async def _wind_down(self) -> None:
        await self._supervisor.stop([GATEWAY])
        await self._supervisor.stop([unit.name for unit in self._engines])

    def _changed(self, state: UnitState) -> None:
        if state.name == GATEWAY:
            if state.state == "starting":
                self._gate.forget()
            self._publish(gateway=state)
        else:
            units = tuple(state if unit.name == state.name else unit for unit in self._run.engines)
            self._publish(engines=units)

    def _publish(self, **changes: object) -> None:
        self._run = msgspec.structs.replace(self._run, **changes)
        self._gate.want((*self._run.engines, *self._run.beside))
        # a full disk must not take down what serves; the next change writes the whole state again
        with contextlib.suppress(OSError):
            runfile.write(self._paths.state, self._run)
        self._listener(self._run)


async def _nothing_runs() -> None:
    """Before there is a gateway."""


def _initial(unit: Unit) -> UnitState:
    return UnitState(unit.name, unit.url, str(unit.log), tier=unit.tier)


async def _first(work: Coroutine[Any, Any, object], end: Coroutine[Any, Any, object]) -> bool:
    """Run until either is done; True where it was the work. The other is cancelled and waited for."""
    working, ending = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
        done = working.done()
        if done:
            working.result()
        return done
    finally:
        for task in (working, ending):
            task.cancel()
        await asyncio.gather(working, ending, return_exceptions=True)
