"""The notes of a memory store: two tables in the arena that instances share, for short notes and for long ones.

All methods but `release_memory` may be called only while the arena's lock is held (`MemoryIndex.locked`). Does not know
what notes mean.

A note may be in one set of `WAYS` slots only, which its name determines, so that a table of any size is searched in
bounded time. If a set is full, a new note replaces its oldest one. Short and long notes have tables of their own, so
that the many small records of keys never displace the markers of hand-offs.
"""

from __future__ import annotations

import hashlib

import numpy as np

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.store.arena import Arena

MAX_NOTES, MIN_NOTES = 256, 8
SHARE = 8
"""The notes of a store of a given size take an eighth of it at most, unless that is less than `MIN_NOTES`."""
NOTE_BYTES = 2**14
"""Maximum bytes of a note."""
SHORT_NOTE_BYTES = 2**10
"""Maximum bytes of a short note."""
WAYS = 8
"""Slots in a set of the table of short notes. The table of long notes is one set."""
SETS_PER_LONG_NOTE = 2
"""Number of sets of short notes for each long note beyond `MIN_NOTES`. They take about as much memory as the long
note."""


def _note_type(num_bytes: int) -> np.dtype[np.void]:
    return np.dtype(
        [("name", "V32"), ("over_s", "<f8"), ("order", "<u8"), ("length", "<u8"), ("content", f"V{num_bytes}")]
    )


_LONG, _SHORT = _note_type(NOTE_BYTES), _note_type(SHORT_NOTE_BYTES)
_ORDER = np.dtype("<u8")
_BYTES_PER_LONG_NOTE = _LONG.itemsize + SETS_PER_LONG_NOTE * WAYS * _SHORT.itemsize
"""Bytes of a long note and of the short ones that come with it."""


def num_notes(store_bytes: int | None) -> int:
    """Number of long notes that a store has slots for. `store_bytes`: its size; None: its size is given in blocks."""
    if store_bytes is None:
        return MAX_NOTES
    return min(MAX_NOTES, max(MIN_NOTES, store_bytes // SHARE // _BYTES_PER_LONG_NOTE))


def min_size(num_bytes: int) -> int:
    """The size of the smallest store that has `num_bytes` besides its notes."""
    for number in range(MIN_NOTES, MAX_NOTES):
        size = max(num_bytes + notes_bytes(number), number * SHARE * _BYTES_PER_LONG_NOTE if number > MIN_NOTES else 0)
        if num_notes(size) == number:
            return size
    return num_bytes + notes_bytes(MAX_NOTES)


def notes_bytes(num_notes: int) -> int:
    """Bytes of the arena that the tables take."""
    return _ORDER.itemsize + num_notes * _LONG.itemsize + _num_short(num_notes) * _SHORT.itemsize


def _num_short(num_notes: int) -> int:
    return WAYS * max(1, SETS_PER_LONG_NOTE * (num_notes - MIN_NOTES))


class MemoryNotes:
    """The tables at `offset` of an arena, of `num_notes` long notes."""

    def __init__(self, arena: Arena, offset: int, num_notes: int) -> None:
        self._order = np.frombuffer(arena.buffer, _ORDER, 1, offset)
        """The number of notes ever written."""
        offset += _ORDER.itemsize
        self._long = np.frombuffer(arena.buffer, _LONG, num_notes, offset)
        offset += num_notes * _LONG.itemsize
        self._short = np.frombuffer(arena.buffer, _SHORT, _num_short(num_notes), offset)

    def release_memory(self) -> None:
        """Release the arena's memory, so that it can be unmapped. No other method may be called afterwards."""
        del self._long, self._short, self._order

    def write(self, name: str, content: bytes, ttl_s: float) -> None:
        """Write a note of at most `NOTE_BYTES`, replacing one of the same name."""
        key, is_short = _key(name), len(content) <= SHORT_NOTE_BYTES
        table, other_table = (self._short_set(key), self._long) if is_short else (self._long, self._short_set(key))
        _clear(other_table, key)
        slot = _find_slot(table, key)
        if slot is None:
            free = np.flatnonzero(table["over_s"] < SYSTEM_CLOCK.wall())
            slot = int(free[0]) if len(free) else int(np.argmin(table["order"]))
        self._order[0] += 1
        size = SHORT_NOTE_BYTES if is_short else NOTE_BYTES
        table["content"][slot] = np.void(content.ljust(size, b"\0"))
        table["name"][slot], table["length"][slot] = np.void(key), len(content)
        table["over_s"][slot], table["order"][slot] = SYSTEM_CLOCK.wall() + ttl_s, self._order[0]

    def read(self, name: str) -> bytes | None:
        """The note's content, unless there is none or it has expired."""
        key = _key(name)
        for notes in (self._short_set(key), self._long):
            slot = _find_slot(notes, key)
            if slot is not None and notes["over_s"][slot] >= SYSTEM_CLOCK.wall():
                content: bytes = notes["content"][slot].tobytes()
                return content[: int(notes["length"][slot])]
        return None

    def remove(self, name: str) -> None:
        """Remove the note, if it exists."""
        key = _key(name)
        for notes in (self._short_set(key), self._long):
            _clear(notes, key)

    def _short_set(self, key: bytes) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        number = int.from_bytes(key[:8], "little") % (len(self._short) // WAYS)
        return self._short[number * WAYS : (number + 1) * WAYS]


def _find_slot(notes: np.ndarray[tuple[int], np.dtype[np.void]], key: bytes) -> int | None:
    matches = np.flatnonzero(notes["name"] == np.void(key))
    return int(matches[0]) if len(matches) else None


def _clear(notes: np.ndarray[tuple[int], np.dtype[np.void]], key: bytes) -> None:
    if (slot := _find_slot(notes, key)) is not None:
        notes["name"][slot], notes["over_s"][slot], notes["length"][slot] = np.void(bytes(32)), 0.0, 0


def _key(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()
