"""S3-FIFO (Yang, Zhang, Qiu, Yue and Vigfusson, SOSP 2023).

New blocks pass through a small queue, and only those that are used meanwhile, or again soon afterwards, get into the
main one. Blocks that are used once are therefore evicted quickly, and a use only increments a counter.
"""

from __future__ import annotations

from collections import OrderedDict

from kvferry.store.eviction.base import BlockKey, EvictionPolicy

SMALL_SHARE = 0.1


class S3Fifo(EvictionPolicy):
    """The small and the main queue, with each block's uses (0 to 3), and ghosts: names of blocks that the small queue
    evicted."""

    max_uses = 3

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small: OrderedDict[BlockKey, int] = OrderedDict()
        self._main: OrderedDict[BlockKey, int] = OrderedDict()
        self._ghosts: OrderedDict[BlockKey, None] = OrderedDict()
        self._small_target = max(1, int(capacity * SMALL_SHARE))

    def _insert(self, key: BlockKey, now: float, parent: BlockKey | None) -> None:
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def _access(self, key: BlockKey, now: float) -> None:
        queue = self._small if key in self._small else self._main
        queue[key] = min(queue[key] + 1, self.max_uses)

    def _remove(self, key: BlockKey) -> None:
        (self._small if key in self._small else self._main).pop(key)

    def _victim(self, now: float) -> BlockKey | None:
        while self._small or self._main:
            if self._small and (len(self._small) > self._small_target or not self._main):
                victim = self._pop_small()
            else:
                victim = self._pop_main()
            if victim is not None:
                return victim
        return None

    def _pop_small(self) -> BlockKey | None:
        """Remove the oldest block of the small queue; it moves to the main queue if it was used meanwhile."""
        key, uses = self._small.popitem(last=False)
        if uses > 0:
            self._main[key] = 0
            return None
        self._ghosts[key] = None
        while len(self._ghosts) > self.capacity - self._small_target:
            self._ghosts.popitem(last=False)
        return key

    def _pop_main(self) -> BlockKey | None:
        """Evict the oldest block of the main queue, or move it to the end, once for each of its uses."""
        key, uses = self._main.popitem(last=False)
        if uses == 0:
            return key
        self._main[key] = uses - 1
        return None

    def _restore(self, key: BlockKey, now: float) -> None:
        self._ghosts.pop(key, None)
        self._main[key] = 0

    def _orders(self, key: BlockKey) -> bool:
        return key in self._small or key in self._main

    def _num_ordered(self) -> int:
        return len(self._small) + len(self._main)
