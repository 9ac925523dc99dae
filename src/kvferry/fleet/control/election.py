"""Election of the controller that leads a fleet: first on this machine (`file_leadership`), then among all machines
(the backend's `leadership`). Only the controller that leads changes the fleet."""

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
    """One controller's leadership, from `win` until `close`. `wait_for_leadership`: if another controller leads, wait
    until it has ended instead of giving up. `follows_file`: as in `LeaderRecord`. `ended`: is done once the controller
    is to end, which also ends the waiting."""

    retry_interval_s = 0.5
    """Seconds between two attempts to lead."""

    def __init__(
        self,
        ledger: Ledger,
        backend: FleetBackend,
        display: Display,
        ended: asyncio.Future[Any],
        *,
        wait_for_leadership: bool,
        follows_file: bool,
    ) -> None:
        self._ledger, self._backend, self._display = ledger, backend, display
        self._ended, self._waits_for_leadership = ended, wait_for_leadership
        self._local = ledger.leadership(follows_file=follows_file)
        self._heartbeats: list[asyncio.Task[None]] = []

    async def win(self, refresh: Callable[[], DesiredState]) -> bool:
        """Wait until this controller leads. Returns False if the controller is to end, or if another one leads and
        `waits` is False. `refresh`: has the backend use the desired state, and returns it; called before each attempt
        to get the backend's leadership."""
        return await self._win_local() and await self._win_global(refresh)

    async def _win_local(self) -> bool:
        """Become the only controller of the fleet on this machine."""
        has_waited = False
        while not await self._local.try_acquire():
            if not self._waits_for_leadership and self._ledger.has_controller:
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
        """Become the only controller of the fleet on all machines."""
        reported = (0, "")
        desired = refresh()
        while (leadership := self._backend.leadership) is not None and not await self._is_acquired(leadership):
            reason = f"{leadership.holder or 'another controller'} looks after this fleet"
            if reported[1] != reason:
                self._display.note(f"{reason}; waiting in case it ends")
                self._ledger.record("waits", reason=reason)
            if reported != (desired.number, reason):
                self._report_waiting(desired.number, reason)
                reported = desired.number, reason
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
            logger.warning("it is not known if another controller leads: %s", error)
            return False

    @property
    def is_leader(self) -> bool:
        """True unless another controller may have the backend's leadership. Has a meaning between `win` and `close`
        only; once it is False, this controller changes nothing any more."""
        return self._backend.leadership is None or self._backend.leadership.is_held

    def _begin_heartbeat(self, leadership: Leadership) -> None:
        self._heartbeats.append(asyncio.create_task(leadership.heartbeat()))

    def _report_waiting(self, number: int, reason: str) -> None:
        """Replace the fleet's status, which the former leader on this machine has written, by one that says that this
        controller waits."""
        trouble = f"{reason}; changes made on this machine take effect only once its own controller leads"
        pid = os.getpid()
        status = FleetStatus(SYSTEM_CLOCK.wall(), pid, number, "", {}, (), (trouble,), started=started_at(pid))
        with suppress(OSError):
            self._ledger.write_status(status)

    async def _has_ended(self) -> bool:
        """Wait `retry_interval_s` before the next attempt. Returns True if the controller is to end."""
        await asyncio.wait([self._ended], timeout=self.retry_interval_s)
        return self._ended.done()

    async def remove(self) -> None:
        """Remove the leadership of a fleet that has ended. Call it last, after the end of all members: until then, no
        other controller may lead."""
        if self._backend.leadership is not None:
            await self._backend.leadership.remove()

    def close(self) -> None:
        """Give up the leadership, so that another controller may lead."""
        for heartbeat in self._heartbeats:
            heartbeat.cancel()
        self._local.close()
