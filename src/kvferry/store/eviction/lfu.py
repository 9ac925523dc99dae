"""Least frequently used: among the blocks with the fewest uses since they were inserted, the least recently used
first."""

from __future__ import annotations

from collections import OrderedDict

from kvferry.store.eviction.base import BlockKey, EvictionPolicy


class Lfu(EvictionPolicy):
    """A queue for each number of uses; every operation takes constant time (Shah, Mitra and Matani, 2010)."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._uses: dict[BlockKey, int] = {}
        self._queues: dict[int, OrderedDict[BlockKey, None]] = {}
        self._min_uses = 0
        """The smallest number of uses of a block in the order."""

    def _insert(self, key: BlockKey, now: float, parent: BlockKey | None) -> None:
        self._link(key, 1)

    def _access(self, key: BlockKey, now: float) -> None:
        uses = self._uses[key]
        self._unlink(key)
        self._link(key, uses + 1)

    def _remove(self, key: BlockKey) -> None:
        self._unlink(key)

    def _victim(self, now: float) -> BlockKey | None:
        if not self._uses:
            return None
        while self._min_uses not in self._queues:  # amortized: at most one iteration for each counted use
            self._min_uses += 1
        key = next(iter(self._queues[self._min_uses]))
        self._unlink(key)
        return key

    def _restore(self, key: BlockKey, now: float) -> None:
        self._link(key, 1)

    def _orders(self, key: BlockKey) -> bool:
        return key in self._uses

    def _num_ordered(self) -> int:
        return len(self._uses)

    def _link(self, key: BlockKey, uses: int) -> None:
        self._uses[key] = uses
        self._queues.setdefault(uses, OrderedDict())[key] = None
        self._min_uses = min(self._min_uses, uses)

    def _unlink(self, key: BlockKey) -> None:
        uses = self._uses.pop(key)
        queue = self._queues[uses]
        del queue[key]
        if not queue:
            del self._queues[uses]
