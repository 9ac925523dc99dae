"""How much room the files under a root take, and which go when it is too much.

Owns the eviction policy of one process and what it knows of the directory. Any thread; looks are one at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.core.errors import ConfigError
from kvferry.store.eviction.table import make_eviction_policy
from kvferry.store.files import TEMPORARY_SUFFIX, is_stale, remove_file

SUFFIX, PIN_SUFFIX = ".kv", ".pin"
PLAIN = "none"
FREED_SHARE = 0.1
LOOK_SHARE = 1 / 32


def folder_name(fingerprint: str, codec: str) -> str:
    """Where under the root the blocks of a layout are, written down with this codec. Those of another codec
    are not looked at: they are no damaged blocks of this one."""
    return fingerprint if codec == PLAIN else f"{fingerprint}.{codec}"


def path_of(location: str) -> Path:
    """The directory that `file:<location>` names, percent-decoded. Raises `ConfigError` when there can be none."""
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
    """What a look found: blocks evicted by it, and watched paths that are not there any more."""

    num_evicted: int = 0
    gone: Collection[str] = ()


class FileRoom:
    """See the module. Paths are those of blocks; `block_bytes`: about the size of one."""

    def __init__(
        self, root: Path, max_bytes: int | None, eviction: str, block_bytes: int, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._clock = clock
        self._root, self._max_bytes = root, max_bytes
        self._policy = make_eviction_policy(eviction, max(1, (max_bytes or 1) // block_bytes))
        self._lock, self._look_lock = threading.Lock(), threading.Lock()
        self._watched: set[str] = set()
        self._pinned: set[str] = set()
        self._num_unseen = self._num_pinned = 0
        self._last_look_s = 0.0
        self._pinned_bytes = 0
        self._num_refused = 0
        """Bytes that found no room since the last look."""
        self._num_stored: int | None = None
        """Bytes under the root when last looked at; None: not yet, which the first write does."""

    # What this process does.

    def accessed(self, path: str) -> None:
        """A block was used."""
        if self._max_bytes is not None:
            with self._lock:
                self._policy.access(path, self._clock.monotonic())

    def finished(self, paths: Sequence[str], num_output_tokens: int) -> None:
        """The request whose prompt these blocks are has its whole answer."""
        if self._max_bytes is not None:
            with self._lock:
                self._policy.finish(paths, num_output_tokens, self._clock.monotonic())

    def removed(self, path: str) -> None:
        """A block is gone."""
        if self._max_bytes is not None:
            with self._lock:
                self._policy.remove(path)
                self._watched.discard(path)

    def watch(self, path: str) -> None:
        """Say so when this one is found to be gone."""
        with self._lock:
            self._watched.add(path)

    def admit(self, num_bytes: int) -> tuple[bool, Removed]:
        """Whether there is room for a block beside what is pinned, as far as is known; looks when that is not known, or
        was long ago."""
        if self._max_bytes is None:
            return True, Removed()
        with self._lock:
            is_known = self._num_stored is not None and self._num_refused < self._max_bytes * LOOK_SHARE
        removed = Removed() if is_known else self._look()
        with self._lock:
            fits = self._pinned_bytes + max(num_bytes, self._max_bytes * LOOK_SHARE) <= self._max_bytes
            self._num_refused += 0 if fits else num_bytes
        return fits, removed

    def unpinned(self) -> None:
        """Blocks are not pinned any more: the next put finds out what that leaves room for."""
        with self._lock:
            self._num_refused += self._max_bytes or 0

    def written(self, path: str, parent: str | None, num_bytes: int) -> Removed:
        """A block is new; makes room, when it is time for it."""
        with self._lock:
            if self._max_bytes is not None and self._num_stored is not None:  # else what was there before comes first
                self._policy.insert(path, self._clock.monotonic(), parent)
            self._num_unseen += num_bytes
            due = self._look_is_due()
        return self._look(num_bytes) if due else Removed()

    def statistics(self) -> dict[str, float]:
        """What is under the root, as far as this process knows."""
        with self._lock:
            if self._num_stored is None:
                return {}
            return {"kept_bytes": float(self._num_stored + self._num_unseen), "pinned_blocks": float(self._num_pinned)}

    def _look_is_due(self) -> bool:
        if self._num_stored is None or self._max_bytes is None:
            return self._num_stored is None
        total = self._num_stored + self._num_unseen
        return self._num_unseen >= self._max_bytes * LOOK_SHARE or total > self._max_bytes

    # Looks.

    def _look(self, new_bytes: int = 0) -> Removed:
        """Count what is there, and remove what is too much and what a crash left. `new_bytes`: of the newest block."""
        with self._look_lock:
            began_s = SYSTEM_CLOCK.wall()  # compared with the times of files
            files, pinned = self._scan()
            with self._lock:
                self._num_unseen = self._num_refused = 0
                self._pinned_bytes = sum(files[path].num_bytes for path in pinned)
                self._learn(files, pinned)
            total, num_evicted = sum(files[path].num_bytes for path in files), 0
            if self._max_bytes is not None and total > self._max_bytes:
                total, num_evicted = self._evict(files, total, new_bytes)
            with self._lock:
                self._last_look_s, self._num_stored, self._num_pinned = began_s, total, len(pinned)
                gone = self._watched - files.keys()
                self._watched -= gone
            return Removed(num_evicted, gone)

    def _learn(self, files: dict[str, _File], pinned: set[str]) -> None:
        """What other processes did, in the order of the times that files show."""
        if self._max_bytes is None:
            return
        for file in sorted(files.values(), key=lambda file: file.modified_s):
            if file.path not in self._policy:
                self._policy.insert(file.path, self._clock.monotonic())
            elif file.modified_s > self._last_look_s > 0:
                self._policy.access(file.path, self._clock.monotonic())
        for path in pinned - self._pinned:
            self._policy.pin(path)
        for path in self._pinned - pinned:
            self._policy.unpin(path, self._clock.monotonic())
        self._pinned = pinned

    def _evict(self, files: dict[str, _File], total: int, new_bytes: int) -> tuple[int, int]:
        """Remove blocks as long as they are too much; returns the bytes that are left and how many went. Where much is
        pinned, half of what is not is left, and the newest block."""
        assert self._max_bytes is not None
        num_evicted, pinned = 0, self._pinned_bytes
        goal = max(self._max_bytes * (1 - FREED_SHARE), (self._max_bytes + pinned) / 2, pinned + new_bytes)
        while total > min(goal, self._max_bytes):
            with self._lock:
                victim = self._policy.evict(self._clock.monotonic())
            if not isinstance(victim, str):
                break
            num_evicted += remove_file(victim)
            file = files.pop(victim, None)
            total -= file.num_bytes if file is not None else 0
        return total, num_evicted

    def _scan(self) -> tuple[dict[str, _File], set[str]]:
        """Every block under the root, and which of them are pinned; stale temporary files are removed."""
        files: dict[str, _File] = {}
        pins: set[str] = set()
        for path in self._root.glob("*/??/*"):
            with suppress(OSError):  # removed meanwhile, by another process
                if path.suffix == PIN_SUFFIX:
                    pins.add(str(path.with_suffix(SUFFIX)))
                    continue
                status = path.stat()
                if path.suffix == SUFFIX:
                    files[str(path)] = _File(status.st_mtime, status.st_size, str(path))
                elif path.suffix == TEMPORARY_SUFFIX and is_stale(path, status.st_mtime):
                    path.unlink()
        for orphan in pins - files.keys():
            if not Path(orphan).exists():  # neither listed nor put since
                remove_file(str(Path(orphan).with_suffix(PIN_SUFFIX)))
        return files, pins & files.keys()
