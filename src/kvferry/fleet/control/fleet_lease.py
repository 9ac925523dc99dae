"""The right to act on a fleet, which one controller of all machines has at a time, kept where all of them reach it: an
object of a cluster, say.

Its holder renews it every few seconds. It believes that it has it for less time than others wait before they take it,
counted from before the renewal was sent, by a clock that runs on while the machine sleeps: a process that was stopped
knows when it continues that it is too late. Clocks of two machines are never compared.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable

from kvferry.core.clock import boot_time
from kvferry.core.errors import KvferryError

logger = logging.getLogger(__name__)

RENEWED_S, BELIEVED_S, TAKEN_S = 2.0, 10.0, 15.0
"""How often it is renewed, how long its holder acts after a renewal, and how long others wait for the next one."""


class LeaseUnknown(KvferryError):
    """The place where the lease is kept does not answer, so nobody knows who has it."""


class FleetLease(ABC):
    """Owns until when this process believes that it has the right. `clock`: seconds since the machine was started."""

    def __init__(self, clock: Callable[[], float] = boot_time) -> None:
        self._clock = clock
        self._until = float("-inf")
        self.holder = ""
        """Who had the lease when it was looked at last; empty: nobody."""

    @property
    def is_held(self) -> bool:
        """Whether this process may act now."""
        return self._clock() < self._until

    @abstractmethod
    async def try_to_take(self) -> bool:
        """Take it if nobody has it; False: somebody has. Raises `LeaseUnknown`, and `ConfigError` where this process is
        not allowed to ask."""

    @abstractmethod
    async def renew(self) -> None:
        """Renew it once, if this process still has it. Raises as `try_to_take`."""

    @abstractmethod
    async def give_up(self) -> None:
        """Let another controller act at once."""

    @abstractmethod
    async def remove(self) -> None:
        """Remove the lease of a fleet that has ended."""

    async def keep(self) -> None:
        """Renew it, until somebody else has it or this process has been too late."""
        while self.is_held:
            await asyncio.sleep(RENEWED_S)
            try:
                await self.renew()
            except KvferryError as error:
                logger.warning("the right to act on the fleet could not be renewed: %s", error)
        logger.warning("another controller may look after this fleet now; this one does nothing any more")

    def _is_renewed(self, begun: float) -> None:
        """Note that the lease was renewed by a message that was sent at `begun`, on this process's clock."""
        self._until = begun + BELIEVED_S

    def _is_lost(self) -> None:
        self._until = float("-inf")
