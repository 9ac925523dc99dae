"""Starts the processes of a fleet on this machine, watches them, and ends all of them in the end, whatever happens.

Owns the processes. Does not know what they do: each is a command that speaks the start protocol of `ready`, or is a
`Foreign` program.

    start all instances at once ─► all ready ─► start the routers ─► ready: one URL
    Ctrl-C, SIGTERM, SIGHUP: routers, then instances: SIGTERM, grace period, SIGKILL.   Ctrl-C again: SIGKILL at once.
    a process exits by itself, or hangs: restart it at its address; too many restarts, or an exit before all serve:
    name the process with the first cause in its log, or its last lines, and end the rest.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol
from urllib.parse import urlsplit

from kvferry.engine.server.registrar import Registrar
from kvferry.fleet.asking import serves
from kvferry.fleet.display import Display
from kvferry.fleet.fork_server import ForkServer
from kvferry.fleet.member import Member
from kvferry.fleet.process import Process, ProcessSpec
from kvferry.fleet.ready import InstanceReady
from kvferry.fleet.restart import Again, GiveUp, RestartPolicy
from kvferry.http.server.listen import BACKLOG, reserve

logger = logging.getLogger(__name__)

EXIT_CRASHED = 1
EXIT_USER_ERROR = 2
"""Exit code of a process with wrong settings; the fleet then ends with it too."""
EXIT_KILLED = 130
ERROR_PREFIX = "kvferry: error: "
"""How the line begins in which a process reports wrong settings."""

_KILLED_S = 5.0
"""Most seconds to wait for killed processes before their fork server is ended, which may have hung."""

_SOON_S = 1.0
"""How long the supervisor waits for the end of processes before it names those that it waits for."""

DEFAULT_POLICY = RestartPolicy()


@dataclass(frozen=True)
class RouterGroup:
    """What the routers of one port share: a folder that only their user can read, and the descriptors of the sockets
    they accept connections on. Both are the supervisor's, and outlive each of them."""

    folder: Path
    listeners: tuple[int, ...]


class Front(Protocol):
    """The routers, made when the instances serve."""

    @property
    def addresses(self) -> Sequence[tuple[str, int]]:
        """Where they listen: hosts and ports."""

    def processes(self, ready: Mapping[str, InstanceReady], group: RouterGroup) -> Sequence[ProcessSpec]:
        """What to run in front of these instances."""


@dataclass(frozen=True)
class FleetPlan:
    """What to run: instances first, then the routers."""

    instances: tuple[ProcessSpec, ...]
    front: Front | None = None


@dataclass(frozen=True)
class EndAsked:
    """The supervisor was asked to stop, by this signal or by a call of `stop`."""

    number: int | None = None


@dataclass(frozen=True)
class Crashed:
    """A process ended although nobody asked it to, and is not restarted; it was restarted `num_restarts` times in a
    row."""

    process: Process
    num_restarts: int = 0


@dataclass(frozen=True)
class NotStarted:
    """The system could not start a process."""

    reason: str


End = EndAsked | Crashed | NotStarted


