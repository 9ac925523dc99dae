"""Files that appear completely or not at all, and notes between instances as such files."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import socket
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from kvferry.core import entropy
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import StoreError
from kvferry.store.access import FileAccess
from kvferry.store.base import MAX_NOTE_BYTES, require_short_note
from kvferry.store.record import write_all

TEMPORARY_SUFFIX = ".tmp"
STALE_TEMPORARY_S = 3600.0
"""Age at which a temporary file of another machine counts as left behind; one of this machine does when its process is
gone."""
TOUCH_S = 60.0
"""A file's modification time is renewed by a read only if it is older than this, to spare the disk."""
_NOTE_FILE = re.compile(rf"[0-9a-f]{{64}}\.note(?:\.[^/]*\{TEMPORARY_SUFFIX})?\Z")
_EXPIRY_BYTES = 8
SWEEP_NOTES_S = 60.0


def write_file(path: str, views: Sequence[memoryview], access: FileAccess, *, fsync: bool = False) -> None:
    """Write a temporary file beside the final one, and rename it. May raise `OSError`; then nothing is left behind."""
    temporary = f"{path}.{_machine()}.{os.getpid()}.{entropy.token_hex(4)}{TEMPORARY_SUFFIX}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(temporary, flags, access.file_mode)
    except FileNotFoundError:
        access.make_folder(Path(temporary).parent)
        descriptor = os.open(temporary, flags, access.file_mode)
    try:
        try:
            _allocate(descriptor, sum(map(len, views)))
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


class NotAFile(OSError):
    """There is something other than a plain file, such as a FIFO, a read of which might never end."""


@contextmanager
def open_file(path: str) -> Iterator[int]:
    """The descriptor of a file that is open for reading. May raise `OSError`: `NotAFile` if it is not a plain file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotAFile(errno.EINVAL, "it is not a plain file")
        yield descriptor
    finally:
        os.close(descriptor)


def _allocate(descriptor: int, num_bytes: int) -> None:
    """Allocate the file at once, which is faster than growing it and reports a full disk before anything is written.
    File systems that cannot do this are left alone."""
    try:
        if num_bytes:
            os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def is_stale(path: Path, modified_s: float) -> bool:
    """Whether a temporary file belongs to a process that no longer writes it."""
    machine, pid = path.name.split(".")[-4:-2] if path.name.count(".") >= 4 else ("", "")
    if machine == _machine() and pid.isdigit():
        return not Path(f"/proc/{pid}").exists()
    return SYSTEM_CLOCK.wall() - modified_s > STALE_TEMPORARY_S


def touch_descriptor(descriptor: int) -> None:
    """Renew an open file's modification time if it is older than `TOUCH_S`. Errors are ignored: a process that may only
    read a store does not influence its eviction."""
    with suppress(OSError):  # who may only read a store does not influence its eviction
        if SYSTEM_CLOCK.wall() - os.fstat(descriptor).st_mtime > TOUCH_S:
            os.utime(descriptor)


def touch_path(path: str) -> bool:
    """Renew a file's modification time. False: it is not there, or this process may not read it."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    except PermissionError:  # another user's file: only that user may set its times
        return os.access(path, os.R_OK, effective_ids=True)
    return True


def is_readable(path: str, status: os.stat_result) -> bool:
    """Whether this process may read the file with this status."""
    own = status.st_uid == os.geteuid() and bool(status.st_mode & stat.S_IRUSR)
    return own or os.access(path, os.R_OK, effective_ids=True)


def remove_file(path: str) -> bool:
    """Remove a file. False: it was not there, or cannot be removed."""
    try:
        os.unlink(path)  # noqa: PTH108 - see above
        return True
    except OSError:
        return False


def note_files(folder: Path, pattern: str) -> list[Path]:
    """Names of files that are notes or temporary files of notes. All other files belong to other programs."""
    return [path for path in folder.glob(pattern) if _NOTE_FILE.match(path.name)]


class NoteFiles:
    """Notes, one in each file: 8 bytes with the time of expiry (Unix time in ms, little-endian), then the content.
    Expired ones are removed now and then. Any thread."""

    def __init__(self, folder: Path, access: FileAccess) -> None:
        self._folder, self._access = folder, access
        self._last_sweep = 0.0

    def write(self, name: str, content: bytes, ttl_s: float) -> None:
        """Write a note, replacing one of the same name. Raises `StoreError`."""
        require_short_note(content)
        over = round((SYSTEM_CLOCK.wall() + ttl_s) * 1000).to_bytes(_EXPIRY_BYTES, "little")
        try:
            self._access.make_folder(self._folder)
            write_file(str(self._path(name)), [memoryview(over + content)], self._access)
        except OSError as error:
            raise StoreError(f"cannot leave a note in {self._folder}: {error.strerror}") from error
        self._sweep_now_and_then()

    def read(self, name: str) -> bytes | None:
        """The note's content; None if there is none or it has expired. Raises `StoreError` if it cannot be read."""
        path = self._path(name)
        try:
            with open_file(str(path)) as descriptor:
                found = os.read(descriptor, _EXPIRY_BYTES + MAX_NOTE_BYTES)
        except (FileNotFoundError, NotAFile):
            return None
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from error
        return None if _is_over(found) else found[_EXPIRY_BYTES:]

    def remove(self, name: str) -> None:
        remove_file(str(self._path(name)))

    def sweep(self) -> None:
        """Remove the notes that have expired, and temporary files that were left behind."""
        with suppress(OSError):
            for path in note_files(self._folder, "*"):
                with suppress(OSError):  # another process has removed it
                    self._sweep_one(path)

    def _sweep_one(self, path: Path) -> None:
        if path.suffix == TEMPORARY_SUFFIX:
            over = is_stale(path, path.stat().st_mtime)
        else:
            with open_file(str(path)) as descriptor:
                over = _is_over(os.read(descriptor, _EXPIRY_BYTES))
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
    """Identifies this machine since its last start, and this container's process ids."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with suppress(OSError):
            source = Path(path)
            parts.append(str(source.readlink()) if source.is_symlink() else source.read_text())
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:12]


def _fsync_folder(path: str) -> None:
    """Make a file's name as durable as its content."""
    descriptor = os.open(str(Path(path).parent), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
