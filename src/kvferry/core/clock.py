"""Time as an object, so that tests and simulations can control it.

No other module of kvferry reads the machine's clock: classes with deadlines, ages or time stamps take a `Clock`.
`SYSTEM_CLOCK` is the default, and is used where the wait itself is the machine's (a lock between processes, the exit of
a child). Deadlines for asyncio are on the running loop's clock (`loop.time()`), because asyncio compares
them with it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Clock(Protocol):
    """The source of deadlines and time stamps."""

    def monotonic(self) -> float:
        """Seconds that never go back, for deadlines within this process."""

    def wall(self) -> float:
        """Seconds since the epoch, for time stamps that are compared between processes."""


class SystemClock:
    """The machine's own time. Its attributes are the functions of `time` themselves: a router calls them some twenty
    times for a request."""

    __slots__ = ("monotonic", "wall")

    def __init__(self) -> None:
        self.monotonic, self.wall = time.monotonic, time.time


def boot_time() -> float:
    """Seconds since the machine was started, including time asleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


_SYSTEM = SystemClock()
SYSTEM_CLOCK: Clock = _SYSTEM
"""The machine's own time."""


@contextmanager
def simulated_time(clock: Clock) -> Iterator[None]:
    """`SYSTEM_CLOCK` has the time of `clock` while the body runs. For a process that runs nothing but a simulation."""
    _SYSTEM.monotonic, _SYSTEM.wall = clock.monotonic, clock.wall
    try:
        yield
    finally:
        _SYSTEM.monotonic, _SYSTEM.wall = time.monotonic, time.time


class ManualClock:
    """Time that moves only when `advance` is called, for tests and simulations."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


def doubling_waits(first_wait_s: float, max_s: float) -> Iterator[float]:
    """Seconds to wait before each further attempt, without end: each time twice as long, at most `max_s`."""
    wait_s = first_wait_s
    while True:
        yield wait_s
        wait_s = min(2 * wait_s, max_s)
