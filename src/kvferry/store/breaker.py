"""Whether a tier is used. After a failure it is left alone until a probe in the background succeeds.

Requests never test whether a tier works again; the probe does. One that hangs is still awaited while others follow, so
that a server which goes on, or a disk that returns, is noticed at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvferry.core.errors import KvferryError

log = logging.getLogger(__name__)

FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 2.0
"""Seconds between two probes; the pause doubles with each that fails."""
PROBE_S = 10.0
"""Most seconds for one probe; whether it was too late is known only afterwards."""


class Breaker:
    """The breaker of one tier, on one event loop. Owns the task that probes the tier. `url` is for the log. `probe`
    returns if the tier answers as it should, and raises anything if it does not."""

    def __init__(self, url: str, probe: Callable[[], Awaitable[None]]) -> None:
        self._url, self._probe = url, probe
        self._probing: asyncio.Task[None] | None = None
        self.num_failures = 0
        """Failures since the start."""

    @property
    def is_open(self) -> bool:
        """Whether the tier is left alone."""
        return self._probing is not None

    def open(self, reason: str) -> None:
        """Leave the tier alone from now on."""
        self.num_failures += 1
        if self._probing is None:
            log.warning(
                "store %s cannot be used: %s; prompts are computed, or found in other tiers, while it is tried again",
                *(self._url, reason),
            )
            self._probing = asyncio.create_task(self._probe_until_it_answers())

    async def close(self) -> None:
        """End the task that probes the tier."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait({self._probing}, timeout=1.0)

    async def _probe_until_it_answers(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(MAX_PAUSE_S, 2 * pause_s)
            try:
                async with asyncio.timeout(PROBE_S):
                    await self._probe()
                break
            except (TimeoutError, KvferryError) as error:
                log.debug("store %s: %s", self._url, error)
            except Exception:  # the task's outermost edge: a mistake in a store's code may pass
                log.debug("store %s failed unexpectedly", self._url, exc_info=True)
        self._probing = None
        log.warning("store %s is back", self._url)
