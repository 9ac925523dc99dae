"""Memory that the processes of one machine and user share by a name, for as long as one of them is there.

Owns the segment (anonymous memory, `memfd_create`), the file by which processes find each other, and the lock. Nothing
can be left behind: with the last process, however it ends, the memory goes, and all that stays is a file of a few bytes
that the next one reuses. It does not know what lies in the memory.

The lock is the kernel's (`flock`): the death of its holder frees it, and `broken` tells the next one that something may
be half done.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError, StoreError

LOCK_S = 2.0
LOCK_POLL_S = 0.0002
_DIRTY_AT = 8
"""Where in the segment the flag is that says that a lock's holder is at work. The 8 bytes before are the user's."""
RESERVED_BYTES = 16


class Arena:
    """`name`: letters that make a file name. `num_bytes` is the same in all processes that share it."""

    def __init__(self, name: str, num_bytes: int) -> None:
        """Raises `ConfigError` when the machine has not that much memory."""
        self._label = f"kvferry-{name}"
        self._path = _meeting_place() / f"{name}.members"
        self._thread_lock = threading.Lock()
        with self._meeting() as members:
            self._descriptor = self._join(members, num_bytes)
        try:
            self._mapping = mmap.mmap(self._descriptor, num_bytes)
        except (OSError, ValueError) as error:
            os.close(self._descriptor)
            raise ConfigError(f"cannot map {num_bytes} bytes of shared memory: {error}") from error
        self.buffer = memoryview(self._mapping)
        self.is_closed = False

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Alone in this memory, of all threads and processes. Gives whether the last holder died at work.

        Raises `StoreError` when another does not let go of it.
        """
        if not self._thread_lock.acquire(timeout=LOCK_S):
            raise StoreError("the memory store is busy")
        try:
            if self.is_closed:
                raise StoreError("the memory store is closed")
            self._lock()
            try:
                broken, self._mapping[_DIRTY_AT] = bool(self._mapping[_DIRTY_AT]), 1
                yield broken
                self._mapping[_DIRTY_AT] = 0
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        finally:
            self._thread_lock.release()

    def address(self, offset: int) -> int:
        """Where this byte is in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._mapping, offset))

    def close(self) -> None:
        """Leave; the memory stays as long as others are there."""
        with self._thread_lock:
            if self.is_closed:
                return
            self.is_closed = True
            self.buffer.release()
            with suppress(BufferError):  # somebody still looks at it: unmapped with the last view
                self._mapping.close()
            os.close(self._descriptor)
        with suppress(ConfigError), self._meeting():
            pass  # forget this process

    # How processes find each other.

    @contextmanager
    def _meeting(self) -> Iterator[list[tuple[int, int]]]:
        """The members (process, descriptor) that are there, with nobody else joining meanwhile; may be appended to."""
        with _open_members(self._path) as file:
            deadline = SYSTEM_CLOCK.monotonic() + LOCK_S
            while not _try_lock(file.fileno()):
                if SYSTEM_CLOCK.monotonic() > deadline:
                    raise ConfigError(f"{self._path} is locked by another process")
                time.sleep(LOCK_POLL_S)
            members = [(int(pid), int(number)) for pid, number in map(str.split, file.read().splitlines())]
            members = [member for member in members if self._is_there(member)]
            yield members
            file.seek(0)
            file.truncate()
            file.write("".join(f"{pid} {number}\n" for pid, number in members))

    def _is_there(self, member: tuple[int, int]) -> bool:
        with suppress(OSError):
            return str(_descriptor_path(member).readlink()).startswith(f"/memfd:{self._label} ")
        return False

    def _join(self, members: list[tuple[int, int]], num_bytes: int) -> int:
        for member in members:
            with suppress(OSError):
                descriptor = os.open(_descriptor_path(member), os.O_RDWR | os.O_CLOEXEC)
                if os.fstat(descriptor).st_size == num_bytes:
                    members.append((os.getpid(), descriptor))
                    return descriptor
                os.close(descriptor)
        descriptor = _make(self._label, num_bytes)
        members.append((os.getpid(), descriptor))
        return descriptor

    def _lock(self) -> None:
        deadline = SYSTEM_CLOCK.monotonic() + LOCK_S
        while not _try_lock(self._descriptor):
            if SYSTEM_CLOCK.monotonic() > deadline:
                raise StoreError("another process does not let go of the memory store's lock")
            time.sleep(LOCK_POLL_S)


def _descriptor_path(member: tuple[int, int]) -> Path:
    return Path(f"/proc/{member[0]}/fd/{member[1]}")


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def _open_members(path: Path):  # type: ignore[no-untyped-def]
    try:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "r+")
    except OSError as error:
        raise ConfigError(f"cannot use {path} to share memory: {error.strerror}") from error


def _make(label: str, num_bytes: int) -> int:
    free = psutil.virtual_memory().available
    descriptor = os.memfd_create(label, os.MFD_CLOEXEC)
    try:
        if num_bytes > free:  # the kernel would kill somebody rather than refuse
            raise OSError(0, "not enough memory")
        os.posix_fallocate(descriptor, 0, num_bytes)  # now: later, lack of memory would show as SIGBUS
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(
            f"store memory: cannot take {num_bytes / 2**20:.0f} MiB of shared memory: {error.strerror};"
            f" {free / 2**20:.0f} MiB are free"
        ) from error
    return descriptor


def _meeting_place() -> Path:
    """A folder that is this user's alone."""
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"kvferry-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ConfigError(f"cannot use {folder} to share memory: {error.strerror}") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or not folder.is_dir():
        raise ConfigError(f"{folder} must be a folder that belongs to this user alone")
    return folder
