"""Eviction policies: which block a full store evicts first. A policy has no bytes, clock, thread or lock.

Its driver, a store or the simulator that replays a trace, reports events of blocks with their times, and asks for
blocks to evict. The same events give the same result. Only one thread at a time may call it.

One request to a store is: `access` for each block that it finds, then `insert` for each that it adds, both in the order
of its prompt, with `evict` in between when room is needed, and `finish` once the answer is complete.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable

BlockKey = Hashable
"""A block hash, or the name of a block in a trace."""
Key = BlockKey
"""Deprecated name of `BlockKey`."""


class EvictionPolicy(ABC):
    """Owns the order of the cached blocks, and remembers some evicted ones.

    `capacity`: about how many blocks fit, at least 1. It determines the size of the policy's queues; a policy never
    evicts by itself. `now`: seconds of any clock that does not go back.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity > 0, "a store without room needs no policy"
        self.capacity = capacity
        self._pins: Counter[BlockKey] = Counter()
        self._skipped: set[BlockKey] = set()
        """Pinned blocks that an eviction has skipped; they are not in the order until they are unpinned."""

    def insert(self, key: BlockKey, now: float, parent: BlockKey | None = None) -> None:
        """Add a block; one that is already cached counts as accessed.

        `parent`: the block before it in its prompt; None for a first block, or if unknown.
        """
        if key in self:
            self.access(key, now)
        else:
            self._insert(key, now, parent)

    def access(self, key: BlockKey, now: float) -> None:
        """Record a use of a block; ignored if it is not cached."""
        if key not in self._skipped and self._orders(key):
            self._access(key, now)

    def finish(self, keys: Iterable[BlockKey], num_output_tokens: int, now: float) -> None:
        """Record that the request whose prompt consists of `keys` has its complete answer. Not all drivers call this.
        Ignored by default."""
        return

    def remove(self, key: BlockKey) -> None:
        """Remove a block for another reason than eviction (deleted, damaged); ignored if it is not cached."""
        self._pins.pop(key, None)
        if key in self._skipped:
            self._skipped.remove(key)
        elif self._orders(key):
            self._remove(key)

    def evict(self, now: float) -> BlockKey | None:
        """Choose a block to evict, and remove it. None: all blocks are pinned, or there are none."""
        while (victim := self._victim(now)) is not None:
            if victim not in self._pins:
                return victim
            self._skipped.add(victim)
        return None

    def pin(self, key: BlockKey) -> None:
        """Protect a block from eviction until `unpin` was called as often as `pin`; ignored if it is not cached."""
        if key in self:
            self._pins[key] += 1

    def unpin(self, key: BlockKey, now: float) -> None:
        """Undo one `pin`; ignored if the block is not pinned."""
        if self._pins[key] > 1:
            self._pins[key] -= 1
            return
        del self._pins[key]
        if key in self._skipped:
            self._skipped.remove(key)
            self._restore(key, now)

    def __contains__(self, key: BlockKey) -> bool:
        """True if the block is cached."""
        return key in self._skipped or self._orders(key)

    def __len__(self) -> int:
        """Number of cached blocks."""
        return len(self._skipped) + self._num_ordered()

    # Implemented by each policy. These are never called for skipped blocks.

    @abstractmethod
    def _insert(self, key: BlockKey, now: float, parent: BlockKey | None) -> None:
        """Add a new block to the order."""

    @abstractmethod
    def _access(self, key: BlockKey, now: float) -> None:
        """Record a use of a block in the order."""

    @abstractmethod
    def _remove(self, key: BlockKey) -> None:
        """Remove a block from the order, without an eviction."""

    @abstractmethod
    def _victim(self, now: float) -> BlockKey | None:
        """Remove and return the block to evict first; None if there is none."""

    @abstractmethod
    def _restore(self, key: BlockKey, now: float) -> None:
        """Add a block back that `_victim` returned and that was pinned, as if it were used now."""

    @abstractmethod
    def _orders(self, key: BlockKey) -> bool:
        """True if the block is in the order."""

    @abstractmethod
    def _num_ordered(self) -> int:
        """The number of blocks in the order."""
