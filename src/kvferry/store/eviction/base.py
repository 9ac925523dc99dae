"""Which block a full store gives up first: a pure object without bytes, clock, thread or lock.

Whoever drives it, a store or the simulator that replays a trace, says what happens to blocks and when, and asks for
victims. The same events give the same victims. One thread at a time may call it.

One request against a store is: `access` of each block it finds and then `insert` of each that it brings, both in the
order of its prompt, with `evict` in between as often as room is wanted, and `finish` once the answer is complete.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable

Key = Hashable
"""A block hash, or whatever names a block in a trace."""


class EvictionPolicy(ABC):
    """Owns the order of the blocks that are kept, and what it remembers of some that were.

    `capacity`: about how many blocks fit, at least 1. A policy sizes its queues and its memory of past blocks by it;
    it never evicts by itself. `now` is in seconds of any clock that does not go back.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity > 0, "a store without room needs no policy"
        self.capacity = capacity
        self._pins: Counter[Key] = Counter()
        self._aside: set[Key] = set()
        """Pinned blocks that an eviction came upon; they are out of the order until they are unpinned."""

    def insert(self, key: Key, now: float, parent: Key | None = None) -> None:
        """A block is kept from now on; one that is kept already counts as accessed.

        `parent`: the block before it in its prompt; None for a first one, or where that is not known.
        """
        if key in self:
            self.access(key, now)
        else:
            self._insert(key, now, parent)

    def access(self, key: Key, now: float) -> None:
        """A block that is kept was used; one that is not is passed over."""
        if key not in self._aside and self._orders(key):
            self._access(key, now)

    def finish(self, keys: Iterable[Key], num_output_tokens: int, now: float) -> None:
        """The request whose prompt consists of `keys` has its whole answer. A hint, which a driver may not have."""
        return

    def remove(self, key: Key) -> None:
        """A block is gone for another reason than `evict` (deleted, damaged); one that is not kept is passed over."""
        self._pins.pop(key, None)
        if key in self._aside:
            self._aside.remove(key)
        elif self._orders(key):
            self._remove(key)

    def evict(self, now: float) -> Key | None:
        """Choose a block to give up, and forget that it is kept. None: all are pinned, or there is none."""
        while (victim := self._victim(now)) is not None:
            if victim not in self._pins:
                return victim
            self._aside.add(victim)
        return None

    def pin(self, key: Key) -> None:
        """A block that is kept is not evicted until `unpin` was called as often; one that is not is passed over."""
        if key in self:
            self._pins[key] += 1

    def unpin(self, key: Key, now: float) -> None:
        """End one `pin`; a block that is not pinned is passed over."""
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

    # What a policy is. None of these hears of a block that is set aside.

    @abstractmethod
    def _insert(self, key: Key, now: float, parent: Key | None) -> None:
        """Take a new block into the order."""

    @abstractmethod
    def _access(self, key: Key, now: float) -> None:
        """A block in the order was used."""

    @abstractmethod
    def _remove(self, key: Key) -> None:
        """Take a block out of the order; nobody evicted it."""

    @abstractmethod
    def _victim(self, now: float) -> Key | None:
        """Take out the block that is wanted least; None when there is none."""

    @abstractmethod
    def _restore(self, key: Key, now: float) -> None:
        """Take a block back that `_victim` gave out and that was pinned, as one that was used now."""

    @abstractmethod
    def _orders(self, key: Key) -> bool:
        """Whether a block is in the order."""

    @abstractmethod
    def _num_ordered(self) -> int:
        """How many are."""
