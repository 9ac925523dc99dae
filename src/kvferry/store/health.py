"""Whether a tier may be asked: after a failure it is avoided for a while, and then tried again.

The pause doubles with each failure and ends with the first answer. There is no thread and no timer: the first call
after the pause is the trial.
"""

from __future__ import annotations

from kvferry.core.clock import SYSTEM_CLOCK, Clock

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


class TierHealth:
    """The state of one tier. Used on one event loop."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self.num_failures = 0
        """Since the start."""
        self._pause_s = 0.0
        self._until = 0.0

    @property
    def is_good(self) -> bool:
        """Whether the last call succeeded."""
        return not self._pause_s

    @property
    def may_be_asked(self) -> bool:
        """Whether the tier works as far as is known, or its pause is over."""
        return self._clock.monotonic() >= self._until

    def failed(self) -> None:
        """A call raised an error or was late. Calls that fail during a pause do not lengthen it."""
        self.num_failures += 1
        if not self.may_be_asked:
            return
        self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * 2 or FIRST_PAUSE_S)
        self._until = self._clock.monotonic() + self._pause_s

    def answered(self) -> None:
        """A call succeeded: the pause ends."""
        self._pause_s = self._until = 0.0
