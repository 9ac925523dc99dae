"""The storage of simulated stores: one file system and one shared memory. All processes share both, as on one machine.
Bytes take the time of their medium; reads return the written bytes, unless a fault has changed them.

Owns the files, the shared memory, and the time at which each medium is free. It does not know blocks.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from random import Random
from typing import Protocol

from kvferry.core.errors import StoreError
from kvferry.sim.loop import EPOCH_S, SimProcess, Simulation
from kvferry.sim.times import MediumTimes, StoreTimes
from kvferry.store.access import FileAccess
from kvferry.store.arena import Arena
from kvferry.store.disk import TEMPORARY_SUFFIX, TOUCH_S, Disk
from kvferry.store.record import CorruptBlock


class CallTime(Protocol):
    """The time of a store's running call in a process."""

    def now(self) -> float:
        """The virtual time that the call has reached."""

    def wait_until(self, when: float) -> None:
        """Have the call continue at this time."""


_SLOWED = 50.0


class Medium:
    """One device with sequential reads and sequential writes."""

    def __init__(self, simulation: Simulation, times: MediumTimes) -> None:
        self._simulation, self._times = simulation, times
        self._free_at = {False: 0.0, True: 0.0}
        self.hangs_until = self.slow_until = 0.0
        """Set by faults. `hangs_until`: no call returns before. `slow_until`: until then, calls take `_SLOWED` times as
        long."""

    def reserve_transfer(self, begins: float, num_bytes: float, *, writes: bool) -> float:
        """Occupy the medium with a transfer that begins at `begins`. Returns the time at which it ends."""
        now, times = self._simulation.now, self._times
        bandwidth = times.write_bandwidth if writes else times.read_bandwidth
        slower = _SLOWED if self.slow_until > now else 1.0
        seconds = num_bytes * slower / bandwidth
        free_at = self._free_at[writes] = max(now, self._free_at[writes], self.hangs_until) + seconds
        return max(free_at, begins + seconds) + times.latency_s * slower


@dataclass
class SimFile:
    """`owner`: the process that is writing it; None: it is complete."""

    content: bytes
    modified_s: float
    owner: SimProcess | None = None


@dataclass
class _Folder:
    folders: dict[str, None] = field(default_factory=dict)
    files: dict[str, SimFile] = field(default_factory=dict)


class Storage:
    """The files and the shared memory of one simulation: all processes share both, as on one machine."""

    def __init__(self, simulation: Simulation, times: StoreTimes) -> None:
        self.simulation = simulation
        self.disk, self.memory = Medium(simulation, times.file), Medium(simulation, times.memory)
        self.full_until = self.fails_until = 0.0
        """Set by faults: until then all writes fail, or all reads and writes."""
        self._folders: dict[str, _Folder] = {}
        self._arenas: dict[tuple[str, int], _Shared] = {}
        self._num_temporary = 0

    def folder(self, path: str) -> _Folder:
        """A directory, created if needed."""
        folder = self._folders.get(path)
        if folder is None:
            folder = self._folders[path] = _Folder()
            parent, name = os.path.split(path)
            if name:
                self.folder(parent).folders[name] = None
        return folder

    def files(self) -> Iterator[tuple[dict[str, SimFile], str, SimFile]]:
        """Every file: the files of its directory, its name there, and itself."""
        for folder in tuple(self._folders.values()):
            for name, file in tuple(folder.files.items()):
                yield folder.files, name, file

    @property
    def has_memory(self) -> bool:
        """True if any process has used shared memory."""
        return bool(self._arenas)

    def wall(self) -> float:
        """The file system's own clock."""
        return EPOCH_S + self.simulation.now

    def temporary(self, name: str) -> str:
        """A unique file name."""
        self._num_temporary += 1
        return f"{name}.{self._num_temporary}{TEMPORARY_SUFFIX}"

    def shared(self, process: SimProcess, name: str, num_bytes: int) -> _Shared:
        """The memory of that name and size. It is lost with its last process."""
        memory = self._arenas.get((name, num_bytes))
        if memory is None or not any(member.is_alive for member in memory.members):
            memory = self._arenas[name, num_bytes] = _Shared(bytearray(num_bytes))
        memory.members[process] = None
        return memory

    # Faults.

    def lose(self, random: Random, share: float) -> int:
        """Remove a random share of the files. Returns their number."""
        return self._apply_fault(random, share, lambda files, name, file: files.pop(name))

    def damage(self, random: Random, share: float) -> int:
        """Flip a bit of a random share of the files, or truncate them. Returns their number."""

        def change(files: dict[str, SimFile], name: str, file: SimFile) -> None:
            content, offset = bytearray(file.content), random.randrange(max(1, len(file.content)))
            if random.random() < 0.2:
                del content[offset:]
            elif content:
                content[offset] ^= 1 << random.randrange(8)
            files[name] = SimFile(bytes(content), file.modified_s)

        return self._apply_fault(random, share, change)

    def _apply_fault(
        self, random: Random, share: float, change: Callable[[dict[str, SimFile], str, SimFile], object]
    ) -> int:
        affected = [entry for entry in self.files() if entry[2].owner is None and random.random() < share]
        for files, name, file in affected:
            change(files, name, file)
        return len(affected)


