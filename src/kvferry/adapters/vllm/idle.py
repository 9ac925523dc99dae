"""Lets vLLM's engine loop sleep while it is idle, or only waits for loads.

vLLM keeps stepping as long as blocks of a finished request are held, which on a producer is until the lease ends. It
waits one millisecond between two such steps, and uses more than one core. A connector cannot wake the loop, but it can
delay it, since the loop calls the scheduler side for a plan in each step. A request that arrives during a pause waits
for its end. In vLLM's MultiConnector, each connector makes a plan: they share one pause, which comes when none of them
has work.

While all requests wait for loads, the loop steps as well, and on a machine with few cores these steps take CPU time
from the load. Then the workers delay the loop: such a step lasts until they have a report (`StepMetadata.wait_s`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.core.clock import doubling_waits

NUM_EMPTY_STEPS = 2
"""Number of steps without work before the first pause: with asynchronous scheduling, this many steps may still wait for
their results."""


class IdlePause:
    """The pauses of one engine. Their length doubles from `first_pause_s` up to `max_s` seconds; there are none if
    `max_s` is 0. Used from vLLM's scheduler thread only."""

    first_pause_s = 0.001

    def __init__(self, max_s: float = 0.02, sleep: Callable[[float], None] = time.sleep) -> None:
        self.max_s, self._sleep = max_s, sleep
        self._num_idle_steps, self._pauses = 0, doubling_waits(self.first_pause_s, max_s)
        self._users: set[str] = set()
        self._reports: dict[str, bool] = {}

    def user(self, name: str) -> ConnectorPause:
        """Register one of the engine's connectors; there is no pause before all of them have reported a step."""
        self._users.add(name)
        return ConnectorPause(self, name)

    def report(self, name: str, *, has_work: bool) -> None:
        """Report a connector's step. Sleeps when all have reported, if this step and the last ones had no work."""
        if name in self._reports:
            self._reports.clear()  # left over from a step in which not all were called
        self._reports[name] = has_work
        if self._reports.keys() >= self._users:
            any_work = any(self._reports.values())
            self._reports.clear()
            self._step(has_work=any_work)

    def _step(self, *, has_work: bool) -> None:
        if has_work or not self.max_s:
            self._num_idle_steps, self._pauses = 0, doubling_waits(self.first_pause_s, self.max_s)
            return
        self._num_idle_steps += 1
        if self._num_idle_steps > NUM_EMPTY_STEPS:
            self._sleep(next(self._pauses))


@dataclass(frozen=True)
class ConnectorPause:
    """One connector's share of the pause."""

    pause: IdlePause
    name: str

    @property
    def max_s(self) -> float:
        """Maximum seconds of a pause; 0: no pauses."""
        return self.pause.max_s

    def step(self, *, has_work: bool) -> None:
        """Report a step of this connector. Call it at the end of the step: it may sleep."""
        self.pause.report(self.name, has_work=has_work)
