"""Which blocks a bounded store gives up first, as a pure object: no clock, no bytes, no tensor, no thread.

Whoever drives it (a store, or a simulation that replays a trace) says what happens to blocks and asks for victims; the
same events give the same victims. Not safe for several threads at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Hashable

Key = Hashable
"""A block hash, or whatever names a block in a trace."""


class EvictionPolicy(ABC):
    """Owns the order of the blocks that are kept now, and what it remembers of those that were.

    `capacity`: about how many blocks fit, at least 1. A policy may size its queues and its memory of past blocks by it;
    it never evicts by itself.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity > 0, "a store without room needs no policy"
        self.capacity = capacity

    @abstractmethod
    def insert(self, key: Key, parent: Key | None = None) -> None:
        """A block is kept from now on. `parent`: the block before it in its prompt, None for a first one, or where it
        is not known. A block that is kept already counts as accessed."""

    @abstractmethod
    def access(self, key: Key) -> None:
        """A block that is kept was used; one that is not is passed over."""

    @abstractmethod
    def remove(self, key: Key) -> None:
        """A block is gone for another reason than `evict` (deleted, damaged); one that is not kept is passed over."""

    @abstractmethod
    def evict(self, pinned: Container[Key] = ()) -> Key | None:
        """Choose a block to give up and forget that it is kept. None: all that are kept are pinned, or none is."""

    @abstractmethod
    def __contains__(self, key: Key) -> bool:
        """Whether a block is kept."""

    @abstractmethod
    def __len__(self) -> int:
        """How many are kept."""
