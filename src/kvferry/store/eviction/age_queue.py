"""A queue in the order of time whose first and last items can be read, and from which any item can be removed."""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar

ALLOWED_STALE = 64


class Timed(Protocol):
    """Something with a start time, which does not change while it is in a queue."""

    started: float


T = TypeVar("T", bound=Timed)


class AgeQueue(Generic[T]):
    """Two heaps; removed items are skipped when they come up. Every operation takes amortized O(log n)."""

    def __init__(self) -> None:
        self._numbers: dict[T, int] = {}
        self._next = 0
        self._oldest: list[tuple[float, int, T]] = []
        self._newest: list[tuple[float, int, T]] = []

    def add(self, item: T) -> None:
        """Add an item that is not in the queue."""
        self._next += 1
        self._numbers[item] = self._next
        heapq.heappush(self._oldest, (item.started, self._next, item))
        heapq.heappush(self._newest, (-item.started, -self._next, item))

    def discard(self, item: T) -> None:
        """Remove an item, if it is in the queue."""
        self._numbers.pop(item, None)
        allowed = 2 * len(self._numbers) + ALLOWED_STALE
        if len(self._oldest) > allowed:
            self._oldest = self._without_stale(self._oldest)
        if len(self._newest) > allowed:
            self._newest = self._without_stale(self._newest)

    def oldest(self) -> T:
        """The item with the earliest start. The queue must not be empty."""
        return self._top(self._oldest)

    def newest(self) -> T:
        """The item with the latest start. The queue must not be empty."""
        return self._top(self._newest)

    def __contains__(self, item: T) -> bool:
        return item in self._numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def _top(self, heap: list[tuple[float, int, T]]) -> T:
        while self._numbers.get(heap[0][2]) != abs(heap[0][1]):
            heapq.heappop(heap)
        return heap[0][2]

    def _without_stale(self, heap: list[tuple[float, int, T]]) -> list[tuple[float, int, T]]:
        left = [entry for entry in heap if self._numbers.get(entry[2]) == abs(entry[1])]
        heapq.heapify(left)
        return left
