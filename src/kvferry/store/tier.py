"""One store as a tier of a list: opened when it is first used, asked within its deadline, avoided while it fails.

A tier never raises for what its store does: a call that fails, or has no answer by the deadline, gives the caller's
default instead (nothing found, nothing stored), and `TierHealth` decides when the tier is asked again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from kvferry.core.errors import KvferryError
from kvferry.store.base import KVStore
from kvferry.store.health import TierHealth

log = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass
class Tier:
    """A store with its deadline (seconds for one call) and its health. Used on one event loop."""

    name: str
    """Its number in the list, from 0, and its scheme: `1 (file)`."""
    store: KVStore
    deadline_s: float
    health: TierHealth = field(default_factory=TierHealth)
    opening: asyncio.Task[None] | None = None
    """The attempt to open the store that is under way, or the last one. Callers wait for it together, and it continues
    when they give up."""
    is_open: bool = False
    num_late: int = 0
    """Calls that had no answer by the deadline."""

    async def open(self) -> None:
        """Open the store unless it is open. A call while an attempt is under way waits for that attempt, so that one
        that hangs is not repeated beside itself. Raises what `KVStore.open` raises."""
        if self.is_open:
            return
        if self.opening is None or self.opening.done():
            self.opening = asyncio.create_task(self._open())
            self.opening.add_done_callback(_retrieve_error)
        await asyncio.shield(self.opening)

    async def _open(self) -> None:
        await self.store.open()
        self.is_open = True

    async def close(self) -> None:
        """Cancel an attempt to open, and close the store. Raises what `KVStore.close` raises."""
        if self.opening is not None and not self.opening.done():
            self.opening.cancel()
            await asyncio.wait({self.opening}, timeout=self.deadline_s / 2)
        await self.store.close()

    async def ask(self, call: Callable[[], Awaitable[Result]], otherwise: Result) -> Result:
        """The result of a call of the store's, or `otherwise` if the tier is being avoided, fails, or is late.

        At the deadline the call is cancelled and the tier counts as failed; this returns only when the call has really
        ended, since a thread may still be using the caller's memory.
        """
        if not self.health.may_be_asked:
            return otherwise
        late = _LateTimer(self)
        try:
            async with asyncio.timeout(self.deadline_s):
                await self.open()
                result = await call()
        except TimeoutError:
            late.expire()
            return otherwise
        except KvferryError as error:
            self.failed(str(error))
            return otherwise
        except Exception as error:
            log.exception("store tier %s failed unexpectedly", self.name)
            self.failed(repr(error))
            return otherwise
        finally:
            late.cancel()
        if not self.health.is_good:
            log.info("store tier %s is back", self.name)
        self.health.answered()
        return result

    def failed(self, reason: str) -> None:
        """Do not ask the tier for a while (`TierHealth`); the first failure in a row is logged."""
        if self.health.is_good:
            log.warning("store tier %s is left alone for a while: %s", self.name, reason)
        self.health.failed()


def _retrieve_error(task: asyncio.Task[None]) -> None:
    """Retrieve a task's exception, so that asyncio does not log it as never retrieved; whoever still waits gets it."""
    if not task.cancelled():
        task.exception()


class _LateTimer:
    """Marks a tier as failed at the moment its deadline passes, even if the call itself ends later."""

    def __init__(self, tier: Tier) -> None:
        self._tier, self._expired = tier, False
        self._timer = asyncio.get_running_loop().call_later(tier.deadline_s, self.expire)

    def expire(self) -> None:
        """Count the call as late, once."""
        if not self._expired:
            self._expired = True
            self._tier.num_late += 1
            self._tier.failed(f"did not answer within {self._tier.deadline_s:g} s")

    def cancel(self) -> None:
        """Stop the timer: the call has ended."""
        self._timer.cancel()
