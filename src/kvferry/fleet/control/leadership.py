"""Leadership: the right to act on a fleet, which one controller has at a time.

one machine       a lock on a file (`file_leadership`)
all machines      an actor of Ray, or a Lease of Kubernetes: both are renewed in time (`TimedLeadership`)
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
"""Seconds between two renewals; seconds for which the leader leads after a renewal; seconds for which others wait for
the next renewal."""


class LeadershipUnknown(KvferryError):
    """The system that stores the leadership does not answer."""


class Leadership(ABC):
    """One controller's view of the leadership of its fleet."""

    holder = ""
    """Identity of the leader at the last look-up; empty: none, or not known."""

    @property
    @abstractmethod
    def is_held(self) -> bool:
        """True if this process may act now."""

    @abstractmethod
    async def try_acquire(self) -> bool:
        """Become the leader if there is none. False: another process leads. Raises `LeadershipUnknown`, and
        `ConfigError` if this process has no permission."""

    @abstractmethod
    async def heartbeat(self) -> None:
        """Renew it until it is released or lost."""

    @abstractmethod
    async def release(self) -> None:
        """Release the leadership, so that another controller may lead at once."""

    @abstractmethod
    async def remove(self) -> None:
        """Release the leadership, and remove its storage, because the fleet has ended."""


class TimedLeadership(Leadership):
    """A leadership that ends if it is not renewed.

    The holder counts it for a shorter time than others wait before they take it. The holder counts from the time before
    the renewal was sent, by a clock that also runs while the machine sleeps, so that a process that was stopped knows
    that it is too late. Clocks of two machines are never compared. `clock`: seconds since the start of the machine.
    """

    def __init__(self, clock: Callable[[], float] = boot_time) -> None:
        self._clock = clock
        self._until = float("-inf")
        self._heartbeat: asyncio.Task[None] | None = None

    @property
    def is_held(self) -> bool:
        """True if this process may act now."""
        return self._clock() < self._until

    @abstractmethod
    async def renew(self) -> None:
        """Renew the leadership once, if this process still has it. Raises the errors of `try_acquire`."""

    async def heartbeat(self) -> None:
        """Renew it until it is released, another controller has it, or this process has been too late."""
        self._heartbeat = asyncio.current_task()
        while self.is_held:
            await asyncio.sleep(RENEWED_S)
            try:
                await self.renew()
            except KvferryError as error:
                logger.warning("the right to act on the fleet could not be renewed: %s", error)
        logger.warning("another controller may manage this fleet now; this one does nothing any more")

    def _renewed(self, sent_at: float) -> None:
        """Record a renewal by a message that was sent at `sent_at`, on this process's clock."""
        self._until = sent_at + BELIEVED_S

    def _lost(self) -> None:
        self._until = float("-inf")

    async def _stop(self) -> None:
        """Record that this process no longer leads, and end the heartbeat, which could otherwise renew the
        leadership."""
        self._lost()
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            await asyncio.wait([self._heartbeat])
            self._heartbeat = None
