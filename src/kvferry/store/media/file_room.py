"""The bytes of the files under a store's directory, and the eviction of files when there are too many bytes.

Owns the eviction policy of one process, and what this process knows about the directory from its last scan. Any thread;
scans run one at a time.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.core.errors import ConfigError
from kvferry.store.codecs.base import NAME
from kvferry.store.disk import DISK, TEMPORARY_SUFFIX, Disk
from kvferry.store.eviction.guarded import GuardedPolicy
from kvferry.store.eviction.table import make_eviction_policy

SUFFIX, PIN_SUFFIX = ".kv", ".pin"
PLAIN = "none"
_LAYOUT_FOLDER = re.compile(rf"[0-9a-f]{{32}}(?:\.{NAME.pattern})?")
_FIRST_BYTE = re.compile(r"[0-9a-f]{2}")
FREED_SHARE = 0.1
"""Share of `max_bytes` that is free after an eviction."""
SCAN_SHARE = 1 / 32
"""A scan is due when this share of `max_bytes` has been written, or refused, since the last one."""


def folder_name(fingerprint: str, codec: str) -> str:
    """The directory of a layout's blocks, within the store's directory. Blocks of another codec have another directory,
    so that they are not mistaken for damaged ones."""
    return fingerprint if codec == PLAIN else f"{fingerprint}.{codec}"


def block_files(root: Path, pattern: str, disk: Disk = DISK) -> Iterator[Path]:
    """Files with this name in the folders that `FileStore` makes, layout by layout. Any other file under the directory
    is not the store's, and is neither counted nor removed."""
    for folder in sorted(disk.glob(root, "*")):
        if _LAYOUT_FOLDER.fullmatch(folder.name):
            for first in sorted(disk.glob(folder, "??")):
                if _FIRST_BYTE.fullmatch(first.name):
                    yield from disk.glob(first, pattern)


def path_of(location: str) -> Path:
    """The directory that `file:<location>` names, percent-decoded. Raises `ConfigError` if it names none."""
    path = unquote(location.removeprefix("//") if location.startswith("///") else location, errors="surrogateescape")
    if not path or path.startswith("//") or "\0" in path:
        raise ConfigError(f"store file:{location}: give a directory, as in file:/var/lib/kvferry")
    return Path(path).expanduser()


@dataclass(frozen=True)
class _File:
    modified_s: float
    num_bytes: int
    path: str


@dataclass(frozen=True)
class Removed:
    """The result of a scan: the number of blocks that it evicted, and the watched paths that no longer exist."""

    num_evicted: int = 0
    missing: Collection[str] = ()


