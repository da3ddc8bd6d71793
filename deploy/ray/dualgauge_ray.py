"""Dualgauge as a Ray Serve application: gateways behind Serve's HAProxy, engines where Ray finds room.

Ray places replicas, replaces those that die, scales them and rolls them out. Requests do not go through it: a
gateway asks an engine over HTTP as it does everywhere, so that streams, cancels, retries, health and limits
are the gateway's own. Gateways ask Serve every second which engines there are; while it does not answer,
those that are known stay, and their own health says which of them serve.

Each engine of `dualgauge.yaml` that Dualgauge starts (`kind: vllm`, `kind: llama.cpp`) is a deployment of its
name; a replica of it keeps one engine, on a free port of its node, as `dualgauge up` does. Other engines of
the file are used as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from rich.console import Console

from engines import home
from engines.hangs import Hangs, fetch
from engines.health import Schedule, read_figures
from engines.launch import ProcessLauncher
from engines.runfile import Paths, UnitState
from engines.spec import EngineSpec
from engines.supervise import Supervisor
from gateway.admin import admin_app
from gateway.app import Public, build, change_engines, running
from gateway.cli.deployment import engine_units
from gateway.cli.prepare import engines_of
from gateway.cli.view import View
from gateway.config import LAST_PORT, HostPort, read
from gateway.listeners import bind, listener
from gateway.process import Process
from gateway.telemetry.logs import configure

logger = logging.getLogger("dualgauge.ray")

HERE = Path(__file__).parent
LOOK_SECONDS = 1.0
ANSWER_SECONDS = 5.0
FIRST_LOOK_SECONDS = 10.0
ADMIN_PORTS = 100
MARGIN_SECONDS = 30.0
"""What a replica has beyond `shutdown_grace`: Serve looks only every other second whether it has ended."""
MOST_REQUESTS = 10_000
"""At one gateway. Serve's own default is 5; what is too much is for limits and engines to say."""


def by_requests(context: Any) -> tuple[float, dict[str, Any]]:
    """How many engines a tier needs for the requests that they run or queue now, for Serve's autoscaler:
    `target_ongoing_requests` is how many one of them should have."""
    figures = (context.aggregated_metrics or {}).get("requests", {})
    return sum(figures.values()) / context.config.target_ongoing_requests, {}


class Engine:
    """One engine and the process that keeps it. Ends with nothing left running."""

    # Serve awaits it.
    async def __init__(self, file: str, name: str) -> None:  # type: ignore[misc]
        config = read(HERE / file)
        configure(config.logs)
        self._state: UnitState | None = None
        self.spec = spec = _here(next(spec for spec in config.engines if spec.name == name))
        equipped = await asyncio.to_thread(
            engines_of,
            msgspec.structs.replace(config, engines=(spec,), swap=None),
            None,
            View(Console(file=sys.stderr)),
        )
        (unit,) = engine_units(equipped, Paths(_session()))
        self._grace = config.shutdown_grace
        self._supervisor = Supervisor(
            ProcessLauncher(), self._changed, clock=time.monotonic, locks=home.data_home() / "locks"
        )
        await self._supervisor.start(unit)
        health = config.health
        schedule = Schedule(health.every, health.down_after, health.up_after, health.stalled_after)
        self._hangs = asyncio.create_task(
            Hangs([spec], schedule, self._supervisor.kill_hung, time.monotonic).run()
        )

    def _changed(self, state: UnitState) -> None:
        if self._state is None or state.state != self._state.state:
            logger.info("%s is %s %s", state.name, state.state, state.error or "")
        self._state = state

    async def engine(self) -> EngineSpec:
        """What a gateway needs to reach it."""
        return self.spec

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {"requests": float(await self._requests())}

    async def _requests(self) -> int:
        """Requests that it runs or queues; none where it does not tell."""
        try:
            status, body = await fetch(self.spec, "/metrics", ANSWER_SECONDS)
        except (OSError, TimeoutError):
            return 0
        figures = read_figures(body) if status == 200 else None
        return 0 if figures is None else figures.requests

    async def check_health(self) -> None:
        """The supervisor starts an engine that dies again. A replica whose engine it gave up is replaced."""
        if self._state is not None and self._state.state == "failed":
            raise RuntimeError(f"{self._state.name}: {self._state.error}")

    async def __del__(self) -> None:
        """Let gateways notice that it leaves, and what runs end."""
        if not hasattr(self, "_hangs"):
            return
        self._hangs.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace):
                await asyncio.sleep(2 * LOOK_SECONDS)
                while await self._requests():  # noqa: ASYNC110 - the engine is asked, it tells nobody
                    await asyncio.sleep(LOOK_SECONDS / 4)
        await self._supervisor.stop([self.spec.name])


