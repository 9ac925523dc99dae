"""Least recently used: the block whose last use is the longest ago goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from kvferry.store.eviction.base import EvictionPolicy, Key


class Lru(EvictionPolicy):
    """One queue; a use moves a block to its end."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._kept: OrderedDict[Key, None] = OrderedDict()

    def insert(self, key: Key, parent: Key | None = None) -> None:
        """To the end."""
        self._kept[key] = None
        self._kept.move_to_end(key)

    def access(self, key: Key) -> None:
        """To the end."""
        if key in self._kept:
            self._kept.move_to_end(key)

    def remove(self, key: Key) -> None:
        """Out of the queue."""
        self._kept.pop(key, None)

    def evict(self, pinned: Container[Key] = ()) -> Key | None:
        """The first that is not pinned."""
        victim = next((key for key in self._kept if key not in pinned), None)
        if victim is not None:
            del self._kept[victim]
        return victim

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)
