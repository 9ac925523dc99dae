"""Memory that the processes of one user on one machine share under a name, for as long as one of them is attached.

Owns the segment (anonymous memory, `memfd_create`), the file by which processes find each other, and the lock. The
memory is freed when the last process ends, however it ends. Only a file of a few bytes remains, which the next process
reuses. The caller decides what the memory contains.

The lock is the kernel's (`flock`): it is released when its holder dies, and the next holder learns that a change may be
incomplete.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import mmap
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError, StoreError
from kvferry.core.folders.cache_dirs import user_runtime_dirs
from kvferry.core.folders.private_folder import private_folder
from kvferry.core.host.machine import usable_memory

_DIRTY_AT = 8
"""Offset of the byte that is 1 while a holder of the lock works. The 8 bytes before it are the caller's."""
RESERVED_BYTES = 16
"""Bytes at the beginning of the segment that hold the caller's 8 bytes and the flag."""


class Arena:
    """A segment of `num_bytes`, attached under `name`, which must be usable as a file name. Processes that give another
    size get another segment. `buffer`: the whole segment. Used from any thread."""

    lock_poll_s = 0.0002
    lock_s = 2.0

    def __init__(self, name: str, num_bytes: int) -> None:
        """Attach to the segment, or create it. Raises `ConfigError` if the machine has less free memory, or if the
        directory for shared files cannot be used."""
        self._label = f"kvferry-{name}"
        self._path = _rendezvous_folder() / f"{name}.members"
        self._thread_lock = threading.Lock()
        self._descriptor = self._attach(num_bytes)
        try:
            self._mapping = mmap.mmap(self._descriptor, num_bytes)
        except (OSError, ValueError) as error:
            os.close(self._descriptor)
            raise ConfigError(f"cannot map {num_bytes} bytes of shared memory: {error}") from error
        self.buffer = memoryview(self._mapping)
        self.is_closed = False

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Hold the lock, which excludes all other threads and processes. Yields True if the last holder died while it
        held the lock.

        Raises `StoreError` if the lock is not free within `lock_s`, or after `close`.
        """
        if not self._thread_lock.acquire(timeout=self.lock_s):
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

    @property
    def identity(self) -> tuple[int, int]:
        """This process: its id, and when it began, in the kernel's ticks since boot."""
        return os.getpid(), _own_start_ticks(os.getpid())

    def is_alive(self, identity: tuple[int, int]) -> bool:
        """True if the process with this `identity` exists."""
        pid, start_ticks = identity
        return (_own_start_ticks(pid) if pid == os.getpid() else _start_ticks(pid)) == start_ticks

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Memory from which blocks are copied, or to which. Do not call this while the lock is held: in a simulation,
        it takes time."""
        return self.buffer[offset : offset + num_bytes]

    def address(self, offset: int) -> int:
        """The address of the byte at `offset`, in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._mapping, offset))

    def close(self) -> None:
        """Detach. The memory is freed when the last process has detached."""
        with self._thread_lock:
            if self.is_closed:
                return
            self.is_closed = True
            with suppress(BufferError):  # a view still exists: the memory is unmapped with the last one
                self.buffer.release()
                self._mapping.close()
            os.close(self._descriptor)
        with suppress(ConfigError), self._locked_members():
            pass  # entering it removes this process from the members

    # How processes find each other.

    @contextmanager
    def _locked_members(self) -> Iterator[list[tuple[int, int]]]:
        """The attached processes as (pid, descriptor), without those that have died. Excludes other processes that
        attach or detach; the caller may append to the list."""
        with _open_members(self._path) as file:
            deadline = SYSTEM_CLOCK.monotonic() + self.lock_s
            while not _try_lock(file.fileno()):
                if SYSTEM_CLOCK.monotonic() > deadline:
                    raise ConfigError(f"{self._path} is locked by another process")
                time.sleep(self.lock_poll_s)
            # A process that was killed while it wrote may have left a torn line.
            lines = re.findall(r"^(\d{1,9}) (\d{1,9})$", file.read(), re.MULTILINE)
            members = [
                member for member in ((int(pid), int(number)) for pid, number in lines) if self._is_attached(member)
            ]
            yield members
            content = "".join(f"{pid} {number}\n" for pid, number in members).encode()
            try:
                os.pwrite(file.fileno(), content, 0)  # first: if the disk is full, the list stays unchanged
                os.ftruncate(file.fileno(), len(content))
            except OSError as error:
                raise ConfigError(f"cannot use {self._path} to share memory: {error.strerror}") from error

    def _is_attached(self, member: tuple[int, int]) -> bool:
        with suppress(OSError):
            return str(_descriptor_path(member).readlink()).startswith(f"/memfd:{self._label} ")
        return False

    def _attach(self, num_bytes: int) -> int:
        """A descriptor of the segment."""
        descriptor: int | None = None
        try:
            with self._locked_members() as members:
                descriptor = self._join(members, num_bytes)
        except BaseException:
            if descriptor is not None:
                os.close(descriptor)
            raise
        return descriptor

    def _join(self, members: list[tuple[int, int]], num_bytes: int) -> int:
        for member in members:
            with suppress(OSError):
                descriptor = os.open(_descriptor_path(member), os.O_RDWR | os.O_CLOEXEC)
                if os.fstat(descriptor).st_size == num_bytes:
                    members.append((os.getpid(), descriptor))
                    return descriptor
                os.close(descriptor)
        descriptor = _create_segment(self._label, num_bytes)
        members.append((os.getpid(), descriptor))
        return descriptor

    def _lock(self) -> None:
        deadline = SYSTEM_CLOCK.monotonic() + self.lock_s
        while not _try_lock(self._descriptor):
            if SYSTEM_CLOCK.monotonic() > deadline:
                raise StoreError("another process holds the lock of the memory store and does not release it")
            time.sleep(self.lock_poll_s)


@cache
def _own_start_ticks(pid: int) -> int:
    return _start_ticks(pid)


def _start_ticks(pid: int) -> int:
    """When a process began, in the kernel's ticks since boot; 0: there is no such process."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(status.rpartition(")")[2].split()[19])


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


def _create_segment(label: str, num_bytes: int) -> int:
    free = usable_memory().available
    descriptor = os.memfd_create(label, os.MFD_CLOEXEC)
    try:
        if num_bytes > free:  # the kernel would kill a process rather than refuse
            raise OSError(0, "not enough memory")
        os.posix_fallocate(descriptor, 0, num_bytes)  # now: later, lack of memory would show as SIGBUS
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(
            f"store memory: cannot take {num_bytes / 2**20:.0f} MiB of shared memory: {error.strerror};"
            f" {free / 2**20:.0f} MiB are free"
        ) from error
    return descriptor


def rendezvous_id() -> str:
    """Equal for processes that could share an arena: of one user on one machine, which see each other's process ids."""
    parts = [str(os.getuid())]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:12]


def _rendezvous_folder() -> Path:
    """The directory for the files by which processes find each other; only this user can access it. Raises
    `ConfigError`."""
    try:
        return private_folder(f"kvferry-{os.getuid()}", user_runtime_dirs())
    except ConfigError as error:
        raise ConfigError(f"memory cannot be shared: {error}") from error