def _here(spec: EngineSpec) -> EngineSpec:
    """The engine of this replica: named by the replica, reachable from other nodes, and only with a key."""
    name = f"{spec.name}-{serve.get_replica_context().replica_tag}"
    host = ray.util.get_node_ip_address()
    with socket.socket() as sock:
        sock.bind((host, 0))
        port = sock.getsockname()[1]
    gpus = [int(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]
    return replace(
        spec,
        name=name,
        url=f"http://{host}:{port}",
        args=(*spec.args, "--host", host),
        api_key=spec.api_key or secrets.token_urlsafe(32),
        gpu=gpus[0] if gpus else None,
    )


def _session() -> Path:
    """Where Ray keeps its logs on this node, and shows them from in its dashboard."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir(), context.get_session_name())


@serve.ingress()
class Gateway:
    """One gateway: its public port is Serve's, its admin port is its own."""

    async def __init__(self, file: str, *engines: DeploymentHandle) -> None:  # type: ignore[misc]
        config = read(HERE / file)
        access = configure(config.logs)
        self._engines = {handle.deployment_name: handle for handle in engines}
        self._fixed = [spec for spec in config.engines if not spec.launched]
        self._found: dict[str, list[EngineSpec]] = {}
        self._gateway = build(config, access=access)
        change_engines(self._gateway, self._fixed)
        self._stack = contextlib.AsyncExitStack()
        await self._stack.enter_async_context(running(self._gateway))
        await self._listen()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK_SECONDS):
                await self._look()
                # So that one that replaces another refuses nothing which that would have taken.
                while self._gateway.fleet.missing():  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        following = asyncio.create_task(self._follow(), name="engines")
        self._stack.callback(following.cancel)

    def __serve_build_asgi_app__(self) -> Public:
        return Public(self._gateway)

    async def _listen(self) -> None:
        """Open the admin port: the configured one, or the next that is free, where several share a node."""
        config = self._gateway.config
        wanted, address, sock = config.admin, config.admin, None
        while sock is None:
            try:
                sock = bind(address, "admin")
            except OSError:
                if address.port - wanted.port >= ADMIN_PORTS or address.port == LAST_PORT:
                    raise
                address = HostPort(address.host, address.port + 1)
        site = Process(self._gateway)
        server = listener(admin_app(config, lambda: site), 1)
        serving = asyncio.create_task(server.serve([sock]), name="admin")
        host = wanted.host if wanted.loopback else ray.util.get_node_ip_address()
        self._admin = str(HostPort(host, sock.getsockname()[1]))
        logger.info("admin on http://%s", self._admin)

        async def close() -> None:
            server.should_exit = True
            await serving
            sock.close()

        self._stack.push_async_callback(close)

    async def admin(self) -> str:
        """Where its admin port is."""
        return self._admin

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self._look()
            except Exception:
                logger.exception("cannot follow which engines there are")

    async def _look(self) -> None:
        """Have the engines that run now. Of a deployment that does not answer, those from before stay."""
        for name, handle in self._engines.items():
            with contextlib.suppress(RayServeException, TimeoutError):
                async with asyncio.timeout(ANSWER_SECONDS):
                    told = await handle.broadcast("engine").results_async(return_exceptions=True)
                specs = [spec for spec in told if isinstance(spec, EngineSpec)]
                self._found[name] = sorted(specs, key=lambda spec: spec.name)
        found = [spec for specs in self._found.values() for spec in specs]
        change_engines(self._gateway, [*self._fixed, *found])

    async def __del__(self) -> None:
        """Serve calls it when its last request has ended."""
        if hasattr(self, "_stack"):
            await self._stack.aclose()


def application(args: dict[str, str]) -> serve.Application:
    """`config`: the deployment file, which each replica reads; where it is relative, beside this module.
    Raises ValueError, ProblemsError, OSError."""
    file = args.get("config", "dualgauge.yaml")
    config = read(HERE / file)
    if config.limits.store == "memory":
        raise ValueError(
            f"{config.path}: several gateways share limits: name a Redis, `limits: {{store: redis://…}}`"
        )
    if config.swap is not None:
        raise ValueError(f"{config.path}: `swap` is for one machine: take it out, and give each tier GPUs")
    seconds = config.shutdown_grace + MARGIN_SECONDS
    options: dict[str, Any] = {"graceful_shutdown_timeout_s": seconds, "graceful_shutdown_wait_loop_s": 1}
    engine = serve.deployment(Engine).options(num_replicas=1, **options)
    gateway = serve.deployment(Gateway).options(
        name="gateway",
        num_replicas=2,
        max_ongoing_requests=MOST_REQUESTS,
        max_surge_percent=100,  # one is ready before another goes
        **options,
    )
    names = [spec.name for spec in config.engines if spec.launched]
    return gateway.bind(file, *(engine.options(name=name).bind(file, name) for name in names))
