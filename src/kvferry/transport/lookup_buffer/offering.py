"""The producer's half of a lookup buffer, over an entry table; the consumer's half is a subclass's."""

from __future__ import annotations

from typing import Any

from kvferry.core.clock import Clock, SystemClock
from kvferry.transport.lookup_buffer.base import Ended, LookupBuffer, Part
from kvferry.transport.lookup_buffer.entries import EntryBounds, EntryTable
from kvferry.transport.memory import BlockMemory


class OfferingBuffer(LookupBuffer):
    """Keys are offered from `table`, which is the subclass's to speak for."""

    def __init__(self, memory: BlockMemory, bounds: EntryBounds | None, clock: Clock | None) -> None:
        self.memory = memory
        self.table = EntryTable(memory.geometry, clock or SystemClock(), bounds or EntryBounds())

    def open(self, key: str) -> bool:
        """Begin a key."""
        return self.table.open(key)

    def insert(self, key: str, part: Part) -> bool:
        """Announce a part."""
        return self.table.insert(key, part)

    def seal(self, key: str, meta: bytes) -> None:
        """Complete a key."""
        self.table.seal(key, meta)

    def set_lease(self, key: str, lease_s: float) -> None:
        """Give a key a lease of its own length."""
        self.table.set_lease(key, lease_s)

    def reset(self, key: str) -> None:
        """Void all parts."""
        self.table.reset(key)

    def drop(self, key: str) -> None:
        """Withdraw a key, or say that it never comes."""
        self.table.drop(key)

    def end(self, key: str) -> bool:
        """End a key as released, now or as soon as it begins."""
        return self.table.release(key)

    def ended(self) -> list[Ended]:
        """Keys that ended since the last call."""
        self.table.expire()
        return self.table.ended()

    def address(self) -> dict[str, Any]:
        """Where consumers find this producer; JSON-able."""
        return {}

    def close(self) -> None:
        """Give back what is held from the beginning on; also for a buffer that never ran."""

    def check(self) -> None:
        """Raise `LeakError` when a key is left."""
        self.table.check()
