"""Lets vLLM's engine loop sleep while it steps for nothing.

vLLM keeps stepping as long as blocks of a finished request are held, which for a producer is until its lease ends. It
waits one millisecond between two such steps, and uses more than a core for nothing. A connector cannot wake the loop,
but it can hold it up, since the loop asks the scheduler side for a plan in each step. A request that arrives during a
pause waits for the end of the pause. Of several connectors in vLLM's MultiConnector each is asked for a plan: they
share one pause, which comes when none of them has work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

FIRST_S = 0.001
LONGEST_S = 0.02
NUM_EMPTY_STEPS = 2
"""Steps without work before the first pause: with asynchronous scheduling the results of as many are still to come."""


class IdlePause:
    """Pauses of one engine that grow from step to step, from `FIRST_S` to `longest_s`; 0: there are none. Used from
    vLLM's scheduler thread only."""

    def __init__(self, longest_s: float = LONGEST_S, sleep: Callable[[float], None] = time.sleep) -> None:
        self._longest_s, self._sleep = longest_s, sleep
        self._num_empty = 0
        self._users: set[str] = set()
        self._heard: dict[str, bool] = {}

    def user(self, name: str) -> PauseUser:
        """For one of the engine's connectors; there is no pause before all of them were heard of a step."""
        self._users.add(name)
        return PauseUser(self, name)

    def hear(self, name: str, *, has_work: bool) -> None:
        """What one of them says of this step. Sleeps where this step and those before had nothing to do."""
        if name in self._heard:
            self._heard.clear()  # of a step of which not all were asked
        self._heard[name] = has_work
        if self._heard.keys() >= self._users:
            is_work = any(self._heard.values())
            self._heard.clear()
            self._step(has_work=is_work)

    def _step(self, *, has_work: bool) -> None:
        if has_work or not self._longest_s:
            self._num_empty = 0
            return
        self._num_empty += 1
        doublings = self._num_empty - NUM_EMPTY_STEPS - 1
        if doublings >= 0:
            self._sleep(min(FIRST_S * 2 ** min(doublings, 16), self._longest_s))


@dataclass(frozen=True)
class PauseUser:
    """One connector's part in the pause of its engine."""

    pause: IdlePause
    name: str

    def step(self, *, has_work: bool) -> None:
        """Called in each step, last."""
        self.pause.hear(self.name, has_work=has_work)
