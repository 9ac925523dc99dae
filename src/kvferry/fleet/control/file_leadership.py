"""The right to act on a fleet, which one controller has at a time: a lock on a file, in which it says who it is and,
about once a second, that it still looks after the fleet.

A controller that ends, in whatever way, has the right no more. One that hangs (stopped, or waiting for a disk that does
not answer) would keep it: whoever wants something of the fleet sees that by `silent_s`, and ends it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
from contextlib import suppress
from pathlib import Path

import msgspec

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.fleet.control.leadership import Leadership
from kvferry.fleet.processes.start_time import started_at

BEAT_S = 1.0
HUNG_S = 20.0
"""Seconds after which a controller that has not looked after its fleet counts as hung."""


class LeaderRecord(msgspec.Struct, frozen=True):
    """The controller that acts. `started`: as in `started_at`. `beat`: when it was last seen, in seconds of the
    monotonic clock, which all processes of a machine share. `follows`: it has the fleet be as a file says."""

    pid: int
    started: int
    beat: float
    follows: bool = False

    @property
    def silent_s(self) -> float:
        """Seconds since the holder was last seen."""
        return max(0.0, SYSTEM_CLOCK.monotonic() - self.beat)

    @property
    def hangs(self) -> bool:
        """Whether it looks after nothing any more."""
        return self.silent_s > HUNG_S

    def kill(self) -> None:
        """End its process, if that is still the same."""
        with suppress(OSError):
            descriptor = os.pidfd_open(self.pid)
            try:
                if started_at(self.pid) == self.started:
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            finally:
                os.close(descriptor)


class FileLeadership(Leadership):
    """The lock on the file at `path`, until `close` or the end of this process. `follows`: as in `LeaderRecord`."""

    def __init__(self, path: Path, *, follows: bool = False) -> None:
        self._path, self._follows = path, follows
        self._descriptor, self._started = -1, started_at(os.getpid())

    @property
    def is_held(self) -> bool:
        """True if this process has the lock."""
        return self._descriptor >= 0

    def try_lock(self) -> bool:
        """Lock the file; False: another controller has it. Raises `OSError`."""
        if not self.is_held and (descriptor := locked(self._path)) is not None:
            self._descriptor = descriptor
            self.write()
        return self.is_held

    async def try_acquire(self) -> bool:
        """As `try_lock`, which does not block."""
        return self.try_lock()

    def write(self) -> None:
        """Write that this process manages the fleet. Always as many bytes at the same offset, so that a full disk has
        room for them."""
        now = round(SYSTEM_CLOCK.monotonic(), 3)
        text = msgspec.json.encode(LeaderRecord(os.getpid(), self._started, now, self._follows))
        with suppress(OSError):
            os.pwrite(self._descriptor, text.ljust(128), 0)

    async def heartbeat(self) -> None:
        """Write it again and again, for as long as this process's event loop turns."""
        while self.is_held:
            self.write()
            await asyncio.sleep(BEAT_S)

    async def release(self) -> None:
        """Let another controller act."""
        self.close()

    async def remove(self) -> None:
        """Release it: the file goes with its folder."""
        self.close()

    def close(self) -> None:
        """Let another controller act."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_held(path: Path) -> bool:
    """Whether a controller has the right. Takes nothing that another could miss, and makes no file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _has_locked(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def holder(path: Path) -> LeaderRecord | None:
    """The controller that has the right; None: nobody has it, or it has not said yet who it is."""
    if not is_held(path):
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=LeaderRecord)
    except (OSError, ValueError):
        return None


def locked(path: Path) -> int | None:
    """A descriptor of the file, which is made if it is not there, locked until it is closed; None: somebody else has
    locked it. Raises `OSError`."""
    while True:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (FileNotFoundError, FileExistsError):
            if os.path.lexists(path.parent) and not path.parent.is_dir():
                raise  # something else is where the folder is to be
            continue  # the folder has just been removed
        if not _has_locked(descriptor, fcntl.LOCK_EX):
            os.close(descriptor)
            return None
        if _is_still(path, descriptor):
            return descriptor
        os.close(descriptor)


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether the file was not removed while it was being locked: who comes next would lock another one."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _has_locked(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
