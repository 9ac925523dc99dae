"""Least recently used: the block whose last use is the longest ago first."""

from __future__ import annotations

from collections import OrderedDict

from kvferry.store.eviction.base import BlockKey, EvictionPolicy


class Lru(EvictionPolicy):
    """One queue; a use moves a block to its end."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._queue: OrderedDict[BlockKey, None] = OrderedDict()

    def _insert(self, key: BlockKey, now: float, parent: BlockKey | None) -> None:
        self._queue[key] = None

    def _access(self, key: BlockKey, now: float) -> None:
        self._queue.move_to_end(key)

    def _remove(self, key: BlockKey) -> None:
        del self._queue[key]

    def _victim(self, now: float) -> BlockKey | None:
        return self._queue.popitem(last=False)[0] if self._queue else None

    def _restore(self, key: BlockKey, now: float) -> None:
        self._queue[key] = None

    def _orders(self, key: BlockKey) -> bool:
        return key in self._queue

    def _num_ordered(self) -> int:
        return len(self._queue)
