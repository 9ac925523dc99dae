"""Which controller acts on a fleet: one of this machine (`lease`), and one of all machines (the backend)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.fleet.control.backend import FleetBackend
from kvferry.fleet.control.lease import Lease
from kvferry.fleet.control.ledger import DesiredState, FleetStatus, Ledger
from kvferry.fleet.display import Display
from kvferry.fleet.processes.start_time import started_at

_TRY_AGAIN_S = 0.5
"""How often a controller that waits tries to become the one that acts."""


class Leadership:
    """One controller's right to act, from `take` until `close`. `waits`: until another controller has ended, if there
    is one. `follows`: as in `LeaseHolder`. `ended` is done once the controller is to end: then it waits no longer."""

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
        self._ended, self._waits, self._follows = ended, waits, follows
        self._lease: Lease | None = None
        self._saying: asyncio.Task[None] | None = None

    async def take(self, look: Callable[[], DesiredState]) -> bool:
        """Whether this controller acts; False if it was told to end meanwhile, or does not wait. `look` is called
        before the backend is asked: the backend is to know what is wanted."""
        return await self._take_here() and await self._take_everywhere(look)

    async def _take_here(self) -> bool:
        """Be the one controller of this machine."""
        waited = False
        while (lease := self._ledger.try_acquire(follows=self._follows)) is None:
            if not self._waits and self._ledger.has_controller:
                self._display.note("another controller looks after this fleet")
                return False
            if not waited:
                waited = True
                self._display.note("another controller looks after this fleet; waiting in case it ends")
            if await self._has_ended():
                return False
        self._lease = lease
        self._saying = asyncio.create_task(lease.heartbeat())
        return True

    async def _take_everywhere(self, look: Callable[[], DesiredState]) -> bool:
        """Be the one controller of all machines."""
        told = (0, "")
        wanted = look()
        while not await self._backend.try_acquire():
            why = f"{self._backend.acts_instead} looks after this fleet"
            if told[1] != why:
                self._display.note(f"{why}; waiting in case it ends")
                self._ledger.note("waits", why=why)
            if told != (wanted.number, why):
                self._say_that_it_waits(wanted.number, why)
                told = wanted.number, why
            if await self._has_ended():
                return False
            wanted = look()
        return True

    def _say_that_it_waits(self, number: int, why: str) -> None:
        """Write that it waits, in place of what was seen when a controller of this machine acted last."""
        trouble = f"{why}, and what is changed here is not done meanwhile"
        pid = os.getpid()
        status = FleetStatus(SYSTEM_CLOCK.wall(), pid, number, "", {}, (), (trouble,), started=started_at(pid))
        with suppress(OSError):
            self._ledger.write_status(status)

    async def _has_ended(self) -> bool:
        """Whether the controller is to end, after a pause."""
        await asyncio.wait([self._ended], timeout=_TRY_AGAIN_S)
        return self._ended.done()

    def close(self) -> None:
        """Let another controller act."""
        if self._saying is not None:
            self._saying.cancel()
        if self._lease is not None:
            self._lease.close()
