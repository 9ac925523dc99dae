"""Notes in shared memory: short and long ones, sets that are full, and what expires."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.store.arena import Arena
from kvferry.store.media.memory_notes import (
    MAX_NOTES,
    MIN_NOTES,
    NOTE_BYTES,
    SHORT_NOTE_BYTES,
    MemoryNotes,
    min_size,
    notes_bytes,
    num_notes,
)


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryNotes]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    arena = Arena("notes", notes_bytes(MIN_NOTES))
    tables = MemoryNotes(arena, 0, MIN_NOTES)
    yield tables
    tables.release_memory()
    arena.close()


def test_a_note_is_read_replaced_and_removed(notes: MemoryNotes) -> None:
    assert notes.read("a") is None
    notes.write("a", b"one", 60.0)
    notes.write("b", b"", 60.0)
    assert (notes.read("a"), notes.read("b")) == (b"one", b"")
    notes.write("a", b"two", 60.0)
    assert notes.read("a") == b"two"
    notes.remove("a")
    notes.remove("a")
    assert notes.read("a") is None


@pytest.mark.parametrize("length", [SHORT_NOTE_BYTES, SHORT_NOTE_BYTES + 1, NOTE_BYTES])
def test_a_note_may_become_longer_or_shorter(notes: MemoryNotes, length: int) -> None:
    for content in (b"short", b"x" * length, b"y", b"\0" * length):
        notes.write("a", content, 60.0)
        assert notes.read("a") == content
    notes.remove("a")
    assert notes.read("a") is None, "no older form of it is left"


def test_a_note_expires_and_its_place_is_taken_first(notes: MemoryNotes) -> None:
    long = b"x" * NOTE_BYTES
    for number in range(MIN_NOTES):
        notes.write(f"n{number}", long, 60.0 if number != 3 else -1.0)
    assert notes.read("n3") is None
    notes.write("new", long, 60.0)
    assert [number for number in range(MIN_NOTES) if notes.read(f"n{number}") is None] == [3]


def test_a_full_table_loses_its_oldest(notes: MemoryNotes) -> None:
    long = b"x" * NOTE_BYTES
    for number in range(MIN_NOTES + 2):
        notes.write(f"n{number}", long, 60.0)
    assert [notes.read(f"n{number}") is None for number in range(4)] == [True, True, False, False]


def test_the_number_of_notes_follows_the_size() -> None:
    assert num_notes(None) == MAX_NOTES
    assert num_notes(0) == MIN_NOTES
    assert num_notes(2**40) == MAX_NOTES
    for wanted in (100_000, 10_000_000, 500_000_000):
        size = min_size(wanted)
        assert size - notes_bytes(num_notes(size)) >= wanted
