"""KV blocks at rest: block hash → the block's bytes, kept until evicted.

A store may be shared by several processes and machines. Its methods are coroutines of one event loop; whatever blocks
runs on threads of the store. When a method has ended, also by cancellation, nothing reads or writes the caller's memory
any more. What is stored under a hash never changes.

What comes out of a store was perhaps written by a stranger: `record` says what is verified before it is believed.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from threading import Lock
from typing import Any, ClassVar

import msgspec

from kvferry.core.block_hash import BlockHash
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import StoreError
from kvferry.core.layout import KVLayout
from kvferry.store.codecs.table import make_codec
from kvferry.store.record import LayerViews, RecordFormat

log = logging.getLogger(__name__)

WARN_EVERY_S = 10.0


@dataclass(frozen=True)
class Block:
    """A block to keep: its bytes by layer, and the name of the block before it, where that is known."""

    block_hash: BlockHash
    layers: LayerViews
    parent: BlockHash | None = None


@dataclass(frozen=True)
class Read:
    """A block wanted: where its bytes go, by layer."""

    block_hash: BlockHash
    into: LayerViews


class Put(Enum):
    """What became of a block that was to be kept."""

    STORED = "stored"
    PRESENT = "present"
    """It was there already, and counts as used now."""
    DROPPED = "dropped"
    """There is no room: all that is kept is pinned, or larger blocks than these fit."""


@dataclass(frozen=True)
class Changes:
    """What became of blocks on one medium: these are there now, those are not any more."""

    medium: str
    kept: list[BlockHash]
    removed: list[BlockHash]


@dataclass(frozen=True)
class Run:
    """`num_blocks` that follow one another are in the same tier; 0 is the fastest."""

    tier: int
    num_blocks: int


class StoreFull(StoreError):
    """There is no room for a block, though the store is well. Does not leave the store: the block is `Put.DROPPED`."""


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What can stand behind the `?` of any store's URL. Stores add their own."""

    codec: str = "none"
    deadline_s: float = 5.0
    """As a tier: how long it is waited for, before the answer counts as a miss."""


