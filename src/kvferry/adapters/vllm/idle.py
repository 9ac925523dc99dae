"""Lets vLLM's engine loop sleep while it steps for nothing.

vLLM keeps stepping as long as blocks of a finished request are held, which for a producer is until its lease ends. It
waits one millisecond between two such steps, and uses more than a core for nothing. A connector cannot wake the loop,
but it can hold it up, since the loop asks the scheduler side for a plan in each step. A request that arrives during a
pause waits for the end of the pause.
"""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_S = 0.001
LONGEST_S = 0.02
NUM_EMPTY_STEPS = 2
"""Steps without work before the first pause: with asynchronous scheduling the results of as many are still to come."""


class IdlePause:
    """Pauses that grow from step to step, from `FIRST_S` to `longest_s`; 0: there are none. Used from vLLM's scheduler
    thread only."""

    def __init__(self, longest_s: float = LONGEST_S, sleep: Callable[[float], None] = time.sleep) -> None:
        self._longest_s, self._sleep = longest_s, sleep
        self._num_empty = 0

    def step(self, *, has_work: bool) -> None:
        """Called in each step, last. Sleeps where this step and those before had nothing to do."""
        if has_work or not self._longest_s:
            self._num_empty = 0
            return
        self._num_empty += 1
        doublings = self._num_empty - NUM_EMPTY_STEPS - 1
        if doublings >= 0:
            self._sleep(min(FIRST_S * 2 ** min(doublings, 16), self._longest_s))
