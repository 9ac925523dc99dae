"""Eviction policies: which block a full store evicts first. A pure object without bytes, clock, thread or lock.

Its driver, a store or the simulator that replays a trace, reports what happens to blocks and when, and asks for blocks
to evict. The same events give the same result. One thread at a time may call it.

One request to a store is: `access` for each block that it finds, then `insert` for each that it adds, both in the order
of its prompt, with `evict` in between when room is needed, and `finish` once the answer is complete.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable

Key = Hashable
"""A block hash, or whatever names a block in a trace."""


class EvictionPolicy(ABC):
    """Owns the order of the blocks that are kept, and what it remembers about some that were evicted.

    `capacity`: about how many blocks fit, at least 1. A policy sizes its queues and its memory of past blocks by it; it
    never evicts by itself. `now`: seconds of any clock that does not go back.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity > 0, "a store without room needs no policy"
        self.capacity = capacity
        self._pins: Counter[Key] = Counter()
        self._aside: set[Key] = set()
        """Pinned blocks that an eviction has encountered; they are not in the order until they are unpinned."""

    def insert(self, key: Key, now: float, parent: Key | None = None) -> None:
        """A block is kept from now on; one that is already kept counts as accessed.

        `parent`: the block before it in its prompt; None for a first one, or if that is not known.
        """
        if key in self:
            self.access(key, now)
        else:
            self._insert(key, now, parent)

    def access(self, key: Key, now: float) -> None:
        """Count a use of a block; ignored if it is not kept."""
        if key not in self._aside and self._orders(key):
            self._access(key, now)

    def finish(self, keys: Iterable[Key], num_output_tokens: int, now: float) -> None:
        """The request whose prompt consists of `keys` has got its whole answer: a hint that some drivers cannot give.
        Default: ignored."""
        return

    def remove(self, key: Key) -> None:
        """A block is gone for another reason than `evict` (deleted, damaged); ignored if it is not kept."""
        self._pins.pop(key, None)
        if key in self._aside:
            self._aside.remove(key)
        elif self._orders(key):
            self._remove(key)

    def evict(self, now: float) -> Key | None:
        """Choose a block to evict; it is no longer kept. None: all are pinned, or there is none."""
        while (victim := self._victim(now)) is not None:
            if victim not in self._pins:
                return victim
            self._aside.add(victim)
        return None

    def pin(self, key: Key) -> None:
        """Do not evict this block until `unpin` was called as often as `pin`; ignored if it is not kept."""
        if key in self:
            self._pins[key] += 1

    def unpin(self, key: Key, now: float) -> None:
        """Undo one `pin`; ignored if the block is not pinned."""
        if self._pins[key] > 1:
            self._pins[key] -= 1
            return
        del self._pins[key]
        if key in self._aside:
            self._aside.remove(key)
            self._restore(key, now)

    def __contains__(self, key: Key) -> bool:
        """Whether a block is kept."""
        return key in self._aside or self._orders(key)

    def __len__(self) -> int:
        """How many blocks are kept."""
        return len(self._aside) + self._num_ordered()

    # What a policy implements. These are never called for blocks that are set aside.

    @abstractmethod
    def _insert(self, key: Key, now: float, parent: Key | None) -> None:
        """Add a new block to the order."""

    @abstractmethod
    def _access(self, key: Key, now: float) -> None:
        """Note that a block in the order was used."""

    @abstractmethod
    def _remove(self, key: Key) -> None:
        """Remove a block from the order, without an eviction."""

    @abstractmethod
    def _victim(self, now: float) -> Key | None:
        """Remove and return the block to evict first; None if there is none."""

    @abstractmethod
    def _restore(self, key: Key, now: float) -> None:
        """Add a block back that `_victim` returned and that was pinned, as if it were used now."""

    @abstractmethod
    def _orders(self, key: Key) -> bool:
        """Whether a block is in the order."""

    @abstractmethod
    def _num_ordered(self) -> int:
        """The number of blocks in the order."""
