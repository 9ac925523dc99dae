"""Notes as files: they expire, and no name leads out of their folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.core.errors import StoreError
from kvferry.store.access import FileAccess
from kvferry.store.base import MAX_NOTE_BYTES
from kvferry.store.media.file_notes import NoteFiles, note_files


@pytest.fixture
def notes(tmp_path: Path) -> NoteFiles:
    return NoteFiles(tmp_path / "notes", FileAccess(0o600, 0o700))


def test_a_note_is_read_replaced_and_removed(notes: NoteFiles) -> None:
    assert notes.read("a") is None
    notes.write("a", b"one", 60.0)
    notes.write("a", b"two", 60.0)
    notes.write("b", b"", 60.0)
    assert (notes.read("a"), notes.read("b")) == (b"two", b"")
    notes.remove("a")
    notes.remove("a")
    assert notes.read("a") is None


def test_a_note_expires(notes: NoteFiles, tmp_path: Path) -> None:
    notes.write("a", b"old", -1.0)
    assert notes.read("a") is None
    notes.write("b", b"new", 60.0)
    (tmp_path / "notes" / "someone-elses.txt").write_text("stays")
    notes.sweep()
    assert [path.name for path in note_files(tmp_path / "notes", "*")] != []
    assert len([*(tmp_path / "notes").iterdir()]) == 2


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a\0b", "x" * 10_000, ""])
def test_any_name_stays_in_the_folder(notes: NoteFiles, tmp_path: Path, name: str) -> None:
    notes.write(name, b"x", 60.0)
    assert notes.read(name) == b"x"
    assert {path.parent for path in tmp_path.rglob("*.note")} == {tmp_path / "notes"}


def test_a_note_has_a_longest_length(notes: NoteFiles) -> None:
    notes.write("a", bytes(MAX_NOTE_BYTES), 60.0)
    assert notes.read("a") == bytes(MAX_NOTE_BYTES)
    with pytest.raises(StoreError, match="at most"):
        notes.write("a", bytes(MAX_NOTE_BYTES + 1), 60.0)


@pytest.mark.parametrize("content", [b"", b"1234567"])
def test_half_a_note_is_none(notes: NoteFiles, tmp_path: Path, content: bytes) -> None:
    notes.write("a", b"x", 60.0)
    [path] = tmp_path.rglob("*.note")
    path.write_bytes(content)
    assert notes.read("a") is None


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot leave a note"):
        NoteFiles(tmp_path / "file", FileAccess(0o600, 0o700)).write("a", b"x", 60.0)
