"""Time, as an object, so that tests and simulations can own it.

Nothing else in kvferry reads the machine's clock: what has deadlines, ages or stamps of its own takes a `Clock`.
`SYSTEM_CLOCK` is the default, and what is used where the wait itself is the machine's (a lock between processes, the
exit of a child). Deadlines that are given to asyncio are on the running loop's clock (`loop.time()`), because asyncio
compares them with it.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where every deadline and every stamp comes from."""

    def monotonic(self) -> float:
        """Seconds that never go back; for deadlines within this process."""

    def wall(self) -> float:
        """Seconds since the epoch; for stamps compared between processes."""


class SystemClock:
    """The machine's own time."""

    def monotonic(self) -> float:
        """`time.monotonic`."""
        return time.monotonic()

    def wall(self) -> float:
        """`time.time`."""
        return time.time()


SYSTEM_CLOCK: Clock = SystemClock()
"""The machine's own time, for all who are not given another clock."""


class ManualClock:
    """Time that moves only when told to; for tests and the simulator."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def advance(self, seconds: float) -> None:
        """Move on by `seconds`."""
        self.now += seconds

    def monotonic(self) -> float:
        """The time it was set to."""
        return self.now

    def wall(self) -> float:
        """The time it was set to."""
        return self.now
