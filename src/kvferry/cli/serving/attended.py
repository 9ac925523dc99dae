"""A fleet in the foreground: the user waits until it is up, and Ctrl-C ends everything that was started."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import NoReturn

from kvferry.cli.terminal.display import open_display
from kvferry.cli.terminal.summary import ServeSummary
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.compiled import report_missing_compiler
from kvferry.core.host.machine import require_disk_space
from kvferry.core.runtime.process_exit import EXIT_USER_ERROR, shutdown_signals
from kvferry.core.runtime.threads import run_async
from kvferry.fleet.backends.local.backend import LocalBackend, memory_folder
from kvferry.fleet.backends.local.fork_server import ForkServer
from kvferry.fleet.control.backend import BackendContext, FleetBackend, Member, Recipe, backend_class
from kvferry.fleet.control.controller import Controller, Detached, End, FleetFailed, LeadershipLost, ShutdownRequested
from kvferry.fleet.control.ledger import Ledger
from kvferry.fleet.control.router_client import RouterClient
from kvferry.fleet.display import Display, ReportingDisplay
from kvferry.fleet.leftovers import remove_leftovers
from kvferry.fleet.places import PREFIX
from kvferry.fleet.processes.ready import ReadyWriter
from kvferry.fleet.spec.fleet_spec import DesiredFleet
from kvferry.models.digest_cache import DigestCache
from kvferry.observe.logs import LogConfig, set_up_logging

EXIT_FAILED = 1
EXIT_KILLED = 130

_SHARED_BYTES = 4 * 2**20
"""Minimum free bytes for the folder: more than processes write before they serve."""

MakeRecipe = Callable[[DesiredFleet], Recipe]


@asynccontextmanager
async def controlling(
    ledger: Ledger,
    backend: FleetBackend,
    display: Display,
    on_signal: Callable[[int], None],
    *,
    grace_s: float,
    attended: bool = False,
    wait_for_leadership: bool = True,
    follows_file: bool = False,
) -> AsyncIterator[Controller]:
    """A controller in this process, as all commands use it. `on_signal`: called with the number of a signal that ends
    the process; the other parameters are those that `Controller` has. At the end, the members are released, and another
    controller may lead."""
    loop, numbers = asyncio.get_running_loop(), shutdown_signals()
    async with RouterClient(backend.context.token) as front:
        controller = Controller(
            ledger,
            backend,
            front,
            display,
            SYSTEM_CLOCK,
            attended=attended,
            wait_for_leadership=wait_for_leadership,
            follows_file=follows_file,
            grace_s=grace_s,
        )
        for number in numbers:
            loop.add_signal_handler(number, on_signal, number)
        try:
            yield controller
        finally:
            await backend.close()
            controller.close()
            for number in numbers:
                loop.remove_signal_handler(number)


class AttendedFleet:
    """Runs one fleet, once, in a private temporary folder. `grace_s`: seconds for running requests after SIGTERM, first
    in the routers and then in the instances. A process is killed `end_margin_s` after this time."""

    def __init__(
        self,
        fleet: DesiredFleet,
        make_recipe: MakeRecipe,
        display: Display,
        *,
        token: str,
        grace_s: float,
        end_margin_s: float = 5.0,
        fork_server: ForkServer | None = None,
    ) -> None:
        self._fleet, self._make_recipe, self._display = fleet, make_recipe, display
        self._token, self._grace_s, self._fork_server = token, grace_s + end_margin_s, fork_server
        self._controller: Controller | None = None
        self._backend: FleetBackend | None = None
        self._aborting = set[asyncio.Task[None]]()
        self._stop_requested: ShutdownRequested | None = None
        self._is_aborting = False

    async def run(self) -> int:
        """Serve until the fleet ends. Returns the exit code. Call this in the main thread. Raises `ConfigError` if the
        fleet cannot be run here."""
        try:
            remove_leftovers()
            if self._fleet.backend.kind == "local":
                report_missing_compiler()
            parent = memory_folder() or gettempdir()
            require_disk_space(Path(parent), _SHARED_BYTES, "what the processes share, and log, needs at least 4 MiB")
            with TemporaryDirectory(prefix=PREFIX, dir=parent) as folder:
                return await self._run(Path(folder))
        finally:
            self._display.close()

    def stop(self) -> None:
        """End the fleet, as SIGTERM does. Call this on the event loop of `run`."""
        self._stop_requested = ShutdownRequested()
        if self._controller is not None:
            self._controller.end(self._stop_requested)

    @property
    def stop_requested(self) -> bool:
        """True if a signal or `stop` has requested the end."""
        return self._stop_requested is not None

    @property
    def hangs(self) -> bool:
        """True if a process that does not end is left after `run`."""
        return self._backend is not None and self._backend.hangs

    async def _run(self, folder: Path) -> int:
        ledger = Ledger(folder / "ledger")
        ledger.apply(self._fleet)
        context = BackendContext(folder, self._make_recipe, self._display, outlives=False, token=self._token)
        backend = self._backend = self._make_backend(context)
        async with controlling(
            ledger, backend, self._display, self._on_signal, attended=True, grace_s=self._grace_s
        ) as controller:
            self._controller = controller
            if self._stop_requested is not None:
                controller.end(self._stop_requested)
            end = await controller.run()
            code = self._report(end, is_up=controller.is_up)
            await controller.shut_down()
            await asyncio.gather(*self._aborting)
        return EXIT_KILLED if self._is_aborting else code

    def _make_backend(self, context: BackendContext) -> FleetBackend:
        if self._fork_server is not None:
            return LocalBackend(context, fork_server=self._fork_server)
        return backend_class(self._fleet.backend.kind)(context)

    def _report(self, end: End, *, is_up: bool) -> int:
        match end:
            case ShutdownRequested(number):
                by = f"{signal.Signals(number).name}: " if number is not None else ""
                ending = " once running answers end; Ctrl-C again ends everything now" if is_up else ""
                self._display.stopping(f"{by}stopping everything{ending}")
                return 0
            case Detached():
                return 0
            case LeadershipLost():
                self._display.error("another controller looks after this fleet now; its members are left to that one")
                return EXIT_FAILED
            case FleetFailed(member, reason):
                return self._report_failure(member, reason, is_up=is_up)

    def _report_failure(self, member: Member | None, reason: str, *, is_up: bool) -> int:
        if member is None:
            self._display.error(reason)
            return EXIT_FAILED
        if member.is_misconfigured:
            self._display.error(f"{member.name}: {reason}")
            return EXIT_USER_ERROR
        if is_up:
            reason = f"{member.reason} while running; {reason}"
        has_cause = not is_up and ": " in reason
        self._display.error(f"{member.name} {reason}" + ("" if has_cause else "; its last lines:"))
        if not has_cause:
            for line in member.last_lines:
                self._display.note(f"  {line}")
        return EXIT_FAILED

    def _on_signal(self, number: int) -> None:
        assert self._controller is not None
        assert self._backend is not None
        if self._stop_requested is None and not self._controller.has_ended:
            self._stop_requested = ShutdownRequested(number)
            self._controller.end(self._stop_requested)
        elif number == signal.SIGINT and not self._is_aborting:
            self._is_aborting = True
            self._display.note("killing everything")
            for member in self._backend.members():
                self._aborting.add(asyncio.create_task(self._backend.stop(member.name, 0.0)))


def run_attended(
    fleet: DesiredFleet,
    make_recipe: MakeRecipe,
    *,
    token: str,
    grace_s: float,
    ready_fd: int | None,
    log: LogConfig,
    summary: ServeSummary,
) -> int:
    """Run a fleet until SIGINT or SIGTERM, and then end all its processes. Returns the exit code. Raises
    `ConfigError`."""
    display: Display
    if ready_fd is None:
        display = open_display(log, summary)
    else:
        set_up_logging(log, "supervisor")
        display = ReportingDisplay(ReadyWriter(ready_fd))
    DigestCache()  # logs problems with it once, for all processes
    attended = AttendedFleet(fleet, make_recipe, display, token=token, grace_s=grace_s)
    code = run_async(attended.run())
    if attended.hangs:
        exit_now(code)
    return code


def exit_now(code: int) -> NoReturn:
    """End this process without waiting for its threads: a thread of a library could hang, or abort the process."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
