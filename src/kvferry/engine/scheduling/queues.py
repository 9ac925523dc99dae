"""The waiting and the running sequences, and their deadlines.

Owns both queues, and with them the statuses WAITING and RUNNING. It does not know blocks, budgets or connectors; a
sequence that waits for its KV is in neither queue.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from typing import Generic, TypeVar

from kvferry.core.errors import LeakError
from kvferry.engine.scheduling.sequence import Sequence, Status

Key = TypeVar("Key", tuple[int, int], float)


class RemovableHeap(Generic[Key]):
    """Sequences by a key, the lowest first. Removal needs no search: the entry becomes stale. A stale entry is dropped
    when it comes to the top, or together with all stale entries when most are stale."""

    MIN_STALE = 64
    """Number of stale entries that are always allowed."""

    def __init__(self) -> None:
        self._entries: list[tuple[Key, int]] = []
        """Keys, and `Sequence.order`: stale entries keep no sequence in memory."""
        self._members: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._members)

    @property
    def num_entries(self) -> int:
        """Number of entries in memory, stale ones included."""
        return len(self._entries)

    def push(self, key: Key, sequence: Sequence) -> None:
        """Add a sequence that is not in the heap. For equal keys, the older request is first."""
        self._members[sequence.order] = sequence
        heapq.heappush(self._entries, (key, sequence.order))

    def pop(self) -> Sequence:
        """Remove and return the first sequence. There must be one."""
        while True:
            _, order = heapq.heappop(self._entries)
            if (sequence := self._members.pop(order, None)) is not None:
                return sequence

    def first_key(self) -> Key | None:
        """The lowest key; None: the heap is empty."""
        while self._entries and self._entries[0][1] not in self._members:
            heapq.heappop(self._entries)
        return self._entries[0][0] if self._entries else None

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence if it is in the heap; it must not be pushed again."""
        if self._members.pop(sequence.order, None) is None:
            return
        if len(self._entries) - len(self._members) > len(self._members) + self.MIN_STALE:
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
        """Number of waiting sequences."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Number of running sequences."""
        return len(self._running)

    def enqueue(self, sequence: Sequence) -> None:
        """Append the sequence to the waiting queue."""
        sequence.status = Status.WAITING
        self.requeue([sequence])

    def next_waiting(self) -> Sequence:
        """Remove and return the most urgent waiting sequence. There must be one."""
        return self._waiting.pop()

    def requeue(self, sequences: Iterable[Sequence]) -> None:
        """Put sequences from `next_waiting` that still wait back into the queue."""
        for sequence in sequences:
            self._waiting.push(sequence.rank, sequence)

    def start(self, sequence: Sequence) -> None:
        """Add a sequence to the running ones. It must be in neither queue."""
        sequence.status = Status.RUNNING
        self._running.append(sequence)

    def running(self) -> list[Sequence]:
        """A copy of the running sequences, the most urgent first."""
        self._running.sort(key=lambda sequence: sequence.rank)
        return list(self._running)

    def select_victim(self, scheduled: Collection[str]) -> Sequence:
        """The least urgent running sequence, to preempt it. Excludes the request ids in `scheduled` and sequences with
        a load in progress. There must be one."""
        return max(
            (
                sequence
                for sequence in self._running
                if sequence.request_id not in scheduled and not sequence.has_load_in_progress
            ),
            key=lambda sequence: sequence.rank,
        )

    def stop(self, sequence: Sequence) -> None:
        """Remove a sequence from the running ones, if it runs. The caller sets its status."""
        self._running = [other for other in self._running if other is not sequence]

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that is about to end from its queue, if any, and its deadline."""
        self._deadlines.remove(sequence)
        match sequence.status:
            case Status.RUNNING:
                self.stop(sequence)
            case Status.WAITING:
                self._waiting.remove(sequence)

    # Deadlines.

    def add_deadline(self, sequence: Sequence, deadline: float) -> None:
        """Set the deadline of a new sequence, in seconds of the monotonic clock. It applies in any status."""
        self._deadlines.push(deadline, sequence)

    def take_expired(self, now: float) -> list[Sequence]:
        """Remove and return the sequences whose deadline has passed."""
        expired: list[Sequence] = []
        while (deadline := self._deadlines.first_key()) is not None and deadline <= now:
            expired.append(self._deadlines.pop())
        return expired

    def check(self) -> None:
        """Raise `LeakError` if a queue is not empty. Call it when no request is left."""
        if self._waiting or self._running or self._deadlines:
            raise LeakError("the queues hold sequences that have ended")
