"""Starts the processes of a fleet on this machine, watches them, and ends them all, whatever happens.

Owns the processes. Does not know what they are: each is a command that speaks the start protocol of `ready`.

    start instances, all at once ─► all ready ─► start the router ─► ready: one URL
    Ctrl-C, SIGTERM, SIGHUP: router, then instances: SIGTERM, grace, SIGKILL.   Ctrl-C again: SIGKILL now.
    a process ends by itself, or hangs: start it again at its address; a crash loop, or a crash before all serve:
    say which, with its last lines, and end the rest.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvferry.fleet.asking import serves
from kvferry.fleet.display import Display
from kvferry.fleet.member import Member
from kvferry.fleet.process import Process, ProcessSpec
from kvferry.fleet.ready import InstanceReady
from kvferry.fleet.restart import Again, GiveUp, RestartPolicy
from kvferry.http.registrar import Registrar

logger = logging.getLogger(__name__)

EXIT_CRASHED = 1
EXIT_USER_ERROR = 2
"""How a process ends that was told something wrong; the fleet then ends so too."""
EXIT_KILLED = 130
ERROR_PREFIX = "kvferry: error: "
"""How the one line begins in which a process says what it was told wrong."""

DEFAULT_POLICY = RestartPolicy()

MakeFront = Callable[[Mapping[str, InstanceReady]], ProcessSpec]


@dataclass(frozen=True)
class FleetPlan:
    """What to run: instances first, then what stands in front of them, which is made from their addresses."""

    instances: tuple[ProcessSpec, ...]
    front: MakeFront | None = None


@dataclass(frozen=True)
class EndAsked:
    """The supervisor was asked to end, by this signal or by a call of `stop`."""

    number: int | None = None


@dataclass(frozen=True)
class Crashed:
    """A process ended though nobody asked it to, and is not started again; it was, `num_restarts` times in a row."""

    process: Process
    num_restarts: int = 0


@dataclass(frozen=True)
class NotStarted:
    """The system refused a process."""

    reason: str


End = EndAsked | Crashed | NotStarted


class LocalSupervisor:
    """Runs one fleet, once. `grace_s`: seconds between SIGTERM and SIGKILL, for the router and again for instances."""

    def __init__(self, display: Display, grace_s: float = 10.0, policy: RestartPolicy = DEFAULT_POLICY) -> None:
        self._display, self._grace_s, self._policy = display, grace_s, policy
        self._instances: list[Member] = []
        self._front: list[Member] = []
        self._end: asyncio.Future[End] | None = None
        self._registrars: list[tuple[Registrar, asyncio.Task[None]]] = []
        self._is_up = self._hurried = False

    async def run(self, plan: FleetPlan) -> int:
        """Start everything and serve until the end; returns the exit code. Call it in the main thread."""
        self._end = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as group:
            with self._signals():
                starting = group.create_task(self._bring_up(plan, group))
                try:
                    code = self._report(await self._end)
                finally:
                    self._conclude(EndAsked())  # Where something failed here: nothing is to be started again.
                    starting.cancel()
                    await asyncio.wait([starting])
                    await self._bring_down()
                    self._display.close()
        return EXIT_KILLED if self._hurried else code

    def stop(self) -> None:
        """End everything, as SIGTERM does. Call it from the loop that `run` is on."""
        if self._end is not None:
            self._conclude(EndAsked())

    # The beginning.

    async def _bring_up(self, plan: FleetPlan, group: asyncio.TaskGroup) -> None:
        try:
            instances = ready = await self._start_all(plan.instances, self._instances, group)
            if plan.front is not None:
                ready = await self._start_all([plan.front(ready)], self._front, group)
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
        """Register the process at routers, if it does not register itself."""
        if spec.registrar is None:
            return

        async def answers() -> bool:
            return await serves(url)

        registrar = Registrar(spec.registrar, spec.registrar.host, urlsplit(url).port or 0, answers)
        self._registrars.append((registrar, group.create_task(registrar.run())))

    async def _start_all(
        self, specs: Sequence[ProcessSpec], members: list[Member], group: asyncio.TaskGroup
    ) -> dict[str, InstanceReady]:
        """Start them side by side; returns when all serve. One that ends instead concludes the fleet."""
        self._display.starting([spec.name for spec in specs])
        processes = []
        for spec in specs:
            member = Member(spec, self._policy)
            processes.append(await member.start())
            members.append(member)
            group.create_task(self._keep(member, processes[-1]))
        return {process.name: await process.ready for process in processes}

    # Meanwhile.

    async def _keep(self, member: Member, process: Process | None) -> None:
        """Watch the process of a place, and the next, until the end."""
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
        """The next process of a place, after a wait; None when everything ends."""
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
        if self._end is not None and self._end.done():  # It came too late to be told to end with the others.
            process.kill()
        return process

    def _warn_of_restart(self, member: Member, why: str, wait_s: float, number: int) -> None:
        most = self._policy.max_restarts
        logger.warning(
            "%s %s; starting it again in %g s (restart %d of %d in a row)", member.name, why, wait_s, number, most
        )

    # The end.

    def _conclude(self, end: End) -> None:
        """End the fleet for this reason, unless it is ending for another already."""
        assert self._end is not None
        if not self._end.done():
            self._end.set_result(end)

    def _report(self, end: End) -> int:
        match end:
            case EndAsked(number):
                by = f"{signal.Signals(number).name}: " if number is not None else ""
                self._display.note(f"{by}ending everything")
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
        phase = "while running" if process.ready.done() else "while starting"
        loop = f" after {num_restarts} restarts in a row" if num_restarts else ""
        self._display.error(f"{process.name} {_how(process.returncode)} {phase}{loop}; its last lines:")
        for line in process.last_lines:
            self._display.note(f"  {line}")
        return EXIT_CRASHED

    async def _bring_down(self) -> None:
        """The router first, so that it can end its answers while instances still give them; other routers are told, and
        may end theirs."""
        grace_s = 0.0 if self._hurried else self._grace_s
        await asyncio.gather(*(registrar.leave(grace_s) for registrar, _ in self._registrars))
        for _, task in self._registrars:
            task.cancel()
        for members in (self._front, self._instances):
            processes = _processes(members)
            for process in processes:
                process.terminate()
            if not await _all_gone(processes, self._grace_s):
                for process in processes:
                    process.kill()
                await _all_gone(processes, None)

    # Signals.

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup has it ignored, and means it.
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
        elif number == signal.SIGINT and not self._hurried:
            self._hurried = True
            self._display.note("killing everything")
            for process in _processes([*self._front, *self._instances]):
                process.kill()


def _processes(members: Sequence[Member]) -> list[Process]:
    return [member.process for member in members if member.process is not None]


async def _all_gone(processes: Sequence[Process], timeout_s: float | None) -> bool:
    """Wait until all have ended; False when that takes longer than `timeout_s`."""
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
