"""Digests of large files, remembered from one start to the next in a small file of the user's.

A file counts as unchanged while its path, device, inode, size and timestamps are the same, and a sample of its content.
Where the time of its last change is a whole second, it may be no time of a change at all, but have been given to all
files of an image (squashfs, EROFS, ISO 9660): such files are always read. The cache only saves time: if it cannot be
written, may have been written by another user, or is damaged, files are read again. In a fleet, the supervisor logs
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

from kvferry.core.cache_places import lasting_places
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.settings import environment

log = logging.getLogger(__name__)

MAX_FILES = 4096
MAX_BYTES = 16 * 2**20
LOCK_WAIT_S = 120.0
"""How long to wait for another process that reads the same files, as the ranks of one instance do."""
SETTLED_S = 2.0
"""A file that was changed less than this ago (s) may change again without a new timestamp: its digest is not kept."""
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
        found = real.stat()
        return cls(str(real), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    @property
    def has_fine_times(self) -> bool:
        """Whether the time of the last change is finer than a second, so that the kernel has set it."""
        return self.changed_ns % 10**9 != 0

    def unsettled_s(self) -> float:
        """For how long (s) the file may still change without a new timestamp; 0: a change would show."""
        limit_s = TICK_S if self.has_fine_times else SETTLED_S
        age_s = SYSTEM_CLOCK.wall() - max(self.modified_ns, self.changed_ns) / 1e9
        return min(max(limit_s - age_s, 0.0), limit_s)

    def sample(self) -> str:
        """A digest of some pieces of the file, evenly spaced, its beginning and its end included. Raises `OSError`."""
        hasher, last = xxhash.xxh3_128(), max(self.size - SAMPLE_BYTES, 0)
        with Path(self.path).open("rb", buffering=0) as file:
            for offset in sorted({last * number // (SAMPLES - 1) for number in range(SAMPLES)}):
                hasher.update(os.pread(file.fileno(), SAMPLE_BYTES, offset))
        digest: str = hasher.hexdigest()
        return digest

    def is_settled(self) -> bool:
        """Whether the file is still in this state, and has been for so long that a change would show in its times."""
        try:
            age_ns = SYSTEM_CLOCK.wall() * 1e9 - max(self.modified_ns, self.changed_ns)
            return age_ns > SETTLED_S * 1e9 and FileState.of(Path(self.path)) == self
        except OSError:
            return False


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    state: tuple[int, int, int, int, int]
    sample: str
    digest: str

    def is_of(self, state: FileState) -> bool:
        """Whether this is the digest of a file in that state."""
        with suppress(OSError):
            return state.has_fine_times and self.state == state[1:] and self.sample == state.sample()
        return False


class DigestCache:
    """Digests by file, read from disk when this is made; problems with the cache are logged then."""

    def __init__(self) -> None:
        self._path = _cache_path()
        self._known = _load(self._path) if self._path is not None else {}

    @classmethod
    @contextmanager
    def locked(cls) -> Iterator[DigestCache]:
        """Open the cache while no other process does; without that guarantee if the lock cannot be had."""
        with ExitStack() as stack:
            if (path := _cache_path()) is not None:
                with suppress(OSError):
                    stack.enter_context(_lock(path.with_suffix(".lock")))
            yield cls()

    def find_all(self, states: Iterable[FileState]) -> dict[FileState, str]:
        """The digests of those files that have not changed."""
        known = {state: self._known.get(state.path) for state in states}
        return {state: one.digest for state, one in known.items() if one is not None and one.is_of(state)}

    def keep(self, digests: Mapping[FileState, str]) -> None:
        """Store digests, but not those of files that changed while they were read, or whose times say nothing."""
        kept = dict[str, _Entry]()
        for state, digest in digests.items():
            with suppress(OSError):
                if state.has_fine_times and state.is_settled():
                    kept[state.path] = _Entry(state[1:], state.sample(), digest)
        if self._path is None or not kept:
            return
        everything = {path: known for path, known in self._known.items() if path not in kept} | kept
        try:
            _write(self._path, msgspec.json.encode(dict(list(everything.items())[-MAX_FILES:])))
        except OSError as error:
            log.info("digests of the checkpoint's files are not kept for the next start: %s", error)


def _cache_path() -> Path | None:
    """The file in the first folder that can be written to; None if there is none."""
    for place in lasting_places():
        with suppress(OSError):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(place, os.W_OK | os.X_OK):
                return place / "checkpoints.json"
    _say(logging.INFO, "digests of a checkpoint's files cannot be kept for the next start: no folder can be written")
    return None


def _say(level: int, message: str) -> None:
    """Log what is wrong with the cache, unless a supervisor has done so before."""
    log.log(logging.DEBUG if os.environ.get(environment.INSTANCE_NAME) else level, message)


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


def _load(path: Path) -> dict[str, _Entry]:
    """Empty if the file is missing, damaged, or may have been written by another user."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid != os.geteuid() or found.st_mode & 0o022 or found.st_size > MAX_BYTES:
                _say(logging.WARNING, f"{path} is not used: it is not this user's alone, or too large")
                return {}
            return msgspec.json.decode(file.read(), type=dict[str, _Entry])
    except (OSError, ValueError):  # msgspec's errors are such
        return {}


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the lock while the body runs; if another has it for `LOCK_WAIT_S`, go on without. Raises `OSError`."""
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