class SimDisk(Disk):
    """One process's view of the simulated file system. `true_bytes`: bytes of real KV for each simulated byte."""

    def __init__(self, storage: Storage, process: SimProcess, true_bytes: float, time: CallTime) -> None:
        self._storage, self._process, self._true_bytes, self._time = storage, process, true_bytes, time

    def make_folder(self, path: Path, access: FileAccess) -> None:
        self._storage.folder(str(path))

    def require_access(self, folder: Path) -> None:
        """Does nothing: all processes may use all files."""

    def write(self, path: str, views: Sequence[memoryview], access: FileAccess, *, fsync: bool = False) -> None:
        storage, (folder, name) = self._storage, os.path.split(path)
        files, temporary = storage.folder(folder).files, storage.temporary(name)
        self._wait_and_apply_faults(writes=True)
        files[temporary] = SimFile(b"", storage.wall(), self._process)
        try:
            content = b"".join(views)
            self._wait_for_transfer(len(content), writes=True)
            self._wait_and_apply_faults(writes=True)
            files[name] = SimFile(content, storage.wall())
        finally:
            files.pop(temporary, None)

    @contextmanager
    def open(self, path: str) -> Iterator[SimFile]:  # type: ignore[override]  # a file, in place of its number
        self._wait_and_apply_faults(writes=False)
        yield self._file(path)

    def num_bytes(self, descriptor: SimFile) -> int:  # type: ignore[override]
        return len(descriptor.content)

    def read(self, descriptor: SimFile, views: Sequence[memoryview], offset: int) -> None:  # type: ignore[override]
        self._wait_for_transfer(sum(map(len, views)), writes=False)
        self._wait_and_apply_faults(writes=False)
        for view in views:
            data = descriptor.content[offset : offset + len(view)]
            view[: len(data)] = data
            offset += len(data)
            if len(data) < len(view):
                raise CorruptBlock("the file is too short")

    def head(self, descriptor: SimFile, max_bytes: int) -> bytes:  # type: ignore[override]
        return descriptor.content[:max_bytes]

    def touch_open(self, descriptor: SimFile) -> None:  # type: ignore[override]
        if self._process.simulation.wall() - descriptor.modified_s > TOUCH_S:
            descriptor.modified_s = self._storage.wall()

    def touch(self, path: str) -> bool:
        self._wait_and_apply_faults(writes=False)
        try:
            self._file(path).modified_s = self._storage.wall()
        except FileNotFoundError:
            return False
        return True

    def is_readable(self, path: str) -> bool:
        self._wait_and_apply_faults(writes=False)
        return self._file(path) is not None

    def exists(self, path: str) -> bool:
        folder, name = os.path.split(path)
        return name in self._storage.folder(folder).files

    def remove(self, path: str) -> bool:
        folder, name = os.path.split(path)
        return self._storage.folder(folder).files.pop(name, None) is not None

    def glob(self, folder: Path, pattern: str) -> Iterable[Path]:
        directory = self._storage.folder(str(folder))
        names = [*directory.folders, *directory.files]
        return [folder / name for name in names if pattern == "*" or fnmatchcase(name, pattern)]

    def status(self, path: Path) -> tuple[float, int]:
        file = self._file(str(path))
        return file.modified_s, len(file.content)

    def is_stale(self, path: Path, modified_s: float) -> bool:
        owner = self._file(str(path)).owner
        return owner is not None and not owner.is_alive

    def _file(self, path: str) -> SimFile:
        folder, name = os.path.split(path)
        try:
            return self._storage.folder(folder).files[name]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None

    def _wait_for_transfer(self, num_bytes: int, *, writes: bool) -> None:
        time = self._time
        time.wait_until(self._storage.disk.reserve_transfer(time.now(), num_bytes * self._true_bytes, writes=writes))

    def _wait_and_apply_faults(self, *, writes: bool) -> None:
        if self._storage.disk.hangs_until > self._time.now():
            self._time.wait_until(self._storage.disk.hangs_until)
        now = self._time.now()
        if self._storage.fails_until > now:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if writes and self._storage.full_until > now:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclass
class _Shared:
    """Memory, and the processes that use it."""

    content: bytearray
    members: dict[SimProcess, None] = field(default_factory=dict)


class SimArena(Arena):
    """Memory that simulated processes share. The holder of the lock finishes before any other process runs."""

    def __init__(
        self, storage: Storage, process: SimProcess, name: str, num_bytes: int, true_bytes: float, time: CallTime
    ) -> None:
        self._storage, self._process, self._true_bytes, self._time = storage, process, true_bytes, time
        self._shared = storage.shared(process, name, num_bytes)
        self.buffer = memoryview(self._shared.content)
        self.is_closed = False

    @contextmanager
    def locked(self) -> Iterator[bool]:
        if self.is_closed:
            raise StoreError("the memory store is closed")
        yield False

    @property
    def identity(self) -> tuple[int, int]:
        return self._process.number, 1

    def is_alive(self, identity: tuple[int, int]) -> bool:
        return self._storage.simulation.processes[identity[0]].is_alive

    def view(self, offset: int, num_bytes: int) -> memoryview:
        time = self._time
        time.wait_until(self._storage.memory.reserve_transfer(time.now(), num_bytes * self._true_bytes, writes=True))
        return self.buffer[offset : offset + num_bytes]

    def close(self) -> None:
        self.is_closed = True
        self._shared.members.pop(self._process, None)
