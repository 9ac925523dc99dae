"""Files that appear whole or not at all, and the small ones that are notes between instances."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import stat
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import StoreError
from kvferry.store.access import FileAccess
from kvferry.store.base import MAX_NOTE_BYTES
from kvferry.store.record import write_all

TEMPORARY_SUFFIX = ".tmp"
STALE_TEMPORARY_S = 3600.0
"""Of another machine; of this one they are stale when their process is gone."""
TOUCH_S = 60.0
"""A file's time of use is renewed when it is older than this, to spare the disk."""
_EXPIRY_BYTES = 8
SWEEP_NOTES_S = 60.0


def write_file(path: str, views: Sequence[memoryview], access: FileAccess, *, fsync: bool = False) -> None:
    """Write a temporary file beside the final one and rename it. May raise `OSError`; then nothing is left."""
    temporary = f"{path}.{_machine()}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(temporary, flags, access.file_mode)
    except FileNotFoundError:
        access.make_folder(Path(temporary).parent)
        descriptor = os.open(temporary, flags, access.file_mode)
    try:
        try:
            write_all(descriptor, views)
            if fsync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)  # noqa: PTH104 - plain strings, as everywhere on this path
        if fsync:
            _fsync_folder(path)
    except BaseException:
        remove_file(temporary)
        raise


def is_stale(path: Path, modified_s: float) -> bool:
    """Whether a temporary file is one that nobody writes any more."""
    machine, pid = path.name.split(".")[-4:-2] if path.name.count(".") >= 4 else ("", "")
    if machine == _machine() and pid.isdigit():
        return not Path(f"/proc/{pid}").exists()
    return SYSTEM_CLOCK.wall() - modified_s > STALE_TEMPORARY_S


def touch_descriptor(descriptor: int) -> None:
    """Renew an open file's time of use, if it is old."""
    with suppress(OSError):  # a store that may only be read has no say in what is evicted
        if SYSTEM_CLOCK.wall() - os.fstat(descriptor).st_mtime > TOUCH_S:
            os.utime(descriptor)


def touch_path(path: str) -> bool:
    """Renew a file's time of use; False when it is not there, or is another user's that this one may not read."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    except PermissionError:  # another user's, so its time is theirs to renew
        return os.access(path, os.R_OK, effective_ids=True)
    return True


def is_readable(path: str, status: os.stat_result) -> bool:
    """Whether this process may read the file of which this is the status."""
    own = status.st_uid == os.geteuid() and bool(status.st_mode & stat.S_IRUSR)
    return own or os.access(path, os.R_OK, effective_ids=True)


def remove_file(path: str) -> bool:
    """Whether it was there and is not any more."""
    try:
        os.unlink(path)  # noqa: PTH108 - see above
        return True
    except OSError:
        return False


class NoteFiles:
    """Notes, one a file: 8 bytes of when it is over (Unix time, ms), then what it says. Swept when that has passed."""

    def __init__(self, folder: Path, access: FileAccess) -> None:
        self._folder, self._access = folder, access
        self._last_sweep = 0.0

    def write(self, name: str, content: bytes, ttl_s: float) -> None:
        """Leave a note, in place of one that is there. Raises `StoreError`."""
        if len(content) > MAX_NOTE_BYTES:
            raise StoreError(f"a note of {len(content)} bytes, and {MAX_NOTE_BYTES} is the most")
        over = round((SYSTEM_CLOCK.wall() + ttl_s) * 1000).to_bytes(_EXPIRY_BYTES, "little")
        try:
            self._access.make_folder(self._folder)
            write_file(str(self._path(name)), [memoryview(over + content)], self._access)
        except OSError as error:
            raise StoreError(f"cannot leave a note in {self._folder}: {error.strerror}") from error
        self._sweep_now_and_then()

    def read(self, name: str) -> bytes | None:
        """What it says. Raises `StoreError` when it cannot be read."""
        path = self._path(name)
        try:
            with path.open("rb") as file:
                found = file.read(_EXPIRY_BYTES + MAX_NOTE_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from error
        return None if _is_over(found) else found[_EXPIRY_BYTES:]

    def remove(self, name: str) -> None:
        """Remove it, if it is there."""
        remove_file(str(self._path(name)))

    def sweep(self) -> None:
        """Remove those whose time has passed."""
        with suppress(OSError):
            for path in self._folder.iterdir():
                with suppress(OSError):  # another process swept it first
                    self._sweep_one(path)

    def _sweep_one(self, path: Path) -> None:
        if path.suffix == TEMPORARY_SUFFIX:
            over = is_stale(path, path.stat().st_mtime)
        else:
            with path.open("rb") as file:
                over = _is_over(file.read(_EXPIRY_BYTES))
        if over:
            path.unlink()

    def _sweep_now_and_then(self) -> None:
        now = SYSTEM_CLOCK.monotonic()
        if now - self._last_sweep > SWEEP_NOTES_S:
            self._last_sweep = now
            self.sweep()

    def _path(self, name: str) -> Path:
        # The name may be a client's: hashed, it cannot name anything outside of this folder.
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()}.note"


def _is_over(note: bytes) -> bool:
    return len(note) < _EXPIRY_BYTES or int.from_bytes(note[:_EXPIRY_BYTES], "little") < SYSTEM_CLOCK.wall() * 1000


@cache
def _machine() -> str:
    """A short name of this machine since it was started, and of this container's processes."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with suppress(OSError):
            source = Path(path)
            parts.append(str(source.readlink()) if source.is_symlink() else source.read_text())
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:12]


def _fsync_folder(path: str) -> None:
    """So that the name survives too."""
    descriptor = os.open(str(Path(path).parent), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
