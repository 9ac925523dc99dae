"""Caches without bytes through which a trace is replayed: with a policy, of unbounded size, and with perfect foresight.

All of them count hits in the same way: a block is a hit if it and all blocks before it in the prompt are cached, since
only such a prefix saves work. Each request inserts every block of its prompt, even if some are evicted at once.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator
from typing import Protocol

from kvferry.core.errors import ConfigError
from kvferry.store.eviction.base import EvictionPolicy
from kvferry.store.trace.records import TraceRequest

SECONDS_PER_OUTPUT_TOKEN = 0.03
"""Determines when an answer is complete. Traces do not contain this, and policies get a call for it."""

NEVER = 1 << 62


class Cache(Protocol):
    """A cache to which requests are passed in the order of their times."""

    hits: int

    def request(self, request: TraceRequest) -> None:
        """Look up the blocks of a request, and insert those that are missing."""


class PolicyCache:
    """A cache of at most `capacity` blocks, chosen by an eviction policy; driven as a store drives it."""

    answer_starts_s = 1.0

    def __init__(self, policy: EvictionPolicy, capacity: int, *, uses_finishes: bool = True) -> None:
        self._policy, self._capacity, self._uses_finishes = policy, capacity, uses_finishes
        self._running: list[tuple[float, int, TraceRequest]] = []
        self._num_requests = 0
        self.hits = self.evictions = self.operations = 0

    def request(self, request: TraceRequest) -> None:
        """Count the blocks of a request that are cached, and insert the missing ones."""
        now = request.arrived_s
        self._finish_until(now)
        self._use(request.hash_ids, now)
        if self._uses_finishes:
            self._num_requests += 1
            end = now + self.answer_starts_s + SECONDS_PER_OUTPUT_TOKEN * request.output_length
            heapq.heappush(self._running, (end, self._num_requests, request))

    def _use(self, keys: list[int], now: float) -> None:
        policy = self._policy
        is_prefix, missing = True, []
        for index, key in enumerate(keys):
            if key in policy:
                policy.access(key, now)
                self.hits += is_prefix
            else:
                is_prefix = False
                missing.append(index)
        for index in missing:
            while len(policy) >= self._capacity:
                policy.evict(now)
                self.evictions += 1
            policy.insert(keys[index], now, keys[index - 1] if index else None)
        self.operations += len(keys)

    def _finish_until(self, now: float) -> None:
        while self._running and self._running[0][0] <= now:
            end, _, request = heapq.heappop(self._running)
            self._policy.finish(request.hash_ids, request.output_length, end)


class UnboundedCache:
    """A cache that evicts no block, and so counts all reuse in a trace."""

    def __init__(self) -> None:
        self._cached: set[int] = set()
        self.hits = self.num_blocks = self.num_requests = 0

    def request(self, request: TraceRequest) -> None:
        """Count the blocks of a request that are cached, and insert the missing ones."""
        keys, cached = request.hash_ids, self._cached
        self.hits += next((index for index, key in enumerate(keys) if key not in cached), len(keys))
        cached.update(keys)
        self.num_blocks += len(keys)
        self.num_requests += 1

    @property
    def num_distinct(self) -> int:
        """Number of distinct blocks."""
        return len(self._cached)


class NextUses:
    """The position of the next use of each block of each request, in order; 8 bytes for each (Belady, 1966)."""

    def __init__(self) -> None:
        self._next = array("q")
        self._last: dict[int, int] = {}
        self._parents: dict[int, int | None] = {}

    def request(self, request: TraceRequest) -> None:
        """Add the next request in the order of time. Raises `ConfigError` if a block follows another one than before:
        the optimum is only defined for blocks each of which implies all before it."""
        parent = None
        for key in request.hash_ids:
            if self._parents.setdefault(key, parent) != parent:
                raise ConfigError(
                    f"the trace's blocks are not chained: block {key} {_follows(self._parents[key])} in one request "
                    f"and {_follows(parent)} in another; hash_ids must name each block together with all before it"
                )
            parent = key
            position = len(self._next)
            previous = self._last.get(key)
            if previous is not None:
                self._next[previous] = position
            self._next.append(NEVER)
            self._last[key] = position

    def read(self) -> Iterator[int]:
        """The positions, from the first one on. No request may be added after this call."""
        self._last, self._parents = {}, {}
        return iter(self._next)


def _follows(parent: int | None) -> str:
    return "comes first" if parent is None else f"follows block {parent}"


class OptimalCache:
    """A cache of at most `capacity` blocks, which evicts the one whose next use is the furthest away. As blocks are
    chained, none is kept without those before it, and no cache can do better."""

    def __init__(self, capacity: int, next_uses: NextUses) -> None:
        self._capacity, self._next_uses = capacity, next_uses.read()
        self._cached: dict[int, int] = {}
        self._farthest: list[tuple[int, int]] = []
        self.hits = 0

    def request(self, request: TraceRequest) -> None:
        """Count the blocks of a request that are cached, and insert the missing ones."""
        is_prefix = True
        for key in request.hash_ids:
            is_prefix = is_prefix and key in self._cached
            self.hits += is_prefix
            self._cached[key] = next_use = next(self._next_uses)
            heapq.heappush(self._farthest, (-next_use, key))
            if len(self._cached) > self._capacity:
                self._evict()
            self._drop_past_uses()

    def _evict(self) -> None:
        while True:
            negated_use, key = heapq.heappop(self._farthest)
            if self._cached.get(key) == -negated_use:
                del self._cached[key]
                return

    def _drop_past_uses(self) -> None:
        if len(self._farthest) > 4 * len(self._cached) + 1024:
            self._farthest = [(-next_use, key) for key, next_use in self._cached.items()]
            heapq.heapify(self._farthest)