class LocalSupervisor:
    """Runs one fleet, once. `grace_s`: seconds between SIGTERM and SIGKILL, for the router and again for the
    instances."""

    def __init__(self, display: Display, grace_s: float = 10.0, policy: RestartPolicy = DEFAULT_POLICY) -> None:
        self._display, self._grace_s, self._policy = display, grace_s, policy
        self._instances: list[Member] = []
        self._front: list[Member] = []
        self._end: asyncio.Future[End] | None = None
        self._registrars: list[tuple[Registrar, asyncio.Task[None]]] = []
        self._is_up = False
        self._hurry = asyncio.Event()
        self._fork_server: ForkServer | None = None
        """None if there are too few instances for it to save time."""
        self._listeners: list[socket.socket] = []
        self._folder = Path()

    async def run(self, plan: FleetPlan) -> int:
        """Start everything and serve until the end. Returns the exit code. Call it in the main thread. Raises
        `ConfigError` if the routers' address cannot be used."""
        with ExitStack() as owned:
            addresses = () if plan.front is None else plan.front.addresses
            self._listeners = [owned.enter_context(closing(reserve(host, port))) for host, port in addresses]
            if self._listeners:
                self._folder = Path(owned.enter_context(TemporaryDirectory(prefix="kvferry-", dir=_memory_folder())))
            return await self._run(plan)

    async def _run(self, plan: FleetPlan) -> int:
        self._end = asyncio.get_running_loop().create_future()
        if sum(spec.forks for spec in plan.instances) > 1:
            self._fork_server = ForkServer()
        async with asyncio.TaskGroup() as group:
            with self._signals():
                starting = group.create_task(self._bring_up(plan, group))
                try:
                    code = self._report(await self._end)
                finally:
                    self._conclude(EndAsked())  # If something failed here, nothing is restarted.
                    starting.cancel()
                    await asyncio.wait([starting])
                    await self._bring_down()
                    self._display.close()
        return EXIT_KILLED if self._hurry.is_set() else code

    def stop(self) -> None:
        """End everything, as SIGTERM does. Call it from the loop that `run` is on."""
        if self._end is not None:
            self._conclude(EndAsked())

    # Start.

    async def _bring_up(self, plan: FleetPlan, group: asyncio.TaskGroup) -> None:
        try:
            instances = ready = await self._start_all(plan.instances, self._instances, group)
            if plan.front is not None:
                for listener in self._listeners:
                    listener.listen(BACKLOG)
                shared = RouterGroup(self._folder, tuple(one.fileno() for one in self._listeners))
                ready = await self._start_all(plan.front.processes(ready, shared), self._front, group)
        except OSError as error:
            self._conclude(NotStarted(f"cannot start a process: {error.strerror or error}"))
            return
        self._is_up = True
        for spec in plan.instances:
            self._register(spec, instances[spec.name].url, group)
        if plan.front is not None:
            self._display.members({name: about.url for name, about in instances.items()})
        self._display.up(next(iter(ready.values())).url)

    def _register(self, spec: ProcessSpec, url: str, group: asyncio.TaskGroup) -> None:
        """Register the process at routers, unless it registers itself."""
        if spec.registrar is None:
            return

        async def answers() -> bool:
            return await serves(url)

        registrar = Registrar(spec.registrar, spec.registrar.host, urlsplit(url).port or 0, answers)
        self._registrars.append((registrar, group.create_task(registrar.run())))

    async def _start_all(
        self, specs: Sequence[ProcessSpec], members: list[Member], group: asyncio.TaskGroup
    ) -> dict[str, InstanceReady]:
        """Start all at the same time; returns when all serve. If one ends instead, the fleet ends."""
        if specs:
            self._display.starting([spec.name for spec in specs])
        processes = []
        for spec in specs:
            member = Member(spec, self._policy, self._fork_server)
            processes.append(await member.start())
            members.append(member)
            group.create_task(self._keep(member, processes[-1]))
        return {process.name: await process.ready for process in processes}

    # Watching.

    async def _keep(self, member: Member, process: Process | None) -> None:
        """Watch the processes of a member, one after the other, until the end."""
        while process is not None:
            await self._watch(member, process)
            process = await self._start_again(member, process)

    async def _watch(self, member: Member, process: Process) -> None:
        name, display = process.name, self._display
        process.ready.add_done_callback(
            lambda ready: None if ready.cancelled() else display.ready(name, ready.result().url)
        )
        guard = asyncio.create_task(member.kill_when_hung())
        try:
            await process.watch(
                on_line=lambda text: display.line(name, text),
                on_progress=lambda progress: display.progress(name, progress.what, progress.progress),
            )
        finally:
            guard.cancel()
            await asyncio.wait([guard])

    async def _start_again(self, member: Member, before: Process) -> Process | None:
        """A member's next process, after a wait; None when everything ends."""
        assert self._end is not None
        why = _how(before.returncode)
        while not self._end.done():
            match member.failed() if self._is_up else GiveUp(0):
                case GiveUp(number):
                    self._conclude(Crashed(before, number))
                case Again(wait_s, number):
                    self._warn_of_restart(member, why, wait_s, number)
                    await asyncio.wait([self._end], timeout=wait_s)
                    try:
                        return None if self._end.done() else await self._started(member)
                    except OSError as error:
                        why = f"cannot be started: {error.strerror or error}"
        return None

    async def _started(self, member: Member) -> Process:
        process = await member.start()
        if self._end is not None and self._end.done():  # It was started too late to be stopped with the others.
            process.kill()
        return process

    def _warn_of_restart(self, member: Member, why: str, wait_s: float, number: int) -> None:
        most = self._policy.max_restarts
        logger.warning(
            "%s %s; starting it again in %g s (restart %d of %d in a row)", member.name, why, wait_s, number, most
        )

    # Stop.

    def _conclude(self, end: End) -> None:
        """End the fleet for this reason, unless it is ending already."""
        assert self._end is not None
        if not self._end.done():
            self._end.set_result(end)

    def _report(self, end: End) -> int:
        match end:
            case EndAsked(number):
                by = f"{signal.Signals(number).name}: " if number is not None else ""
                how = " once running answers have ended; Ctrl-C again ends everything now" if self._is_up else ""
                self._display.note(f"{by}stopping everything{how}")
                return 0
            case NotStarted(reason):
                self._display.error(reason)
                return EXIT_CRASHED
            case Crashed(process, num_restarts):
                return self._report_crash(process, num_restarts)

    def _report_crash(self, process: Process, num_restarts: int) -> int:
        complaint = _complaint(process)
        if complaint is not None:
            self._display.error(f"{process.name}: {complaint}")
            return EXIT_USER_ERROR
        if process.first_cause.text and not process.ready.done():
            self._display.error(f"{process.name} {_how(process.returncode)} while starting: {process.first_cause.text}")
            return EXIT_CRASHED
        phase = "while running" if process.ready.done() else "while starting"
        loop = f" after {num_restarts} restarts in a row" if num_restarts else ""
        self._display.error(f"{process.name} {_how(process.returncode)} {phase}{loop}; its last lines:")
        for line in process.last_lines:
            self._display.note(f"  {line}")
        return EXIT_CRASHED

    async def _bring_down(self) -> None:
        """Stop the routers first, so that they can finish their answers while instances still serve. Instances leave
        the other routers at which they are registered, which may finish their answers too."""
        for listener in self._listeners:  # from now on, no connection waits for a router that will not come
            listener.close()
        await self._leave_routers()
        for _, task in self._registrars:
            task.cancel()
        for members in (self._front, self._instances):
            await self._end_in_time(_processes(members))
        if self._fork_server is not None:  # From here on, nobody waits for its report that a child has ended.
            await self._fork_server.close()

    async def _leave_routers(self) -> None:
        leaving = asyncio.create_task(self._leave(self._grace_s))
        hurried = asyncio.create_task(self._hurry.wait())
        tasks: set[asyncio.Task[Any]] = {leaving, hurried}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        if hurried.done():
            await self._leave(0.0)
        else:
            leaving.result()

    async def _leave(self, within_s: float) -> None:
        await asyncio.gather(*(registrar.leave(within_s) for registrar, _ in self._registrars))

    async def _end_in_time(self, processes: Sequence[Process]) -> None:
        """Stop processes by SIGTERM, and kill those that have not ended when their grace is over."""
        for process in processes:
            process.terminate()
        soon_s = min(_SOON_S, self._grace_s)
        if await _all_gone(processes, soon_s):
            return
        self._display.note(f"waiting for {_left(processes)}")
        if not await _all_gone(processes, self._grace_s - soon_s):
            self._display.note(f"killing {_left(processes)}: not ended within {self._grace_s:g} s")
            for process in processes:
                process.kill()
            await _all_gone(processes, _KILLED_S)

    # Signals.

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup makes a process ignore it.
            numbers.append(signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        assert self._end is not None
        if not self._end.done():
            self._conclude(EndAsked(number))
        elif number == signal.SIGINT and not self._hurry.is_set():
            self._hurry.set()
            self._display.note("killing everything")
            for process in _processes([*self._front, *self._instances]):
                process.kill()


def _memory_folder() -> str | None:
    """For what is to be on no disk: keys, and a database whose writes must not wait."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _processes(members: Sequence[Member]) -> list[Process]:
    return [member.process for member in members if member.process is not None]


def _left(processes: Sequence[Process]) -> str:
    return ", ".join(process.name for process in processes if not process.gone.is_set())


async def _all_gone(processes: Sequence[Process], timeout_s: float) -> bool:
    """Wait until all have ended; False if that takes longer than `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            for process in processes:
                await process.gone.wait()
    except TimeoutError:
        return False
    return True


def _complaint(process: Process) -> str | None:
    """The configuration error that a process reported, if that is why it did not start."""
    if process.returncode != EXIT_USER_ERROR or process.ready.done():
        return None
    lines = (line for line in reversed(process.last_lines) if line.startswith(ERROR_PREFIX))
    return next((line.removeprefix(ERROR_PREFIX) for line in lines), None)


def _how(returncode: int | None) -> str:
    if returncode is None or returncode >= 0:
        return f"ended with exit code {returncode}"
    return f"was killed by {signal.Signals(-returncode).name}"
