"""Whether one tier can be asked: after a failure it is left alone for a while, and then tried again.

Owns nothing but that. The pause doubles with each failure and ends with the first answer; no thread and no timer is
needed, since the next call after the pause is the trial.
"""

from __future__ import annotations

from kvferry.core.clock import SYSTEM_CLOCK, Clock

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


class TierHealth:
    """Of one tier, on one event loop."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self.num_failures = 0
        """Since the beginning."""
        self._pause_s = 0.0
        self._until = 0.0

    @property
    def is_good(self) -> bool:
        """Whether the last answer was one."""
        return not self._pause_s

    @property
    def may_be_asked(self) -> bool:
        """Whether it is good, or its pause is over."""
        return self._clock.monotonic() >= self._until

    def failed(self) -> None:
        """It raised, or did not answer in time. Calls that fail together are one failure."""
        self.num_failures += 1
        if not self.may_be_asked:
            return
        self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * 2 or FIRST_PAUSE_S)
        self._until = self._clock.monotonic() + self._pause_s

    def answered(self) -> None:
        """It is well."""
        self._pause_s = self._until = 0.0
