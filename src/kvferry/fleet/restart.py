"""When a process that ended by itself is started again, and when no more. Pure.

Owns, for one place in a fleet, how often it has failed in a row. Does not know processes.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.errors import ConfigError

FIRST_WAIT_S = 0.5
MOST_WAIT_S = 30.0
"""Bounds of the wait before a start; it doubles with each."""

SETTLED_S = 60.0
"""Who has served so long has recovered: its next failure is a first one."""


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """What happens when processes end, or hang, without having been asked to end."""

    max_restarts: int = 5
    """How many times in a row an instance or the router is restarted, at growing intervals, after it has exited by
    itself. After that, everything is stopped. The count starts again once it has served for a minute; 0 means no
    restarts."""

    hang_timeout_s: float = 60.0
    """Seconds that an instance or the router may leave GET /health unanswered before it is killed and restarted; 0
    waits forever."""

    def __post_init__(self) -> None:
        for name in ("max_restarts", "hang_timeout_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"--{name.replace('_', '-')} must not be negative, got {getattr(self, name)}")


@dataclass(frozen=True)
class Again:
    """Start it again after `wait_s`; it is the `number`-th time in a row."""

    wait_s: float
    number: int


@dataclass(frozen=True)
class GiveUp:
    """It has been started again `number` times in a row, and is not worth another."""

    number: int


class Restarts:
    """The failures of one place."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy, self._in_a_row = policy, 0

    def failed(self, served_s: float) -> Again | GiveUp:
        """The process ended by itself after it had served for `served_s`; 0 for one that never did."""
        if served_s >= SETTLED_S:
            self._in_a_row = 0
        if self._in_a_row >= self._policy.max_restarts:
            return GiveUp(self._in_a_row)
        wait_s = min(FIRST_WAIT_S * 2.0**self._in_a_row, MOST_WAIT_S)
        self._in_a_row += 1
        return Again(wait_s, self._in_a_row)
