"""First in, first out: the block that has been kept longest goes first, used or not."""

from __future__ import annotations

from kvferry.store.eviction.base import Key
from kvferry.store.eviction.lru import Lru


class Fifo(Lru):
    """The same queue as LRU's, in which a use moves nothing."""

    def _access(self, key: Key, now: float) -> None:
        return
