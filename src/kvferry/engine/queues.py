"""Which sequences wait for their turn, and which run.

Owns both queues, and with them the statuses WAITING and RUNNING. It does not know blocks, budgets or connectors; a
sequence that waits for its KV is in neither queue.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable

from kvferry.core.errors import LeakError
from kvferry.engine.sequence import Sequence, Status


class SequenceQueues:
    """The most urgent sequence (`Sequence.rank`) comes first in both queues."""

    def __init__(self) -> None:
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []
        self._running: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their turn."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Number of sequences that run."""
        return len(self._running)

    def enqueue(self, sequence: Sequence) -> None:
        """Append the sequence to the queue of those that wait to be scheduled."""
        sequence.status = Status.WAITING
        self.put_back([sequence])

    def next_waiting(self) -> Sequence:
        """Take the most urgent waiting sequence out of its queue. There must be one."""
        return heapq.heappop(self._waiting)[1]

    def put_back(self, sequences: Iterable[Sequence]) -> None:
        """Put sequences back that `next_waiting` took out and that still wait."""
        for sequence in sequences:
            heapq.heappush(self._waiting, (sequence.rank, sequence))

    def start(self, sequence: Sequence) -> None:
        """Add it to the running sequences. It must be in neither queue."""
        sequence.status = Status.RUNNING
        self._running.append(sequence)

    def running(self) -> list[Sequence]:
        """A copy of the running sequences, the most urgent first."""
        self._running.sort(key=lambda sequence: sequence.rank)
        return list(self._running)

    def least_urgent(self, scheduled: Collection[str]) -> Sequence:
        """The running sequence to preempt: not one of the request ids in `scheduled`, nor one that a load writes to.
        There must be one."""
        return max(
            (one for one in self._running if one.request_id not in scheduled and not one.is_written_to),
            key=lambda one: one.rank,
        )

    def stop(self, sequence: Sequence) -> None:
        """Take it out of the running sequences, if it is one of them. The caller sets its status."""
        self._running = [other for other in self._running if other is not sequence]

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence that is about to end out of the queue that it is in, if any."""
        match sequence.status:
            case Status.RUNNING:
                self.stop(sequence)
            case Status.WAITING:
                self._waiting = [entry for entry in self._waiting if entry[1] is not sequence]
                heapq.heapify(self._waiting)

    def check(self) -> None:
        """Raise `LeakError` if a queue is not empty. To be called when no request is left."""
        if self._waiting or self._running:
            raise LeakError("the queues hold sequences that have ended")
