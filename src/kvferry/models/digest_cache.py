"""Digests of large files, cached from one start to the next in a small file of the user's.

A file counts as unchanged while its path, device, inode, size and timestamps are the same, and a sample of its content.
A last change at a whole second may not be a time of change at all, but one that all files of an image have (squashfs,
EROFS, ISO 9660): such files are always read. The cache only saves time: if it cannot be written, may have been written
by another user, or is damaged, files are read again. In a fleet, the supervisor logs
this once for all its processes.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.folders.cache_dirs import user_cache_dirs
from kvferry.core.settings import environment

logger = logging.getLogger(__name__)

LOCK_WAIT_S = 120.0
"""Max seconds to wait for another process that reads the same files, such as another rank of the instance."""
SETTLED_S = 2.0
"""A file that changed less than this many seconds ago may change again without a new timestamp: its digest is not
cached."""
TICK_S = 0.05
"""The same for a file system whose timestamps are finer than a second: several times the kernel's clock tick."""
SAMPLES, SAMPLE_BYTES = 64, 4096


class FileState(NamedTuple):
    """Identifies a file and its content, as far as its directory entry and its times do."""

    path: str
    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """The present state; links are followed. Raises `OSError`."""
        real = path.resolve()
        info = real.stat()
        return cls(str(real), info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)

    @property
    def has_fine_times(self) -> bool:
        """True if the time of the last change is finer than a second, so that the kernel has set it."""
        return self.changed_ns % 10**9 != 0

    def unsettled_s(self) -> float:
        """Seconds for which the file may still change without a new timestamp; 0: a change would show."""
        limit_s = TICK_S if self.has_fine_times else SETTLED_S
        age_s = SYSTEM_CLOCK.wall() - max(self.modified_ns, self.changed_ns) / 1e9
        return min(max(limit_s - age_s, 0.0), limit_s)

    def sample(self) -> str:
        """A digest of evenly spaced parts of the file, including its beginning and its end. Raises `OSError`."""
        hasher, last = xxhash.xxh3_128(), max(self.size - SAMPLE_BYTES, 0)
        with Path(self.path).open("rb", buffering=0) as file:
            for offset in sorted({last * number // (SAMPLES - 1) for number in range(SAMPLES)}):
                hasher.update(os.pread(file.fileno(), SAMPLE_BYTES, offset))
        digest: str = hasher.hexdigest()
        return digest

    def is_settled(self, settled_s: float) -> bool:
        """True if the file is still in this state, and has been for more than `settled_s` seconds."""
        try:
            age_ns = SYSTEM_CLOCK.wall() * 1e9 - max(self.modified_ns, self.changed_ns)
            return age_ns > settled_s * 1e9 and FileState.of(Path(self.path)) == self
        except OSError:
            return False


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    state: tuple[int, int, int, int, int]
    sample: str
    digest: str

    def matches(self, state: FileState) -> bool:
        """True if this is the digest of a file in this state."""
        with suppress(OSError):
            return state.has_fine_times and self.state == state[1:] and self.sample == state.sample()
        return False


class DigestCache:
    """Digests of the last `max_files` files, read from disk by the constructor, which logs problems with the cache."""

    def __init__(self, max_files: int = 4096) -> None:
        self._max_files, self._path = max_files, _cache_path()
        self._known = _load(self._path) if self._path is not None else {}

    @classmethod
    @contextmanager
    def locked(cls) -> Iterator[DigestCache]:
        """Open the cache exclusively among processes; without that guarantee if the lock cannot be acquired."""
        with ExitStack() as stack:
            if (path := _cache_path()) is not None:
                with suppress(OSError):
                    stack.enter_context(_lock(path.with_suffix(".lock")))
            yield cls()

    def find_all(self, states: Iterable[FileState]) -> dict[FileState, str]:
        """The cached digests of the files that have not changed."""
        entries = {state: self._known.get(state.path) for state in states}
        return {state: entry.digest for state, entry in entries.items() if entry is not None and entry.matches(state)}

    def store(self, digests: Mapping[FileState, str], settled_s: float = SETTLED_S) -> None:
        """Store digests, except for files that changed while they were read or less than `settled_s` seconds ago, or
        whose times are not reliable."""
        new_entries = dict[str, _Entry]()
        for state, digest in digests.items():
            with suppress(OSError):
                if state.has_fine_times and state.is_settled(settled_s):
                    new_entries[state.path] = _Entry(state[1:], state.sample(), digest)
        if self._path is None or not new_entries:
            return
        everything = {path: entry for path, entry in self._known.items() if path not in new_entries} | new_entries
        try:
            _write(self._path, msgspec.json.encode(dict(list(everything.items())[-self._max_files :])))
        except OSError as error:
            logger.info("digests of the checkpoint's files are not kept for the next start: %s", error)


def _cache_path() -> Path | None:
    """The file in the first folder that can be written to; None if there is none."""
    for folder in user_cache_dirs():
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK):
                return folder / "checkpoints.json"
    _log_once(
        logging.INFO, "digests of a checkpoint's files cannot be kept for the next start: no folder can be written"
    )
    return None


def _log_once(level: int, message: str) -> None:
    """Log a problem of the cache, at level debug if a supervisor has already logged it."""
    logger.log(logging.DEBUG if os.environ.get(environment.INSTANCE_NAME) else level, message)


def _write(path: Path, content: bytes) -> None:
    """Replace the file atomically, readable by this user only."""
    descriptor, name = tempfile.mkstemp(dir=path.parent)  # with mode 600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _load(path: Path, max_bytes: int = 16 * 2**20) -> dict[str, _Entry]:
    """The cached entries; empty if the file is missing, damaged, larger than `max_bytes`, or may have been written by
    another user."""
    try:
        with path.open("rb") as file:
            info = os.fstat(file.fileno())
            if info.st_uid != os.geteuid() or info.st_mode & 0o022 or info.st_size > max_bytes:
                _log_once(logging.WARNING, f"{path} is not used: it is not this user's alone, or too large")
                return {}
            return msgspec.json.decode(file.read(), type=dict[str, _Entry])
    except (OSError, ValueError):  # msgspec's errors are ValueErrors
        return {}


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the lock while the body runs; if another process holds it for `LOCK_WAIT_S`, go on without it. Raises
    `OSError`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        deadline = SYSTEM_CLOCK.monotonic() + LOCK_WAIT_S
        while not _try_lock(descriptor) and SYSTEM_CLOCK.monotonic() < deadline:
            time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
