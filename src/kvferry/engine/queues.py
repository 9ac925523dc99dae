"""Which sequences wait for their turn, which run, and whose deadline is next.

Owns both queues, and with them the statuses WAITING and RUNNING. It does not know blocks, budgets or connectors; a
sequence that waits for its KV is in neither queue.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from typing import Generic, TypeVar

from kvferry.core.errors import LeakError
from kvferry.engine.sequence import Sequence, Status

Key = TypeVar("Key", tuple[int, int], float)


class RemovableHeap(Generic[Key]):
    """Sequences by a key, the lowest first. To remove one takes no search: its entry is left behind, and dropped when
    it comes to the top, or with all others when most entries have been left behind."""

    MIN_LEFT_BEHIND = 64
    """Number of entries that may always be left behind."""

    def __init__(self) -> None:
        self._entries: list[tuple[Key, int]] = []
        """Keys, and `Sequence.order`: what is left behind keeps no sequence in memory."""
        self._members: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._members)

    @property
    def num_entries(self) -> int:
        """Number of entries in memory, those of removed sequences included."""
        return len(self._entries)

    def push(self, key: Key, sequence: Sequence) -> None:
        """Add a sequence that is not in it. Of equal keys, the request that came first is first."""
        self._members[sequence.order] = sequence
        heapq.heappush(self._entries, (key, sequence.order))

    def pop(self) -> Sequence:
        """Take out the first sequence. There must be one."""
        while True:
            _, order = heapq.heappop(self._entries)
            if (sequence := self._members.pop(order, None)) is not None:
                return sequence

    def first_key(self) -> Key | None:
        """The lowest key; None if it is empty."""
        while self._entries and self._entries[0][1] not in self._members:
            heapq.heappop(self._entries)
        return self._entries[0][0] if self._entries else None

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence for good, if it is there: it must not be pushed again."""
        if self._members.pop(sequence.order, None) is None:
            return
        if len(self._entries) - len(self._members) > len(self._members) + self.MIN_LEFT_BEHIND:
            self._entries = [entry for entry in self._entries if entry[1] in self._members]
            heapq.heapify(self._entries)


class SequenceQueues:
    """The most urgent sequence (`Sequence.rank`) comes first in both queues."""

    def __init__(self) -> None:
        self._waiting = RemovableHeap[tuple[int, int]]()
        self._deadlines = RemovableHeap[float]()
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
        return self._waiting.pop()

    def put_back(self, sequences: Iterable[Sequence]) -> None:
        """Put sequences back that `next_waiting` took out and that still wait."""
        for sequence in sequences:
            self._waiting.push(sequence.rank, sequence)

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
        """Take a sequence that is about to end out of the queue that it is in, if any, and forget its deadline."""
        self._deadlines.remove(sequence)
        match sequence.status:
            case Status.RUNNING:
                self.stop(sequence)
            case Status.WAITING:
                self._waiting.remove(sequence)

    # Deadlines.

    def expect(self, sequence: Sequence, deadline: float) -> None:
        """Note until when (s, monotonic) a new sequence may take, wherever it is."""
        self._deadlines.push(deadline, sequence)

    def take_expired(self, now: float) -> list[Sequence]:
        """Sequences whose deadline has passed, each once."""
        expired: list[Sequence] = []
        while (deadline := self._deadlines.first_key()) is not None and deadline <= now:
            expired.append(self._deadlines.pop())
        return expired

    def check(self) -> None:
        """Raise `LeakError` if a queue is not empty. To be called when no request is left."""
        if self._waiting or self._running or self._deadlines:
            raise LeakError("the queues hold sequences that have ended")
