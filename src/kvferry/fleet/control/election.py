"""Election of the controller that acts on a fleet: first on this machine (`file_leadership`), then among all machines
(the backend's `leadership`)."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.fleet.control.backend import FleetBackend
from kvferry.fleet.control.leadership import Leadership, LeadershipUnknown
from kvferry.fleet.control.ledger import DesiredState, FleetStatus, Ledger
from kvferry.fleet.display import Display
from kvferry.fleet.processes.start_time import started_at

logger = logging.getLogger(__name__)


class Election:
    """One controller's leadership, from `win` until `close`. `waits`: until another controller has ended, if there is
    one. `follows`: as in `LeaderRecord`. `ended` is done once the controller is to end: then it waits no longer."""

    try_again_s = 0.5
    """Seconds between two attempts of a controller that waits."""

    def __init__(
        self,
        ledger: Ledger,
        backend: FleetBackend,
        display: Display,
        ended: asyncio.Future[Any],
        *,
        waits: bool,
        follows: bool,
    ) -> None:
        self._ledger, self._backend, self._display = ledger, backend, display
        self._ended, self._waits = ended, waits
        self._local = ledger.leadership(follows=follows)
        self._heartbeats: list[asyncio.Task[None]] = []

    async def win(self, refresh: Callable[[], DesiredState]) -> bool:
        """True if this controller acts; False if it is to end, or does not wait. `refresh` is called before the
        backend's leadership is used, as it has the backend use the desired fleet."""
        return await self._win_local() and await self._win_global(refresh)

    async def _win_local(self) -> bool:
        """Become the only controller of this machine."""
        has_waited = False
        while not await self._local.try_acquire():
            if not self._waits and self._ledger.has_controller:
                self._display.note("another controller looks after this fleet")
                return False
            if not has_waited:
                has_waited = True
                self._display.note("another controller looks after this fleet; waiting in case it ends")
            if await self._has_ended():
                return False
        self._begin_heartbeat(self._local)
        return True

    async def _win_global(self, refresh: Callable[[], DesiredState]) -> bool:
        """Become the only controller of all machines."""
        reported = (0, "")
        desired = refresh()
        while (leadership := self._backend.leadership) is not None and not await self._is_acquired(leadership):
            why = f"{leadership.holder or 'another controller'} looks after this fleet"
            if reported[1] != why:
                self._display.note(f"{why}; waiting in case it ends")
                self._ledger.record("waits", why=why)
            if reported != (desired.number, why):
                self._report_waiting(desired.number, why)
                reported = desired.number, why
            if await self._has_ended():
                return False
            desired = refresh()
        if leadership is not None:
            self._begin_heartbeat(leadership)
        return True

    async def _is_acquired(self, leadership: Leadership) -> bool:
        try:
            return await leadership.try_acquire()
        except LeadershipUnknown as error:
            logger.warning("it is not known if another controller acts: %s", error)
            return False

    @property
    def is_leader(self) -> bool:
        """True while this controller may act; afterwards it does nothing any more."""
        return self._backend.leadership is None or self._backend.leadership.is_held

    def _begin_heartbeat(self, leadership: Leadership) -> None:
        self._heartbeats.append(asyncio.create_task(leadership.heartbeat()))

    def _report_waiting(self, number: int, why: str) -> None:
        """Write that this controller waits, in place of the status of the last active one of this machine."""
        trouble = f"{why}, and what is changed here is not done meanwhile"
        pid = os.getpid()
        status = FleetStatus(SYSTEM_CLOCK.wall(), pid, number, "", {}, (), (trouble,), started=started_at(pid))
        with suppress(OSError):
            self._ledger.write_status(status)

    async def _has_ended(self) -> bool:
        """Pause; True if the controller is to end."""
        await asyncio.wait([self._ended], timeout=self.try_again_s)
        return self._ended.done()

    async def remove(self) -> None:
        """Remove the leadership of a fleet that has ended with all its members. It goes last: until then, no other
        controller acts."""
        if self._backend.leadership is not None:
            await self._backend.leadership.remove()

    def close(self) -> None:
        """Let another controller act."""
        for heartbeat in self._heartbeats:
            heartbeat.cancel()
        self._local.close()
