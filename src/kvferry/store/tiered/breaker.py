"""The circuit breaker of a tier: after a failure the tier is not used until a probe in the background succeeds.

Requests never test whether a tier works again; the probe does. A hung probe is abandoned after
`Breaker.probe_s`, and the next one follows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvferry.core.clock import doubling_waits
from kvferry.core.errors import KvferryError

logger = logging.getLogger(__name__)


class Breaker:
    """The breaker of one tier, on one event loop. Owns the task that probes the tier. `url`: for the log. `probe`:
    returns if the tier answers in time, and raises any exception otherwise."""

    probe_s = 10.0
    """Maximum seconds for one probe. A probe that takes less may still fail, because its answer came after the tier's
    deadline."""

    def __init__(
        self, url: str, probe: Callable[[], Awaitable[None]], first_pause_s: float = 0.25, max_pause_s: float = 2.0
    ) -> None:
        """Seconds between two probes: `first_pause_s`, doubled with each probe that fails, up to `max_pause_s`."""
        self._url, self._probe = url, probe
        self._first_pause_s, self._max_pause_s = first_pause_s, max_pause_s
        self._probing: asyncio.Task[None] | None = None
        self.num_failures = 0
        """Number of failures since the start."""

    @property
    def is_open(self) -> bool:
        """True if the tier is not used."""
        return self._probing is not None

    def open(self, reason: str) -> None:
        """Stop using the tier, and start to probe it."""
        self.num_failures += 1
        if self._probing is None:
            logger.warning(
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
        for pause_s in doubling_waits(self._first_pause_s, self._max_pause_s):
            await asyncio.sleep(pause_s)
            try:
                async with asyncio.timeout(self.probe_s):
                    await self._probe()
                break
            except (TimeoutError, KvferryError) as error:
                logger.debug("store %s: %s", self._url, error)
            except Exception:  # any error in a store's code counts as a failed probe
                logger.debug("store %s failed unexpectedly", self._url, exc_info=True)
        self._probing = None
        logger.warning("store %s is back", self._url)
