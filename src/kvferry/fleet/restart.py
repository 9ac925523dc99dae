"""When a process that exited by itself is restarted, and when it is given up.

Owns, for one member of a fleet, how often it has failed in a row. Knows no processes and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.settings.bounds import CountOrZero, SecondsOrZero, check_bounds

FIRST_WAIT_S = 0.5
MOST_WAIT_S = 30.0
"""Bounds of the wait before a restart, which doubles each time."""

SETTLED_S = 60.0
"""A process that has served for this many seconds has recovered: its next failure counts as the first."""


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """What happens when processes exit or hang although nobody has stopped them."""

    max_restarts: CountOrZero = 5
    """How many times in a row an instance or the router is restarted, at growing intervals, after it has exited by
    itself. After that, everything is stopped. The count starts again once it has served for a minute; 0 means no
    restarts."""

    hang_timeout_s: SecondsOrZero = 60.0
    """Seconds that an instance or the router may leave GET /health unanswered before it is killed and restarted; 0
    waits forever."""

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True)
class Again:
    """Restart it after `wait_s`; it is the `number`-th time in a row."""

    wait_s: float
    number: int


@dataclass(frozen=True)
class GiveUp:
    """The decision not to restart a process again, after `number` restarts in a row."""

    number: int


class Restarts:
    """The failures of one member."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy, self._in_a_row = policy, 0

    def failed(self, served_s: float) -> Again | GiveUp:
        """The process exited by itself after it had served for `served_s` seconds; 0 if it never served."""
        if served_s >= SETTLED_S:
            self._in_a_row = 0
        if self._in_a_row >= self._policy.max_restarts:
            return GiveUp(self._in_a_row)
        wait_s = min(FIRST_WAIT_S * 2.0**self._in_a_row, MOST_WAIT_S)
        self._in_a_row += 1
        return Again(wait_s, self._in_a_row)
