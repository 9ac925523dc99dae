"""File operations of the stores; a written file appears completely or not at all.

`Disk` has all file operations of the stores; a simulation replaces it (`store.machine`).
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from kvferry.core import entropy
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.store.access import FileAccess
from kvferry.store.record import read_exactly, write_all

TEMPORARY_SUFFIX = ".tmp"
TOUCH_S = 60.0
"""Reading a file renews its modification time only if that is older than this, to save writes."""


class NotAFile(OSError):
    """The path is not a plain file but, for example, a FIFO, and reading it might never end."""


class Disk:
    """The file systems of this machine. Methods may raise `OSError` unless their docstring says otherwise. Used from
    any thread.

    Paths are plain strings where blocks are read and written: making a `Path` takes longer than some of the calls.
    """

    stale_temporary_s = 3600.0
    """Age in seconds at which a temporary file of another machine counts as abandoned. A temporary file of this machine
    counts as abandoned when its process is gone."""

    def make_folder(self, path: Path, access: FileAccess) -> None:
        """Make a directory and its missing parents."""
        access.make_folder(path)

    def require_access(self, folder: Path) -> None:
        """Raise `PermissionError` unless this process may use a directory."""
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def write(self, path: str, views: Sequence[memoryview], access: FileAccess, *, fsync: bool = False) -> None:
        """Write a temporary file beside the final one, and rename it. If this raises, no temporary file is left; with
        `fsync`, the final file may exist."""
        temporary = f"{path}.{_machine()}.{os.getpid()}.{entropy.token_hex(4)}{TEMPORARY_SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            descriptor = os.open(temporary, flags, access.file_mode)
        except FileNotFoundError:
            access.make_folder(Path(temporary).parent)
            descriptor = os.open(temporary, flags, access.file_mode)
        try:
            try:
                self._preallocate(descriptor, sum(map(len, views)))
                write_all(descriptor, views)
                if fsync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.rename(temporary, path)  # noqa: PTH104 - see above
            if fsync:
                _fsync_folder(path)
        except BaseException:
            self.remove(temporary)
            raise

    def allocate(self, descriptor: int, num_bytes: int) -> None:
        """Allocate an open file's bytes at once."""
        os.posix_fallocate(descriptor, 0, num_bytes)

    def _preallocate(self, descriptor: int, num_bytes: int) -> None:
        """Allocate the file before it is written: this is faster than growing it, and a full disk is noticed before
        anything is written. Does nothing on file systems that cannot do this."""
        try:
            if num_bytes:
                self.allocate(descriptor, num_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise

    # Open files, by their descriptors.

    @contextmanager
    def open(self, path: str) -> Iterator[int]:
        """The descriptor of a file that is open for reading. Raises `NotAFile` if it is not a plain file."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise NotAFile(errno.EINVAL, "it is not a plain file")
            yield descriptor
        finally:
            os.close(descriptor)

    def num_bytes(self, descriptor: int) -> int:
        """The size of an open file."""
        return os.fstat(descriptor).st_size

    def read(self, descriptor: int, views: Sequence[memoryview], offset: int) -> None:
        """Fill all views from `offset` on. Raises `CorruptBlock` if the file is too short."""
        read_exactly(descriptor, views, offset)

    def head(self, descriptor: int, max_bytes: int) -> bytes:
        """The beginning of an open file."""
        return os.read(descriptor, max_bytes)

    def touch_open(self, descriptor: int) -> None:
        """Renew an open file's modification time if it is older than `TOUCH_S`. Errors are ignored: a process with
        read-only access does not influence eviction."""
        with suppress(OSError):
            if SYSTEM_CLOCK.wall() - os.fstat(descriptor).st_mtime > TOUCH_S:
                os.utime(descriptor)

    # Files by their paths.

    def touch(self, path: str) -> bool:
        """Renew a file's modification time. False: it does not exist, or this process may not read it."""
        try:
            os.utime(path)
        except FileNotFoundError:
            return False
        except PermissionError:  # another user's file: only that user may set its times
            return os.access(path, os.R_OK, effective_ids=True)
        return True

    def is_readable(self, path: str) -> bool:
        """True if this process may read the file. Raises `FileNotFoundError`."""
        status = os.stat(path)  # noqa: PTH116 - see above
        is_owned = status.st_uid == os.geteuid() and bool(status.st_mode & stat.S_IRUSR)
        return is_owned or os.access(path, os.R_OK, effective_ids=True)

    def exists(self, path: str) -> bool:
        """True if the file exists. Never raises."""
        return Path(path).exists()

    def remove(self, path: str) -> bool:
        """Remove a file. False: it did not exist, or cannot be removed. Never raises."""
        try:
            os.unlink(path)  # noqa: PTH108 - see above
            return True
        except OSError:
            return False

    # Directories.

    def glob(self, folder: Path, pattern: str) -> Iterable[Path]:
        """Files and directories in a directory whose name matches."""
        return folder.glob(pattern)

    def status(self, path: Path) -> tuple[float, int]:
        """When a file was last modified (s since the epoch), and its size."""
        status = path.stat()
        return status.st_mtime, status.st_size

    def is_stale(self, path: Path, modified_s: float) -> bool:
        """True if the writer of a temporary file no longer writes it. Never raises."""
        machine, pid = path.name.split(".")[-4:-2] if path.name.count(".") >= 4 else ("", "")
        if machine == _machine() and pid.isdigit():
            return not Path(f"/proc/{pid}").exists()
        return SYSTEM_CLOCK.wall() - modified_s > self.stale_temporary_s


DISK = Disk()
"""The file systems of this machine."""


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
