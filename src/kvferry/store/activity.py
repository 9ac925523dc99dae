"""Counters of one store, and the blocks that were stored in it and removed from it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Lock

from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.clock import SYSTEM_CLOCK

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Changes:
    """Blocks that were stored on one medium (`KVStore.medium`), and blocks that were removed from it."""

    medium: str
    stored: list[BlockHash]
    removed: list[BlockHash]


class StoreActivity:
    """Counters and changes of one store. Its methods may be called on any thread."""

    def __init__(self, medium: str, warning_interval_s: float = 10.0) -> None:
        self.medium = medium
        self.is_watched = False
        self._warning_interval_s = warning_interval_s
        self._counts: Counter[str] = Counter()
        self._lock = Lock()
        self._last_warning = -warning_interval_s
        self._changed: dict[BlockHash, bool] = {}
        """Changed blocks; the value is true if the block is stored now."""

    def count(self, **changes: int) -> None:
        """Add to counters of `KVStore.statistics`, by name."""
        with self._lock:
            self._counts.update(changes)

    def counts(self) -> dict[str, float]:
        """The counters, by name."""
        with self._lock:
            return {name: float(count) for name, count in self._counts.items()}

    def watch(self) -> None:
        """Start to record which blocks are stored and removed, for `take_changes`."""
        self.is_watched = True

    def stored(self, hashes: Iterable[BlockHash]) -> None:
        """Record that these blocks are stored."""
        self._record(hashes, True)

    def removed(self, hashes: Iterable[BlockHash]) -> None:
        """Record that these blocks were removed."""
        self._record(hashes, False)

    def take_changes(self) -> list[Changes]:
        """The changes that this process made or noticed since the last call, if there are any. Empty before
        `watch`."""
        with self._lock:
            changed, self._changed = self._changed, {}
        stored = [name for name, is_stored in changed.items() if is_stored]
        removed = [name for name, is_stored in changed.items() if not is_stored]
        return [Changes(self.medium, stored, removed)] if changed else []

    def warn_full(self, error: Exception) -> None:
        """Log that there is no room, at most once in `warning_interval_s` seconds."""
        now = SYSTEM_CLOCK.monotonic()
        if now - self._last_warning > self._warning_interval_s:
            self._last_warning = now
            logger.warning("blocks are not kept: %s", error)

    def _record(self, hashes: Iterable[BlockHash], is_stored: bool) -> None:
        if self.is_watched:
            with self._lock:
                for name in hashes:
                    self._changed.pop(name, None)
                    self._changed[name] = is_stored


class CombinedActivity(StoreActivity):
    """The activity of a store that consists of others: counters of its own, and the changes of its parts."""

    def __init__(self, parts: Sequence[StoreActivity]) -> None:
        super().__init__("")
        self._parts = parts

    def watch(self) -> None:
        """Record in every part."""
        for part in self._parts:
            part.watch()

    def take_changes(self) -> list[Changes]:
        """The changes of every part, separately."""
        return [changes for part in self._parts for changes in part.take_changes()]
