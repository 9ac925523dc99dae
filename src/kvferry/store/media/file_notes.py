"""Notes between instances, as files of a directory that they share."""

from __future__ import annotations

import hashlib
import re
from collections import deque
from contextlib import suppress
from pathlib import Path

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import StoreError
from kvferry.store.access import FileAccess
from kvferry.store.base import MAX_NOTE_BYTES, require_short_note
from kvferry.store.disk import DISK, TEMPORARY_SUFFIX, Disk, NotAFile

_NOTE_FILE = re.compile(rf"[0-9a-f]{{64}}\.note(?:\.[^/]*\{TEMPORARY_SUFFIX})?\Z")
_EXPIRY_BYTES = 8
SWEEP_BATCH = 32


def note_files(folder: Path, pattern: str, disk: Disk = DISK) -> list[Path]:
    """Names of files that are notes or temporary files of notes. All other files belong to other programs."""
    return [path for path in disk.glob(folder, pattern) if _NOTE_FILE.match(path.name)]


class NoteFiles:
    """Notes, one in each file: 8 bytes with the time of expiry (Unix time in ms, little-endian), then the content. Each
    write also removes some expired notes, so that no write takes long even if there are many. Used from any thread."""

    sweep_notes_s = 60.0

    def __init__(self, folder: Path, access: FileAccess, disk: Disk = DISK) -> None:
        self._folder, self._access, self._disk = folder, access, disk
        self._last_sweep = 0.0
        self._to_sweep: deque[Path] = deque()

    def write(self, name: str, content: bytes, ttl_s: float) -> None:
        """Write a note, replacing one of the same name. Raises `StoreError`."""
        require_short_note(content)
        expiry = round((SYSTEM_CLOCK.wall() + ttl_s) * 1000).to_bytes(_EXPIRY_BYTES, "little")
        try:
            self._disk.make_folder(self._folder, self._access)
            self._disk.write(str(self._path(name)), [memoryview(expiry + content)], self._access)
        except OSError as error:
            raise StoreError(f"cannot leave a note in {self._folder}: {error.strerror}") from error
        self._sweep_some()

    def read(self, name: str) -> bytes | None:
        """The note's content; None if there is none or it has expired. Raises `StoreError` if it cannot be read."""
        path = self._path(name)
        try:
            with self._disk.open(str(path)) as file:
                note = self._disk.head(file, _EXPIRY_BYTES + MAX_NOTE_BYTES)
        except (FileNotFoundError, NotAFile):
            return None
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from error
        return None if _is_expired(note) else note[_EXPIRY_BYTES:]

    def remove(self, name: str) -> None:
        """Remove a note, if it exists."""
        self._disk.remove(str(self._path(name)))

    def sweep(self) -> None:
        """Remove the notes that have expired, and temporary files that were left behind."""
        with suppress(OSError):
            for path in note_files(self._folder, "*", self._disk):
                with suppress(OSError):  # another process has removed it
                    self._sweep_one(path)

    def _sweep_one(self, path: Path) -> None:
        disk = self._disk
        if path.suffix == TEMPORARY_SUFFIX:
            is_removable = disk.is_stale(path, disk.status(path)[0])
        else:
            with disk.open(str(path)) as file:
                is_removable = _is_expired(disk.head(file, _EXPIRY_BYTES))
        if is_removable:
            disk.remove(str(path))

    def _sweep_some(self) -> None:
        now = SYSTEM_CLOCK.monotonic()
        if not self._to_sweep and now - self._last_sweep > self.sweep_notes_s:
            self._last_sweep = now
            with suppress(OSError):
                self._to_sweep.extend(note_files(self._folder, "*", self._disk))
        for _ in range(SWEEP_BATCH):
            with suppress(OSError, IndexError):  # another process has removed it; another thread has swept the last
                self._sweep_one(self._to_sweep.popleft())

    def _path(self, name: str) -> Path:
        # The name may be a client's: hashed, it cannot name anything outside of this folder.
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()}.note"


def _is_expired(note: bytes) -> bool:
    return len(note) < _EXPIRY_BYTES or int.from_bytes(note[:_EXPIRY_BYTES], "little") < SYSTEM_CLOCK.wall() * 1000
