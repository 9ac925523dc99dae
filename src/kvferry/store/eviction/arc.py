"""ARC, the adaptive replacement cache (Megiddo and Modha, FAST 2003).

Blocks that were used once and blocks that were used again have one queue each, and each queue remembers the names of
blocks that it evicted. If one of these is used again soon, that queue was too short, and the target sizes are adjusted.
"""

from __future__ import annotations

from collections import OrderedDict

from kvferry.store.eviction.base import EvictionPolicy, Key

Queue = OrderedDict[Key, None]


class Arc(EvictionPolicy):
    """The paper's T1, T2 and ghosts B1, B2 are `_once`, `_again`, `_once_ghosts` and `_again_ghosts`."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._once, self._again = Queue(), Queue()
        self._once_ghosts, self._again_ghosts = Queue(), Queue()
        self._once_target = 0.0
        """Target number of blocks that were used once; adapted. The paper's p."""

    def _insert(self, key: Key, now: float, parent: Key | None) -> None:
        if key in self._once_ghosts:
            step = max(1.0, len(self._again_ghosts) / len(self._once_ghosts))
            self._once_target = min(float(self.capacity), self._once_target + step)
            del self._once_ghosts[key]
            self._again[key] = None
        elif key in self._again_ghosts:
            step = max(1.0, len(self._once_ghosts) / len(self._again_ghosts))
            self._once_target = max(0.0, self._once_target - step)
            del self._again_ghosts[key]
            self._again[key] = None
        else:
            self._once[key] = None

    def _access(self, key: Key, now: float) -> None:
        self._remove(key)
        self._again[key] = None

    def _remove(self, key: Key) -> None:
        (self._once if key in self._once else self._again).pop(key)

    def _victim(self, now: float) -> Key | None:
        if self._once and (len(self._once) > self._once_target or not self._again):
            return self._give_up(self._once, self._once_ghosts)
        if self._again:
            return self._give_up(self._again, self._again_ghosts)
        return None

    def _give_up(self, queue: Queue, ghosts: Queue) -> Key:
        key, _ = queue.popitem(last=False)
        ghosts[key] = None
        while len(self._once) + len(self._once_ghosts) > self.capacity and self._once_ghosts:
            self._once_ghosts.popitem(last=False)
        while len(self._once_ghosts) + len(self._again_ghosts) > self.capacity:
            (self._again_ghosts or self._once_ghosts).popitem(last=False)
        return key

    def _restore(self, key: Key, now: float) -> None:
        self._once_ghosts.pop(key, None)
        self._again_ghosts.pop(key, None)
        self._again[key] = None

    def _orders(self, key: Key) -> bool:
        return key in self._once or key in self._again

    def _num_ordered(self) -> int:
        return len(self._once) + len(self._again)
