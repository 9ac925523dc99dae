"""Leadership by a lock on a file, in which the controller writes its process id and, about once a second, a heartbeat.

A controller that ends, in any way, loses the lock. A controller that hangs (stopped, or waiting for a disk that does
not answer) keeps it: commands of the fleet recognise such a controller by `silent_s`, and kill it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import msgspec

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.fleet.control.leadership import Leadership
from kvferry.fleet.processes.start_time import started_at


class LeaderRecord(msgspec.Struct, frozen=True):
    """The controller that leads. `start_ticks`: start time of its process, as `started_at` returns it.
    `last_heartbeat_s`: time of its last heartbeat, in seconds of the monotonic clock, which all processes of a machine
    share. `follows_file`: it keeps the fleet as a file describes it."""

    hung_s: ClassVar[float] = 20.0
    """Seconds without a heartbeat after which a controller counts as hung."""

    pid: int
    start_ticks: int = msgspec.field(name="started")
    last_heartbeat_s: float = msgspec.field(name="beat")
    follows_file: bool = msgspec.field(default=False, name="follows")

    @property
    def silent_s(self) -> float:
        """Seconds since the last heartbeat."""
        return max(0.0, SYSTEM_CLOCK.monotonic() - self.last_heartbeat_s)

    @property
    def hangs(self) -> bool:
        """True if the controller has written no heartbeat for `hung_s`."""
        return self.silent_s > self.hung_s

    def kill(self) -> None:
        """Kill its process, unless the process id belongs to another process now."""
        with suppress(OSError):
            descriptor = os.pidfd_open(self.pid)
            try:
                if started_at(self.pid) == self.start_ticks:
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            finally:
                os.close(descriptor)


class FileLeadership(Leadership):
    """The lock on the file at `path`, until `close` or the end of this process. `follows_file`: as in
    `LeaderRecord`."""

    heartbeat_interval_s = 1.0
    """Seconds between two heartbeats."""

    def __init__(self, path: Path, *, follows_file: bool = False) -> None:
        self._path, self._follows_file = path, follows_file
        self._descriptor, self._started = -1, started_at(os.getpid())

    @property
    def is_held(self) -> bool:
        """True if this process has the lock."""
        return self._descriptor >= 0

    def try_lock(self) -> bool:
        """Lock the file; False: another controller has it. Raises `OSError`."""
        if not self.is_held and (descriptor := lock_file(self._path)) is not None:
            self._descriptor = descriptor
            self.write()
        return self.is_held

    async def try_acquire(self) -> bool:
        """Calls `try_lock`, which does not block."""
        return self.try_lock()

    def write(self) -> None:
        """Write the record of this process. Always writes the same number of bytes at the same offset, so that this
        also works on a full disk."""
        now = round(SYSTEM_CLOCK.monotonic(), 3)
        text = msgspec.json.encode(LeaderRecord(os.getpid(), self._started, now, self._follows_file))
        with suppress(OSError):
            os.pwrite(self._descriptor, text.ljust(128), 0)

    async def heartbeat(self) -> None:
        """Write the record every `heartbeat_interval_s`. This stops when the event loop hangs."""
        while self.is_held:
            self.write()
            await asyncio.sleep(self.heartbeat_interval_s)

    async def release(self) -> None:
        """Release the lock, so that another controller may lead."""
        self.close()

    async def remove(self) -> None:
        """Release the lock. The file is removed with its folder."""
        self.close()

    def close(self) -> None:
        """Release the lock, so that another controller may lead."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_held(path: Path) -> bool:
    """True if a controller has the lock. Does not lock the file, and does not create it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _try_flock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def holder(path: Path) -> LeaderRecord | None:
    """The controller that has the lock; None: there is none, or it has not written its record yet."""
    if not is_held(path):
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=LeaderRecord)
    except (OSError, ValueError):
        return None


def lock_file(path: Path) -> int | None:
    """Lock the file until the returned descriptor is closed. The file is created if necessary. None: another process
    has locked it. Raises `OSError`."""
    while True:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (FileNotFoundError, FileExistsError):
            if os.path.lexists(path.parent) and not path.parent.is_dir():
                raise  # something else is where the folder is to be
            continue  # the folder has just been removed
        if not _try_flock(descriptor, fcntl.LOCK_EX):
            os.close(descriptor)
            return None
        if _is_same_file(path, descriptor):
            return descriptor
        os.close(descriptor)


def _is_same_file(path: Path, descriptor: int) -> bool:
    """True if the file was not removed while it was being locked: the next process would lock another file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _try_flock(descriptor: int, operation: int) -> bool:
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
