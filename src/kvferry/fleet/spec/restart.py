"""Flags for processes that exit or hang without having been stopped."""

from __future__ import annotations

from kvferry.core.settings.bounds import CountOrZero, Seconds, SecondsOrZero
from kvferry.core.settings.model import Settings


class RestartPolicy(Settings, frozen=True, kw_only=True):
    """Reaction to processes that exit or hang without having been stopped."""

    max_restarts: CountOrZero = 5
    """How many times in a row an instance or the router is restarted, at growing intervals, after it has exited by
    itself. After that it is left, the others serve on, and everything ends once no instance is left that could answer.
    The count starts again once it has served for a minute; 0 means no restarts."""

    hang_timeout_s: SecondsOrZero = 60.0
    """Seconds that an instance or the router may leave GET /health unanswered before it is killed and restarted; 0
    waits forever."""

    start_timeout_s: Seconds = 600.0
    """Seconds that an instance or the router may take until it serves, before it is ended and started again: for large
    models, slow disks and busy machines. `start` in [failure] of a fleet's spec."""
