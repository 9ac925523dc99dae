"""ARC, the adaptive replacement cache (Megiddo and Modha, FAST 2003).

Blocks that were used once and blocks that were used again have one queue each, and each queue remembers the names of
blocks that it evicted. If one of these is used again soon, that queue was too short, and the target sizes are adjusted.
"""

from __future__ import annotations

from collections import OrderedDict

from kvferry.store.eviction.base import BlockKey, EvictionPolicy

Queue = OrderedDict[BlockKey, None]


class Arc(EvictionPolicy):
    """The paper's T1, T2 and ghosts B1, B2 are `_recent`, `_frequent`, `_recent_ghosts` and `_frequent_ghosts`."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._recent, self._frequent = Queue(), Queue()
        self._recent_ghosts, self._frequent_ghosts = Queue(), Queue()
        self._recent_target = 0.0
        """Target number of blocks that were used once; adapted. The paper's p."""

    def _insert(self, key: BlockKey, now: float, parent: BlockKey | None) -> None:
        if key in self._recent_ghosts:
            step = max(1.0, len(self._frequent_ghosts) / len(self._recent_ghosts))
            self._recent_target = min(float(self.capacity), self._recent_target + step)
            del self._recent_ghosts[key]
            self._frequent[key] = None
        elif key in self._frequent_ghosts:
            step = max(1.0, len(self._recent_ghosts) / len(self._frequent_ghosts))
            self._recent_target = max(0.0, self._recent_target - step)
            del self._frequent_ghosts[key]
            self._frequent[key] = None
        else:
            self._recent[key] = None

    def _access(self, key: BlockKey, now: float) -> None:
        self._remove(key)
        self._frequent[key] = None

    def _remove(self, key: BlockKey) -> None:
        (self._recent if key in self._recent else self._frequent).pop(key)

    def _victim(self, now: float) -> BlockKey | None:
        if self._recent and (len(self._recent) > self._recent_target or not self._frequent):
            return self._evict_oldest(self._recent, self._recent_ghosts)
        if self._frequent:
            return self._evict_oldest(self._frequent, self._frequent_ghosts)
        return None

    def _evict_oldest(self, queue: Queue, ghosts: Queue) -> BlockKey:
        key, _ = queue.popitem(last=False)
        ghosts[key] = None
        while len(self._recent) + len(self._recent_ghosts) > self.capacity and self._recent_ghosts:
            self._recent_ghosts.popitem(last=False)
        while len(self._recent_ghosts) + len(self._frequent_ghosts) > self.capacity:
            (self._frequent_ghosts or self._recent_ghosts).popitem(last=False)
        return key

    def _restore(self, key: BlockKey, now: float) -> None:
        self._recent_ghosts.pop(key, None)
        self._frequent_ghosts.pop(key, None)
        self._frequent[key] = None

    def _orders(self, key: BlockKey) -> bool:
        return key in self._recent or key in self._frequent

    def _num_ordered(self) -> int:
        return len(self._recent) + len(self._frequent)
