"""`kvferry fleet run`: a controller in the foreground that follows the fleet's file."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from kvferry.cli.fleet.controllers import make_backend, reconcile
from kvferry.cli.fleet.life import require_same_place
from kvferry.cli.terminal.display import open_display
from kvferry.cli.terminal.summary import ServeSummary
from kvferry.core.errors import ConfigError
from kvferry.core.runtime.threads import run_async
from kvferry.fleet.display import Display
from kvferry.fleet.leftovers import remove_leftovers
from kvferry.fleet.places import fleet_names, ledger_of, running_path
from kvferry.fleet.spec.fleet_spec import DesiredFleet
from kvferry.fleet.spec.spec_file import SpecFile
from kvferry.models.digest_cache import DigestCache
from kvferry.observe.logs import TEXT, LogConfig, set_up_logging

logger = logging.getLogger(__name__)


def add_to(fleet: App) -> None:
    """Give `kvferry fleet` this command."""
    fleet.command(run)


def run(
    spec: Annotated[Path, Parameter(help="The fleet's file (TOML). Changes to it are carried out.")],
    *,
    verbose: Annotated[
        bool, Parameter(help="Write log lines to standard error instead of a file.", negative=())
    ] = False,
) -> int:
    """Run a fleet in the foreground, as its file says.

        kvferry fleet run chat.toml

    Changes to the file are carried out. A change that is invalid, or cannot be carried out here, is refused in one
    line, and the fleet stays as it is. SIGTERM ends the command, and the fleet keeps running.
    """
    set_up_logging(TEXT, "controller")
    fleet_file = _FleetFile(spec)
    fleet = fleet_file.fleet
    summary = ServeSummary(
        command=f"fleet-{fleet.name}",
        title=f"{fleet.name} · {fleet.model} · follows {spec.name}",
        port=fleet.router.port,
        models=(fleet.model,),
        has_page=fleet.router.count != 0 and "--no-page" not in fleet.router.args,
        end="Ctrl-C ends this command; the fleet goes on (kvferry fleet delete ends it).",
    )
    display = open_display(LogConfig(verbose=verbose), summary, "controller")
    DigestCache()  # logs problems with it once, for all processes
    remove_leftovers()
    run_async(_run(fleet_file, display))
    return 0


async def _run(fleet_file: _FleetFile, display: Display) -> None:
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(fleet_file.watch())
        await reconcile(fleet_file.ledger, wait_for_leadership=True, follows_file=True, display=display)
        watching.cancel()


class _FleetFile:
    """The file of a fleet. A valid change becomes the desired state in the fleet's ledger."""

    poll_interval_s = 1.0
    """Seconds between two checks of the file."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` for an invalid file, unless an earlier content of it is in the ledger: the fleet then
        stays as that says."""
        self._source = str(path.absolute())  # a link changes with what it points to
        self._file = SpecFile(path, before=self._last_followed())
        self.fleet = self._file.fleet
        self.ledger = ledger_of(self.fleet.name)
        try:
            self._apply(self.fleet)
        except ConfigError as error:
            if not self.ledger.exists or self.ledger.desired_state().source != self._source:
                raise
            logger.error("the change is refused, and the previous spec stays in force: %s", error)

    def _last_followed(self) -> DesiredFleet | None:
        """The fleet that this file described when it was last applied; None if it never was."""
        for name in fleet_names():
            with suppress(ConfigError):  # the ledger of another fleet cannot be read
                desired = ledger_of(name).desired_state()
                if desired.source == self._source and not desired.deleted:
                    return desired.fleet
        return None

    async def watch(self) -> None:
        """Apply the file whenever it changes, until cancelled."""
        while True:
            await asyncio.sleep(self.poll_interval_s)
            fleet = await self._file.follow()
            if fleet is self.fleet and not self._is_overruled():
                continue
            self.fleet = fleet
            try:
                await asyncio.to_thread(self._apply, fleet)
            except ConfigError as error:
                logger.error("the change is refused, and the previous spec stays in force: %s", error)

    def _is_overruled(self) -> bool:
        """True if this process leads, and a command has changed the fleet while this process waited for the former
        controller to end."""
        holder = self.ledger.controller
        if holder is None or holder.pid != os.getpid():
            return False
        with suppress(ConfigError):  # the ledger is gone, or cannot be read
            desired = self.ledger.desired_state()
            return desired.source != self._source and not desired.deleted
        return False

    def _apply(self, fleet: DesiredFleet) -> None:
        ledger = self.ledger
        if fleet.name != ledger.folder.name:
            raise ConfigError(f"name cannot be changed from {ledger.folder.name} to {fleet.name}: it is another fleet")
        require_same_place(ledger, fleet)
        make_backend(running_path(ledger), fleet)
        before = ledger.desired_state() if ledger.exists else None
        if before is None or before.deleted or (before.fleet, before.source) != (fleet, self._source):
            ledger.apply(fleet, self._source)
