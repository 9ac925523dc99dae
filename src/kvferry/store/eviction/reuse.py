"""The better of two orders: the learned one (`LearnedPolicy`), or LRU while popularity changes faster than it learns.

Both orders run all the time, each on a *shadow*: the blocks that a cache of the same size would keep by that order
alone. The hits of each are therefore known exactly, whichever of them decides at the time. The cache itself evicts
blocks that the shadow it follows has evicted, in the same order.

The learned order decides first. LRU replaces it when LRU's shadow leads by `ALLOWED_LAG` of the capacity in hits. The
learned order comes back when its hits since its worst moment outweigh two costs. The first cost is the change itself:
hits are lost because some blocks of its shadow are not cached (their number times the mean hits of its shadow per use).
The second is the number of hits by which this cache is behind LRU so far. So if a workload alternates, the cache does
not. Policies that duel: Qureshi and others (ISCA 2007).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable

from kvferry.store.eviction.base import BlockKey, EvictionPolicy
from kvferry.store.eviction.leaf_lru import LeafLru
from kvferry.store.eviction.learned import LearnedPolicy

ALLOWED_LAG, MIN_LAG = 1 / 40, 3
REMEMBERED_LEAD = 1 / 2
"""The largest lead that counts, as a share of the capacity, so that an old lead does not decide forever."""


class Shadow:
    """The blocks that a cache would keep by one policy alone."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.evicted: OrderedDict[BlockKey, None] = OrderedDict()
        """Blocks that the cache keeps although this policy has evicted them, in that order."""

    def use(self, key: BlockKey, now: float, parent: BlockKey | None, size: int, cached: Container[BlockKey]) -> bool:
        """Record a use or an insertion of a block in the cache, which then has `size` blocks. Returns true if this
        shadow had it."""
        policy = self.policy
        if policy._orders(key):
            policy._access(key, now)
            return True
        policy._insert(key, now, parent)
        self.evicted.pop(key, None)
        self.shrink(size, now, cached)
        return False

    def shrink(self, size: int, now: float, cached: Container[BlockKey]) -> None:
        """Evict until there are at most `size` blocks."""
        while self.policy._num_ordered() > size:
            self.evict(now, cached)

    def evict(self, now: float, cached: Container[BlockKey]) -> None:
        """Evict a block; there must be one. `cached`: the blocks of the cache."""
        key = self.policy._victim(now)
        if key in cached:
            self.evicted[key] = None


class Reuse(EvictionPolicy):
    """Follows one of two shadows."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._parents: dict[BlockKey, BlockKey | None] = {}
        """Every block in the order, with its parent."""
        self.learned, self.lru = Shadow(LearnedPolicy(capacity)), Shadow(LeafLru(capacity))
        self._followed = self.learned
        self._lead = 0
        """Hits by which the learned shadow leads LRU's: up to now if it is followed, else since the minimum."""
        self._gain = 0
        """Hits by which this cache leads LRU's shadow."""
        self._num_uses = self._num_learned_hits = 0

    def finish(self, keys: Iterable[BlockKey], num_output_tokens: int, now: float) -> None:
        """Report the answer's length to the learned order."""
        self.learned.policy.finish(keys, num_output_tokens, now)

    def _insert(self, key: BlockKey, now: float, parent: BlockKey | None) -> None:
        self._parents[key] = parent
        self._record_use(key, now, parent, was_cached=False)

    def _access(self, key: BlockKey, now: float) -> None:
        self._record_use(key, now, self._parents[key], was_cached=True)

    def _record_use(self, key: BlockKey, now: float, parent: BlockKey | None, *, was_cached: bool) -> None:
        size = len(self._parents) + len(self._skipped)
        learned = self.learned.use(key, now, parent, size, self._parents)
        lru = self.lru.use(key, now, parent, size, self._parents)
        self._num_uses += 1
        self._num_learned_hits += learned
        if learned != lru or was_cached != lru:
            self._update_lead(learned - lru, was_cached - lru)

    def _update_lead(self, hits_lead: int, hits_over_lru: int) -> None:
        self._gain = min(self.capacity, self._gain + hits_over_lru)
        self._lead += hits_lead
        if self._followed is self.learned:
            self._lead = min(self._lead, int(self.capacity * REMEMBERED_LEAD))
            if self._lead <= -max(MIN_LAG, self.capacity * ALLOWED_LAG):
                self._followed, self._lead = self.lru, 0
        else:
            self._lead = max(self._lead, 0)
            lost_hits = len(self.learned.evicted) * self._num_learned_hits / self._num_uses
            if self._lead > lost_hits + max(0, -self._gain):
                self._followed, self._lead = self.learned, 0

    def _remove(self, key: BlockKey) -> None:
        del self._parents[key]
        self.learned.evicted.pop(key, None)
        self.lru.evicted.pop(key, None)

    def _victim(self, now: float) -> BlockKey | None:
        if not self._parents:
            return None
        evicted = self._followed.evicted
        while not evicted:  # a block that is kept is in a shadow, or was evicted from it
            self._followed.evict(now, self._parents)
        victim = next(iter(evicted))
        self._remove(victim)
        size = len(self._parents) + len(self._skipped)
        self.learned.shrink(size, now, self._parents)
        self.lru.shrink(size, now, self._parents)
        return victim

    def _restore(self, key: BlockKey, now: float) -> None:
        self._parents[key] = None
        for shadow in (self.learned, self.lru):
            if not shadow.policy._orders(key):
                shadow.policy._restore(key, now)

    def _orders(self, key: BlockKey) -> bool:
        return key in self._parents

    def _num_ordered(self) -> int:
        return len(self._parents)
