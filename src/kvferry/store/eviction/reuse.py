"""The better of two orders: what is learned about reuse (`LearnedPolicy`), or LRU while popularity changes faster than
that.

Both orders run all the time, each on a *shadow*: the blocks that a cache of the same size would keep by that order
alone. So it is known which one would have found more, exactly and whatever is followed meanwhile. The cache itself
evicts blocks that the shadow it follows has evicted, in the same order.

The learned order is followed first. LRU takes its place when its shadow has found more than the learned one by
`ALLOWED_LAG` of the capacity. The learned order comes back when what it has gained since its worst moment outweighs
what the change costs (the blocks of its shadow that are not there) and what this cache has found less than LRU so far;
so if a workload changes to and fro, the cache does not. Policies that duel: Qureshi and others (ISCA 2007).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable

from kvferry.store.eviction.base import EvictionPolicy, Key
from kvferry.store.eviction.leaf_lru import LeafLru
from kvferry.store.eviction.learned import LearnedPolicy

ALLOWED_LAG, MIN_LAG = 1 / 40, 3
REMEMBERED_LEAD = 1 / 2
"""The largest lead that counts, as a share of the capacity, so that one from long ago does not decide forever."""


class Shadow:
    """The blocks that a cache would keep by one policy alone."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.evicted: OrderedDict[Key, None] = OrderedDict()
        """Blocks that the cache keeps although this policy has evicted them, in that order."""

    def use(self, key: Key, now: float, parent: Key | None, size: int, kept: Container[Key]) -> bool:
        """A block was used, or inserted, in the cache, which then keeps `size` blocks. Returns whether it was here."""
        policy = self.policy
        if policy._orders(key):
            policy._access(key, now)
            return True
        policy._insert(key, now, parent)
        self.evicted.pop(key, None)
        self.shrink(size, now, kept)
        return False

    def shrink(self, size: int, now: float, kept: Container[Key]) -> None:
        """Evict until there are at most `size` blocks."""
        while self.policy._num_ordered() > size:
            self.evict(now, kept)

    def evict(self, now: float, kept: Container[Key]) -> None:
        """Evict a block; there must be one. `kept`: the blocks that the cache keeps."""
        key = self.policy._victim(now)
        if key in kept:
            self.evicted[key] = None


class Reuse(EvictionPolicy):
    """Follows one of two shadows."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._kept: dict[Key, Key | None] = {}
        """Every block in the order, with its parent."""
        self.learned, self.lru = Shadow(LearnedPolicy(capacity)), Shadow(LeafLru(capacity))
        self._followed = self.learned
        self._lead = 0
        """Blocks that the learned shadow found more than LRU's: up to now if it is followed, else since the least."""
        self._gain = 0
        """Blocks that were found here more than in LRU's shadow."""

    def finish(self, keys: Iterable[Key], num_output_tokens: int, now: float) -> None:
        """Tell the learned order, which counts answers' lengths."""
        self.learned.policy.finish(keys, num_output_tokens, now)

    def _insert(self, key: Key, now: float, parent: Key | None) -> None:
        self._kept[key] = parent
        self._use(key, now, parent, was_kept=False)

    def _access(self, key: Key, now: float) -> None:
        self._use(key, now, self._kept[key], was_kept=True)

    def _use(self, key: Key, now: float, parent: Key | None, *, was_kept: bool) -> None:
        size = len(self._kept) + len(self._aside)
        learned = self.learned.use(key, now, parent, size, self._kept)
        lru = self.lru.use(key, now, parent, size, self._kept)
        if learned != lru or was_kept != lru:
            self._judge(learned - lru, was_kept - lru)

    def _judge(self, lead: int, gain: int) -> None:
        self._gain = min(self.capacity, self._gain + gain)
        self._lead += lead
        if self._followed is self.learned:
            self._lead = min(self._lead, int(self.capacity * REMEMBERED_LEAD))
            if self._lead <= -max(MIN_LAG, self.capacity * ALLOWED_LAG):
                self._followed, self._lead = self.lru, 0
        else:
            self._lead = max(self._lead, 0)
            if self._lead > len(self.learned.evicted) + max(0, -self._gain):
                self._followed, self._lead = self.learned, 0

    def _remove(self, key: Key) -> None:
        del self._kept[key]
        self.learned.evicted.pop(key, None)
        self.lru.evicted.pop(key, None)

    def _victim(self, now: float) -> Key | None:
        if not self._kept:
            return None
        evicted = self._followed.evicted
        while not evicted:  # a block that is kept is in a shadow, or was evicted from it
            self._followed.evict(now, self._kept)
        victim = next(iter(evicted))
        self._remove(victim)
        size = len(self._kept) + len(self._aside)
        self.learned.shrink(size, now, self._kept)
        self.lru.shrink(size, now, self._kept)
        return victim

    def _restore(self, key: Key, now: float) -> None:
        self._kept[key] = None
        for shadow in (self.learned, self.lru):
            if not shadow.policy._orders(key):
                shadow.policy._restore(key, now)

    def _orders(self, key: Key) -> bool:
        return key in self._kept

    def _num_ordered(self) -> int:
        return len(self._kept)
