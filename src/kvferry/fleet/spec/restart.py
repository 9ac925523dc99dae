"""Flags for processes that exit or hang without having been stopped."""

from __future__ import annotations

from kvferry.core.settings.bounds import CountOrZero, Seconds, SecondsOrZero
from kvferry.core.settings.model import Settings


class RestartPolicy(Settings, frozen=True, kw_only=True):
    """Reaction to processes that exit or hang without having been stopped."""

    max_restarts: CountOrZero = 5
    """Number of times in a row that an instance or the router is restarted, at growing intervals, after it has exited
    by itself. After that it is not restarted, the others continue to serve, and everything ends once no instance that
    could answer is left. The count starts again once it has served for a minute; 0: no restarts."""

    hang_timeout_s: SecondsOrZero = 60.0
    """Seconds without an answer to GET /health after which an instance or the router is killed and restarted; 0:
    never."""

    start_timeout_s: Seconds = 600.0
    """Maximum seconds until an instance or the router serves; after that, it is ended and started again. Set more for
    large models, slow disks and busy machines. `start` in [failure] of a fleet's spec."""
