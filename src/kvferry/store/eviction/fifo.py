"""First in, first out: the block that was inserted first is evicted first, whether it was used or not."""

from __future__ import annotations

from kvferry.store.eviction.base import BlockKey
from kvferry.store.eviction.lru import Lru


class Fifo(Lru):
    """LRU's queue, in which a use moves nothing."""

    def _access(self, key: BlockKey, now: float) -> None:
        return
