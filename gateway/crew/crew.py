"""Keeps the workers of one port running, replaces them while they serve, and is the site that they make.

A worker that dies is started again at once, or after 1 s, 2, 4 … 60 where it has not run for a minute. A
replacement listens on the same socket and begins once its engines have been asked, and are as ready as for
the one before; only then that one leaves: it takes no new connection and ends with its last request. Whatever
fails on the way, who serves goes on serving.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Self

import msgspec

from gateway.config import Config, read
from gateway.crew import StartError
from gateway.crew.member import Local, Member, Worker, described
from gateway.crew.together import Together, decode
from gateway.process import Process
from gateway.runtime import Stored
from gateway.site import SiteError
from gateway.telemetry import series
from gateway.telemetry.series import Families
from policies.document import ProblemsError

logger = logging.getLogger("dualgauge.gateway")

START_SECONDS = 60.0
LOOK = 0.05
SETTLED_SECONDS = 60.0
LONGEST_PAUSE = 60.0
END_MARGIN = 4.0
KEPT = ("listen", "admin", "admin_token", "workers")
"""Settings that hold as long as the parent: sockets and the admin port are its own."""


class Crew(Together):
    """`sockets` listen on the public port, one for each worker. `listen` is the address that was given
    instead of the file's. `local` serves in this process until a worker takes its place. Use it as a
    context."""

    def __init__(
        self,
        config: Config,
        sockets: Sequence[socket.socket],
        *,
        listen: str | None,
        clock: Callable[[], float],
        wall: Callable[[], float],
        name: str,
        local: Process | None = None,
    ) -> None:
        members: list[Member] = [] if local is None else [Local(local)]
        super().__init__(config, members, clock=clock, wall=wall, name=name)
        self._sockets = tuple(sockets)
        self._listen = listen
        self._failures = [0] * len(sockets)
        self._changed = asyncio.Event()
        self._restarting = asyncio.Lock()
        self._covering = asyncio.Lock()
        # Of a socket without a worker, who accepts there meanwhile.
        self._covers: dict[int, Member] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        if local is not None:
            local.gateway.stored.told = lambda stored: self._spread(stored, None)

    async def __aenter__(self) -> Self:
        self._run(self._look_often())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.kill()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # who serves

    @property
    def workers(self) -> list[Worker]:
        return [member for member in self._members if isinstance(member, Worker)]

    async def begin(self) -> None:
        """Start all. Raises StartError, OSError; then none is left running."""
        first, *others = range(len(self._sockets))
        # What is wrong with the one is wrong with all, and is to be told once.
        await self._start(first)
        await asyncio.gather(*map(self._start, others))

    def stop(self) -> None:
        """Have all drain: what runs has `shutdown_grace`. Nobody listens any more once they have begun."""
        self.stopping = True
        for sock in self._sockets:
            sock.close()
        for worker in self.workers:
            worker.signal(signal.SIGKILL if worker.state == "starting" else signal.SIGTERM)
        self._changed.set()

    def kill(self) -> None:
        """End all workers this instant."""
        self.stopping = True
        for worker in self.workers:
            worker.signal(signal.SIGKILL)

    async def ended(self) -> None:
        """Return once `stop` was called and no worker runs any more."""
        while not self.stopping:
            await self._change()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.shutdown_grace + END_MARGIN):
                while self.workers:
                    await self._change()
        self.kill()
        while self.workers:
            await self._change()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def left(self, families: Families) -> None:
        """The local process serves no more; this is what it had counted."""
        for member in self._members:
            if isinstance(member, Local):
                member.seen.end(families)
                self._forget(member)

    def _forget(self, member: Member) -> None:
        self._past = series.lasting(self._past, member.seen.families)
        self._members.remove(member)
        self._changed.set()

    # starts and ends

    async def _start(self, number: int, ready: Sequence[str] = ()) -> None:
        """Have a new worker serve at this place; `ready` are the tiers that must be for it. Raises
        StartError, OSError; then it is not running."""
        if self.stopping:
            raise StartError("the gateway ends")
        worker = await Worker.start(number, self._argv(), self._sockets, self._heard, self._clock())
        self._members.append(worker)
        watching = asyncio.create_task(self._watch(worker), name=f"watch worker {number}")
        self._tasks.add(watching)
        watching.add_done_callback(self._tasks.discard)
        missing: dict[str, str] = {}
        try:
            async with asyncio.timeout(START_SECONDS):
                while True:
                    missing = decode(await worker.ask("missing", seconds=START_SECONDS))
                    lacking = [tier for tier in ready if tier in missing]
                    if not lacking:
                        break
                    await asyncio.sleep(LOOK)
            await self._let_in(worker)
        except SiteError as error:
            raise StartError(str(error)) from None
        except EOFError:
            await asyncio.wait([watching])
            raise StartError(f"it {described(watching.result())} before it was ready") from None
        except TimeoutError:
            why = "; ".join(f"tier {tier}: {missing[tier]}" for tier in ready if tier in missing)
            raise StartError(f"it was not ready after {START_SECONDS:.0f} s ({why or 'no answer'})") from None
        finally:
            if worker.state in ("starting", "joining") and not watching.done():
                worker.signal(signal.SIGKILL)
                await asyncio.wait([watching])

    async def _let_in(self, worker: Worker) -> None:
        """Tell it what all others know, and have it take requests."""
        others = [member for member in self._members if member.state == "serving"]
        # From here on it hears of whatever happens.
        worker.state = "joining"
        holds = self._holds
        for other in others[:1]:
            with contextlib.suppress(SiteError, EOFError, TimeoutError):
                holds = {**decode(await other.ask("holds")), **holds}
                await worker.ask("remember", decode(await other.ask("stored")))
        for engine, reason in holds.items():
            with contextlib.suppress(SiteError):  # an engine that it has no more
                await worker.ask("hold", engine, reason)
        await worker.ask("begin")
        # Not before it takes requests: one that dies until then has not come up.
        worker.state = "serving"
        self._changed.set()
        self._run(self._cover())

    def _argv(self) -> list[str]:
        # -P: a folder called `gateway` where the operator stands is not ours
        argv = [sys.executable, "-P", "-m", "gateway.cli", "serve", "--config", str(self._config.path)]
        return argv if self._listen is None else [*argv, "--listen", self._listen]

    async def _watch(self, worker: Worker) -> int:
        code = await worker.ended()
        self._forget(worker)
        if worker.state == "serving" and not self.stopping:
            self._deaths += 1
            soon = self._clock() - worker.since < SETTLED_SECONDS
            self._failures[worker.number] = self._failures[worker.number] + 1 if soon else 0
            logger.error(
                "worker %d (pid %d) %s: it is started again", worker.number, worker.pid, described(code)
            )
            self._run(self._cover())
            self._run(self._replace(worker.number))
        elif worker.state == "leaving" and code:
            logger.error("worker %d (pid %d) %s while it left", worker.number, worker.pid, described(code))
        return code

    async def _cover(self) -> None:
        """Have somebody accept on each socket: whoever waits there must not wait for a worker that may not
        come up."""
        async with self._covering:
            for number in range(len(self._sockets)):
                serving, cover = self._serving, self._covers.get(number)
                if any(member.number == number for member in serving):
                    if cover is not None:
                        del self._covers[number]
                        await self._tell(cover, "uncover", number)
                elif serving and cover not in serving:
                    self._covers[number] = serving[0]
                    await self._tell(serving[0], "cover", number)

    async def _replace(self, number: int) -> None:
        """Start another worker where one has died, until one serves."""
        while True:
            failures = self._failures[number]
            if failures:
                await asyncio.sleep(min(LONGEST_PAUSE, 2.0 ** (failures - 1)))
            if self.stopping or any(member.number == number for member in self._serving):
                return
            try:
                await self._start(number)
            except (StartError, OSError) as error:
                self._failures[number] += 1
                if not self.stopping:
                    logger.error("worker %d could not be started: %s", number, error)
            else:
                return

    async def restart(self) -> object:
        if self._restarting.locked():
            raise SiteError(409, "a restart is under way already")
        async with self._restarting:
            before, self._config = self._config, self._read_again()
            replaced: list[int] = []
            for number in range(len(self._sockets)):
                old = [member for member in self._serving if member.number == number]
                try:
                    await self._start(number, await self._ready_tiers())
                except (StartError, OSError) as error:
                    self._config = before if not replaced else self._config
                    kept = (
                        "all serve on as they did"
                        if not replaced
                        else f"{len(replaced)} were replaced before"
                    )
                    message = f"worker {number} could not be replaced, {kept}: {error}; see the gateway's log"
                    logger.error("%s", message)
                    raise SiteError(500, message) from None
                for member in old:
                    await self._retire(member)
                self._run(self._cover())
                replaced.append(number)
            engines = [spec.name for spec in self._config.engines]
            if tuple(engines) != self._history.engines:
                self._history.fit(engines)
            pids = [member.pid for member in self._serving]
            logger.info("restarted: %s", ", ".join(f"pid {pid} serves" for pid in pids))
            return {"pids": pids, "leaving": [member.pid for member in self._leaving]}

    async def _retire(self, member: Member) -> None:
        """Have it take nothing new; what it has it may end."""
        member.state = "leaving"
        try:
            await member.ask("retire")
        except EOFError:
            pass
        except (SiteError, TimeoutError):
            logger.error("worker %d (pid %d) does not leave when asked to", member.number, member.pid)
            if isinstance(member, Worker):
                member.signal(signal.SIGTERM)

    def _read_again(self) -> Config:
        path = self._config.path
        try:
            config = read(path)
        except (ProblemsError, OSError, UnicodeDecodeError) as error:
            logger.error("no restart, %s has a mistake:\n%s", path, error)
            raise SiteError(400, str(error)) from None
        for name in KEPT:
            old, new = getattr(self._config, name), getattr(config, name)
            if name == "listen" and self._listen is not None:
                continue
            if str(old) != str(new):
                message = f"`{name}` was changed in {path}: that needs a stop and a start"
                logger.error("no restart: %s", message)
                raise SiteError(409, message)
        return config if self._listen is None else msgspec.structs.replace(config, listen=self._config.listen)

    async def _ready_tiers(self) -> list[str]:
        """The tiers for which who serves now has a ready engine."""
        for member in self._serving:
            with contextlib.suppress(SiteError, EOFError, TimeoutError):
                missing = decode(await member.ask("missing"))
                return [tier for tier in self._config.tiers if tier not in missing]
        return []

    # what workers tell unasked

    def _heard(self, worker: Worker, what: str, body: msgspec.Raw) -> None:
        if what == "metrics":
            worker.seen.end(decode(body, type=Families))
        elif what == "stored":
            self._spread(decode(body, type=Stored), worker)

    def _spread(self, stored: Stored, source: Worker | None) -> None:
        """Have all others know which engine holds a reply."""
        for member in self._members:
            if member is not source and not (source is None and isinstance(member, Local)):
                self._run(self._tell(member, "remember", [stored]))

    async def _tell(self, member: Member, what: str, *arguments: object) -> None:
        with contextlib.suppress(SiteError, EOFError, TimeoutError):
            await member.ask(what, *arguments)
