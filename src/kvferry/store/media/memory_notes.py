"""The notes of a memory store: a table in the arena that instances share.

All methods but `forget` only while the arena's lock is held (`MemoryIndex.locked`). Does not know what notes say.
"""

from __future__ import annotations

import hashlib

import numpy as np

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.store.arena import Arena

MOST_NOTES, LEAST_NOTES = 256, 8
SHARE = 8
"""The notes of a store of a given size take an eighth of it at most, unless that is less than `LEAST_NOTES`."""
NOTE_BYTES = 2**14
"""The longest content of a note."""
_NOTE = np.dtype(
    [("name", "V32"), ("over_s", "<f8"), ("length", "<u4"), ("padding", "<u4"), ("content", f"V{NOTE_BYTES}")]
)


def num_notes(store_bytes: int | None) -> int:
    """How many notes a store has places for. `store_bytes`: its size; None: its size is given in blocks."""
    if store_bytes is None:
        return MOST_NOTES
    return min(MOST_NOTES, max(LEAST_NOTES, store_bytes // SHARE // _NOTE.itemsize))


def notes_bytes(num_notes: int) -> int:
    """How much of the arena the table takes."""
    return num_notes * _NOTE.itemsize


class MemoryNotes:
    """The table at `offset` of an arena. If all places are taken, a new note replaces the one that expires first."""

    def __init__(self, arena: Arena, offset: int, num_notes: int) -> None:
        self._notes = np.frombuffer(arena.buffer, _NOTE, num_notes, offset)

    def forget(self) -> None:
        """Release the arena's memory, so that it can be unmapped. Nothing may be called afterwards."""
        del self._notes

    def write(self, name: str, content: bytes, ttl_s: float) -> None:
        """Write a note of at most `NOTE_BYTES`, replacing one of the same name."""
        key = _key(name)
        place = self._place(key)
        place = int(np.argmin(self._notes["over_s"])) if place is None else place
        self._write(place, key, content, SYSTEM_CLOCK.wall() + ttl_s)

    def read(self, name: str) -> bytes | None:
        """The note's content, unless there is none or it has expired."""
        place = self._place(_key(name))
        if place is None or self._notes["over_s"][place] < SYSTEM_CLOCK.wall():
            return None
        content: bytes = self._notes["content"][place].tobytes()
        return content[: int(self._notes["length"][place])]

    def remove(self, name: str) -> None:
        """Free the note's place, if it is there."""
        key = _key(name)
        if (place := self._place(key)) is not None:
            self._write(place, key, b"", 0.0)

    def _write(self, place: int, key: bytes, content: bytes, over_s: float) -> None:
        notes = self._notes
        notes["content"][place] = np.void(content.ljust(NOTE_BYTES, b"\0"))
        notes["name"][place], notes["length"][place] = np.void(key), len(content)
        notes["over_s"][place] = over_s

    def _place(self, key: bytes) -> int | None:
        found = np.flatnonzero(self._notes["name"] == np.void(key))
        return int(found[0]) if len(found) else None


def _key(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()