class KVStore(ABC):
    """Blocks of one layout, by hash. A stored block that does not verify is a miss, is counted, and is removed.

    Every method may raise `StoreError` when the store cannot be asked; what of a batch was done then is not known.
    """

    options_type: ClassVar[type[StoreOptions]] = StoreOptions
    medium: ClassVar[str] = "STORAGE"
    """Where blocks are, in the words of KV events: "CPU", "STORAGE"."""
    is_shared: ClassVar[bool] = True
    """Whether other instances find what is stored, and notes too."""
    has_layers: ClassVar[bool] = False
    """Whether `get_layer` works."""

    def __init__(self, location: str, options: StoreOptions, layout: KVLayout) -> None:
        """Opens nothing yet. `location`: the URL between the scheme and the `?`. Raises `ConfigError`."""
        self.location, self.options, self.layout = location, options, layout
        self.records = RecordFormat(layout, make_codec(options.codec, layout))
        self._counts: Counter[str] = Counter()
        self._counts_lock = Lock()
        self._last_warning = -WARN_EVERY_S
        self._watched = False
        self._changed: dict[BlockHash, bool] = {}
        """Blocks, by whether they are there now."""

    @classmethod
    def check(cls, location: str, options: Any) -> None:
        """Raise `ConfigError` for what can be known to be wrong before anything is opened; `options` as `options_type`
        has them."""

    # Blocks.

    async def open(self) -> None:
        """Called before anything else, perhaps again. Raises `ConfigError` or `StoreError` when there is no way on."""

    @abstractmethod
    async def match(self, hashes: Sequence[BlockHash]) -> int:
        """How many blocks, from the first on, are there. They are not read: `get` may still find one damaged."""

    async def runs(self, hashes: Sequence[BlockHash]) -> list[Run]:
        """As `match`, by tier."""
        num_blocks = await self.match(hashes)
        return [Run(0, num_blocks)] if num_blocks else []

    @abstractmethod
    async def get(self, reads: Sequence[Read]) -> list[bool]:
        """Read blocks straight to where they are wanted. False: it is not there, or did not verify; then its `into`
        holds anything."""

    async def get_layer(self, layer: int, reads: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        """As `get`, of one layer; only where `has_layers`."""
        raise NotImplementedError(f"{type(self).__name__} reads whole blocks only")

    @abstractmethod
    async def put(self, blocks: Sequence[Block]) -> list[Put]:
        """Keep blocks. Nothing half-written is ever found, whenever this process ends."""

    @abstractmethod
    async def pin(self, hashes: Sequence[BlockHash]) -> int:
        """Keep these whatever room is needed, until `unpin`; returns how many are there. A flag, not a count."""

    @abstractmethod
    async def unpin(self, hashes: Sequence[BlockHash]) -> int:
        """Let these be evicted again; returns how many are there."""

    @abstractmethod
    async def delete(self, hashes: Sequence[BlockHash]) -> int:
        """Remove these, pinned or not; returns how many were there."""

    async def prefetch(self, hashes: Sequence[BlockHash]) -> None:
        """These will be read soon. Default: nothing could be done ahead."""

    async def finish(self, hashes: Sequence[BlockHash], num_output_tokens: int) -> None:
        """The request whose prompt these blocks are has its whole answer: a hint for what to evict, which is told only
        where `hears_finishes`. Default: it is of no use here."""

    async def close(self) -> None:
        """Give everything back. What is stored stays."""

    # Notes: small things that instances leave for one another, where `is_shared`.

    async def write_note(self, name: str, content: bytes, ttl_s: float) -> None:
        """Leave a note, in place of one that is there. It may be gone after `ttl_s`."""
        raise NotImplementedError(f"{type(self).__name__} keeps no notes")

    async def read_note(self, name: str) -> bytes | None:
        """The note, if it is there; at most `MAX_NOTE_BYTES` of it."""
        raise NotImplementedError(f"{type(self).__name__} keeps no notes")

    async def remove_note(self, name: str) -> None:
        """Remove it, if it is there."""
        raise NotImplementedError(f"{type(self).__name__} keeps no notes")

    # Insight.

    def watch(self) -> None:
        """From now on, note what becomes of blocks, for `take_changes`."""
        self._watched = True

    def take_changes(self) -> list[Changes]:
        """What this process did or found since the last call; of tiers, each says its own."""
        with self._counts_lock:
            changed, self._changed = self._changed, {}
        kept = [name for name, there in changed.items() if there]
        removed = [name for name, there in changed.items() if not there]
        return [Changes(self.medium, kept, removed)] if changed else []

    def statistics(self) -> dict[str, float]:
        """Counters of this process (blocks stored, present, loaded, missing, corrupt, dropped, evicted; bytes read and
        written), and `kept_bytes` and `pinned_blocks` where they are known."""
        with self._counts_lock:
            return {name: float(count) for name, count in self._counts.items()}

    def warn_full(self, error: Exception) -> None:
        """Say that there is no room, now and then; any thread."""
        now = SYSTEM_CLOCK.monotonic()
        if now - self._last_warning > WARN_EVERY_S:
            self._last_warning = now
            log.warning("blocks are not kept: %s", error)

    def count(self, **changes: int) -> None:
        """Add to the counters; any thread."""
        with self._counts_lock:
            self._counts.update(changes)

    def note_removed(self, hashes: Iterable[BlockHash]) -> None:
        """These are gone; any thread."""
        self._note(hashes, False)

    def note_kept(self, hashes: Iterable[BlockHash]) -> None:
        """These are there; any thread."""
        self._note(hashes, True)

    def _note(self, hashes: Iterable[BlockHash], there: bool) -> None:
        if self._watched:
            with self._counts_lock:
                for name in hashes:
                    self._changed.pop(name, None)
                    self._changed[name] = there


MAX_NOTE_BYTES = 2**16


def part_of(runs: Sequence[Run], first: int, last: int) -> list[Run]:
    """Blocks `[first, last)` of these."""
    found, start = [], 0
    for run in runs:
        begin, end = max(first, start), min(last, start + run.num_blocks)
        if begin < end:
            found.append(Run(run.tier, end - begin))
        start += run.num_blocks
    return found