class FileRoom:
    """The room of one store directory. `max_bytes`: None means no limit. `block_bytes`: about the size of one block.
    All `path` arguments are paths of blocks."""

    def __init__(
        self,
        root: Path,
        max_bytes: int | None,
        eviction: str,
        block_bytes: int,
        clock: Clock = SYSTEM_CLOCK,
        disk: Disk = DISK,
    ) -> None:
        self._clock, self._disk = clock, disk
        self._root, self._max_bytes = root, max_bytes
        self._policy = GuardedPolicy(make_eviction_policy(eviction, max(1, (max_bytes or 1) // block_bytes)))
        self._lock, self._scan_lock = threading.Lock(), threading.Lock()
        self._watched: set[str] = set()
        self._pinned: set[str] = set()
        self._unscanned_bytes = self._num_pinned = 0
        self._last_scan_s = 0.0
        self._pinned_bytes = 0
        self._refused_bytes = 0
        """Bytes that were refused for lack of room since the last scan."""
        self._stored_bytes: int | None = None
        """Bytes under the directory at the last scan; None before the first, which the first write makes."""

    # What this process does.

    def accessed(self, path: str) -> None:
        """Report to the eviction policy that a block was used."""
        if self._max_bytes is not None:
            with self._lock:
                self._policy.access(path, self._clock.monotonic())

    def finished(self, paths: Sequence[str], num_output_tokens: int) -> None:
        """Report to the eviction policy that the request with this prompt has its complete answer."""
        if self._max_bytes is not None:
            with self._lock:
                self._policy.finish(paths, num_output_tokens, self._clock.monotonic())

    def removed(self, path: str) -> None:
        """Report to the eviction policy that a block was removed."""
        if self._max_bytes is not None:
            with self._lock:
                self._policy.remove(path)
                self._watched.discard(path)

    def watch(self, path: str) -> None:
        """Report this path in `Removed.missing` when a scan does not find it."""
        with self._lock:
            self._watched.add(path)

    def admit(self, num_bytes: int) -> tuple[bool, Removed]:
        """True if a block of `num_bytes` fits beside the pinned ones. Scans before the first block, or if much was
        refused since the last scan."""
        if self._max_bytes is None:
            return True, Removed()
        with self._lock:
            is_known = self._stored_bytes is not None and self._refused_bytes < self._max_bytes * SCAN_SHARE
        removed = Removed() if is_known else self._scan_and_evict()
        with self._lock:
            fits = self._pinned_bytes + max(num_bytes, self._max_bytes * SCAN_SHARE) <= self._max_bytes
            self._refused_bytes += 0 if fits else num_bytes
        return fits, removed

    def num_pinnable(self, paths: Sequence[str], share: float) -> tuple[int, Removed]:
        """Number of leading blocks that may be pinned so that the pinned blocks of all layouts and processes stay
        within `share` of `max_bytes`. Scans first."""
        if self._max_bytes is None:
            return len(paths), Removed()
        removed = self._scan_and_evict()
        with self._lock:
            free_bytes, pinned = share * self._max_bytes - self._pinned_bytes, set(self._pinned)
        for count, path in enumerate(paths):
            if path in pinned:
                continue
            with suppress(OSError):  # removed since: a pin without a block is removed by a scan
                free_bytes -= self._disk.status(Path(path))[1]
            if free_bytes < 0:
                return count, removed
        return len(paths), removed

    def unpinned(self) -> None:
        """Record that blocks were unpinned: the next `admit` scans for free room."""
        with self._lock:
            self._refused_bytes += self._max_bytes or 0

    def written(self, path: str, parent: str | None, num_bytes: int) -> Removed:
        """Record that a block was written. Scans, and evicts if needed, when a scan is due."""
        with self._lock:
            if self._max_bytes is not None and self._stored_bytes is not None:  # otherwise, the first scan inserts it
                self._policy.insert(path, self._clock.monotonic(), parent)
            self._unscanned_bytes += num_bytes
            due = self._is_scan_due()
        return self._scan_and_evict(num_bytes) if due else Removed()

    def statistics(self) -> dict[str, float]:
        """`kept_bytes` and `pinned_blocks` under the directory, as far as this process knows; empty before the first
        scan."""
        with self._lock:
            if self._stored_bytes is None:
                return {}
            return {
                "kept_bytes": float(self._stored_bytes + self._unscanned_bytes),
                "pinned_blocks": float(self._num_pinned),
            }

    def _is_scan_due(self) -> bool:
        if self._stored_bytes is None or self._max_bytes is None:
            return self._stored_bytes is None
        total = self._stored_bytes + self._unscanned_bytes
        return self._unscanned_bytes >= self._max_bytes * SCAN_SHARE or total > self._max_bytes

    # Scans.

    def _scan_and_evict(self, new_bytes: int = 0) -> Removed:
        """Scan the directory; evict if it is too full, and remove what crashes left. `new_bytes`: the size of the
        newest block."""
        with self._scan_lock:
            began_s = SYSTEM_CLOCK.wall()  # compared with modification times
            with self._lock:
                tracked = list(self._policy)
            files, pinned = self._scan()
            with self._lock:
                self._unscanned_bytes = self._refused_bytes = 0
                self._pinned_bytes = sum(files[path].num_bytes for path in pinned)
                for path in tracked:
                    if path not in files:  # another process removed it
                        self._policy.remove(path)
                self._update_policy(files, pinned)
            total, num_evicted = sum(files[path].num_bytes for path in files), 0
            if self._max_bytes is not None and total > self._max_bytes:
                total, num_evicted = self._evict(files, total, new_bytes)
            with self._lock:
                self._last_scan_s, self._stored_bytes, self._num_pinned = began_s, total, len(pinned)
                missing = self._watched - files.keys()
                self._watched -= missing
            return Removed(num_evicted, missing)

    def _update_policy(self, files: dict[str, _File], pinned: set[str]) -> None:
        """Report the uses by other processes to the policy, in the order of the files' modification times."""
        if self._max_bytes is None:
            return
        for file in sorted(files.values(), key=lambda file: file.modified_s):
            if file.path not in self._policy:
                self._policy.insert(file.path, self._clock.monotonic())
            elif file.modified_s > self._last_scan_s > 0:
                self._policy.access(file.path, self._clock.monotonic())
        for path in pinned - self._pinned:
            self._policy.pin(path)
        for path in self._pinned - pinned:
            self._policy.unpin(path, self._clock.monotonic())
        self._pinned = pinned

    def _evict(self, files: dict[str, _File], total: int, new_bytes: int) -> tuple[int, int]:
        """Remove blocks while there are too many bytes; returns the bytes that remain and the number of blocks removed.
        If much is pinned, half of the unpinned room is left to blocks, and the newest block always stays."""
        assert self._max_bytes is not None
        num_evicted, pinned = 0, self._pinned_bytes
        goal = max(self._max_bytes * (1 - FREED_SHARE), (self._max_bytes + pinned) / 2, pinned + new_bytes)
        while total > min(goal, self._max_bytes):
            with self._lock:
                victim = self._policy.evict(self._clock.monotonic())
            if not isinstance(victim, str):
                break
            num_evicted += self._disk.remove(victim)
            file = files.pop(victim, None)
            total -= file.num_bytes if file is not None else 0
        return total, num_evicted

    def _scan(self) -> tuple[dict[str, _File], set[str]]:
        """Every block under the directory by its path, and the paths of those that are pinned. Stale temporary files
        and pins without a block are removed."""
        files: dict[str, _File] = {}
        pins: set[str] = set()
        disk = self._disk
        for path in block_files(self._root, "*", disk):
            with suppress(OSError):  # removed meanwhile, by another process
                if path.suffix == PIN_SUFFIX:
                    pins.add(str(path.with_suffix(SUFFIX)))
                    continue
                modified_s, num_bytes = disk.status(path)
                if path.suffix == SUFFIX:
                    files[str(path)] = _File(modified_s, num_bytes, str(path))
                elif path.suffix == TEMPORARY_SUFFIX and disk.is_stale(path, modified_s):
                    disk.remove(str(path))
        for orphan in pins - files.keys():
            if not disk.exists(orphan):  # neither found by this scan nor put since
                disk.remove(str(Path(orphan).with_suffix(PIN_SUFFIX)))
        return files, pins & files.keys()
