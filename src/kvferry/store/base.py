"""The interface of KV stores: blocks by block hash, kept until they are evicted.

Several processes and machines may share a store. Its methods are coroutines of one event loop; what blocks runs on
threads of the store. When a method has returned or raised, also by cancellation, nothing reads or writes the caller's
memory any more. What is stored under a hash never changes.

The content of a store may come from anyone who can write to it: `record` describes what is verified before it is used.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from threading import Lock
from typing import Annotated, Any, ClassVar

import msgspec

from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.blocks.layout import KVLayout
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import StoreError
from kvferry.core.settings.bounds import MAX_BYTES, MAX_SECONDS
from kvferry.store.codecs.table import make_codec
from kvferry.store.machine import MACHINE, Machine
from kvferry.store.record import LayerViews, RecordFormat

log = logging.getLogger(__name__)

WARN_EVERY_S = 10.0


@dataclass(frozen=True)
class Block:
    """A block to store: `layers` has one view for each layer, of `KVLayout.span_bytes` bytes. `parent`: the hash of the
    block before it in its prompt, if known; eviction policies for prefix trees use it."""

    block_hash: BlockHash
    layers: LayerViews
    parent: BlockHash | None = None


@dataclass(frozen=True)
class Read:
    """A block to read: `into` has one writable view for each layer, of `KVLayout.span_bytes` bytes."""

    block_hash: BlockHash
    into: LayerViews


class Put(Enum):
    """The result for a block that was to be stored."""

    STORED = "stored"
    PRESENT = "present"
    """The block was stored already, and counts as used now."""
    DROPPED = "dropped"
    """The block was not stored: there is no room for it, the store is unreachable, or the call was cancelled."""


@dataclass(frozen=True)
class Changes:
    """Blocks that were stored on one medium (`KVStore.medium`), and blocks that were removed from it."""

    medium: str
    stored: list[BlockHash]
    removed: list[BlockHash]


@dataclass(frozen=True)
class BlockRun:
    """`num_blocks` consecutive blocks that are in the same tier; tier 0 is the fastest."""

    tier: int
    num_blocks: int


class StoreFull(StoreError):
    """A block was not stored because there is no room, although the store works. Raised and handled within a store,
    which answers `Put.DROPPED`."""


StoreBytes = Annotated[int, msgspec.Meta(gt=0, le=MAX_BYTES - 1)]
StoreThreads = Annotated[int, msgspec.Meta(ge=1, le=256)]


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that every store takes after the `?` of its URL. A store adds its own by deriving from this."""

    codec: str = "none"
    """Encoding of blocks: a name of `codecs.table`."""
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)] = 0.25
    """Seconds to wait for one call, besides the time that its blocks take at 64 MiB/s. A tier that does not answer by
    then is not used until it answers again."""
    pinned_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    """Share of a bounded store's room that may be pinned, so that there is always room for other blocks."""


class KVStore(ABC):
    """Blocks of one layout, by hash. A stored block that does not verify counts as a miss and in `corrupt_blocks`, and
    is removed.

    Every method may raise `StoreError` if the store cannot be reached; which part of a batch was done then is unknown.
    Implementations call `count`, `note_kept` and `note_removed`; `kvferry.testing.stores` has their contract suite.
    """

    options_type: ClassVar[type[StoreOptions]] = StoreOptions
    medium: ClassVar[str] = "STORAGE"
    """Where the blocks are, as KV events name it: "CPU" or "STORAGE"."""
    is_shared: ClassVar[bool] = True
    """True if other instances find the blocks and notes that this one stores."""
    has_layers: ClassVar[bool] = False
    """True if `get_layer` is implemented."""
    ends_calls: ClassVar[bool] = False
    """True if a cancelled call ends at once and no longer touches the caller's memory, whatever the medium does. Other
    stores, whose calls may hang or block their loop, are called on a separate loop, with copies of the caller's
    memory."""

    def __init__(self, location: str, options: StoreOptions, layout: KVLayout) -> None:
        """Do not open the store yet. `location`: the URL between the scheme and the `?`. Raises `ConfigError`."""
        self.location, self.options, self.layout = location, options, layout
        self.machine = MACHINE
        self.records = RecordFormat(layout, make_codec(options.codec, layout))
        self._counts: Counter[str] = Counter()
        self._counts_lock = Lock()
        self._last_warning = -WARN_EVERY_S
        self._watched = False
        self._changed: dict[BlockHash, bool] = {}
        """Changed blocks; the value is true if the block is stored now."""

    def run_on(self, machine: Machine) -> None:
        """Use the threads, files and shared memory of this machine. Called before `open`, if at all. A store that uses
        any of these overrides this method."""
        self.machine = machine

    @classmethod
    def check(cls, location: str, options: Any) -> None:
        """Raise `ConfigError` for mistakes that can be found before anything is opened. `options`: an
        `options_type`."""

    @classmethod
    def check_here(cls, location: str, options: Any) -> None:
        """Raise `ConfigError` if this machine does not have what the store needs. Called at start, before there is a
        layout. A server that does not answer is not an error: it may be started later."""

    @classmethod
    def shared_name(cls, location: str, options: Any) -> str:
        """A name that is the same on all instances that share the store, as far as settings and machine determine that.
        It does not contain the address, since one server or directory may have several names."""
        return f"{cls.__module__}:{cls.__qualname__}"

    # Blocks.

    async def open(self) -> None:
        """Called before anything else, perhaps repeatedly. Raises `ConfigError` or `StoreError` if the store cannot be
        used."""

    @abstractmethod
    async def match(self, hashes: Sequence[BlockHash]) -> int:
        """Number of leading blocks that are stored. They are not read, so `get` may still find one damaged."""

    async def runs(self, hashes: Sequence[BlockHash]) -> list[BlockRun]:
        """Like `match`, by tier."""
        num_blocks = await self.match(hashes)
        return [BlockRun(0, num_blocks)] if num_blocks else []

    @abstractmethod
    async def get(self, reads: Sequence[Read]) -> list[bool]:
        """Read blocks directly into `Read.into`. False: the block is not there or did not verify; its `into` then holds
        arbitrary bytes."""

    async def get_layer(self, layer: int, reads: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        """Like `get` for one layer; only if `has_layers`."""
        raise NotImplementedError(f"{type(self).__name__} reads whole blocks only")

    @abstractmethod
    async def put(self, blocks: Sequence[Block]) -> list[Put]:
        """Store blocks. A block that is only partly written is never found, even if this process is killed."""

    @abstractmethod
    async def pin(self, hashes: Sequence[BlockHash]) -> int:
        """Protect these blocks from eviction until `unpin`, as far as `pinned_share` allows. Returns the number that
        are pinned now. Pins are not counted: one `unpin` undoes any number of `pin`."""

    @abstractmethod
    async def unpin(self, hashes: Sequence[BlockHash]) -> int:
        """Allow eviction of these blocks again. Returns the number that are stored."""

    @abstractmethod
    async def delete(self, hashes: Sequence[BlockHash]) -> int:
        """Remove these blocks, pinned or not. Returns the number that were stored."""

    async def prefetch(self, hashes: Sequence[BlockHash]) -> None:
        """A hint that these blocks will be read soon. Default: ignored."""

    async def finish(self, hashes: Sequence[BlockHash], num_output_tokens: int) -> None:
        """A hint for eviction: the request whose prompt begins with these blocks has its whole answer. Given only if
        `StoreSpec.uses_finishes`. Default: ignored."""

    async def close(self) -> None:
        """Release all resources of this process. What is stored stays, unless it is in memory that ends with this
        process."""

    # Notes: small named messages between instances, such as the markers of hand-offs; only if `is_shared`.

    async def write_note(self, name: str, content: bytes, ttl_s: float) -> None:
        """Write a note of at most `MAX_NOTE_BYTES`, replacing one of the same name. It may disappear after `ttl_s`
        seconds."""
        raise NotImplementedError(f"{type(self).__name__} keeps no notes")

    async def read_note(self, name: str) -> bytes | None:
        """The note, or None if there is none or it has expired."""
        raise NotImplementedError(f"{type(self).__name__} keeps no notes")

    async def remove_note(self, name: str) -> None:
        """Remove a note, if it exists."""
        raise NotImplementedError(f"{type(self).__name__} keeps no notes")

    def answers(self, shared: Collection[int]) -> bool:
        """True if at least one of these shared tiers is reachable. `shared`: their indices among the shared tiers.
        Always true for a store without tiers."""
        return True

    def takes(self) -> list[int]:
        """Indices, among the shared tiers, of those that accepted everything in the last put and the last note."""
        return [0]

    # Insight.

    def watch(self) -> None:
        """Record from now on which blocks are stored and lost, for `take_changes`."""
        self._watched = True

    def take_changes(self) -> list[Changes]:
        """Return the changes that this process made or noticed since the last call: one entry for each tier with
        changes. Empty before `watch`."""
        with self._counts_lock:
            changed, self._changed = self._changed, {}
        stored = [name for name, is_stored in changed.items() if is_stored]
        removed = [name for name, is_stored in changed.items() if not is_stored]
        return [Changes(self.medium, stored, removed)] if changed else []

    def statistics(self) -> dict[str, float]:
        """Counters of this process: `stored_blocks`, `present_blocks`, `loaded_blocks`, `missing_blocks`,
        `corrupt_blocks`, `dropped_blocks`, `evicted_blocks`, `read_bytes`, `written_bytes`; and the gauges `kept_bytes`
        and `pinned_blocks` if they are known."""
        with self._counts_lock:
            return {name: float(count) for name, count in self._counts.items()}

    def warn_full(self, error: Exception) -> None:
        """Log that there is no room, at most once in `WARN_EVERY_S` seconds. Any thread."""
        now = SYSTEM_CLOCK.monotonic()
        if now - self._last_warning > WARN_EVERY_S:
            self._last_warning = now
            log.warning("blocks are not kept: %s", error)

    def count(self, **changes: int) -> None:
        """Add to counters of `statistics`, by name. Any thread."""
        with self._counts_lock:
            self._counts.update(changes)

    def note_removed(self, hashes: Iterable[BlockHash]) -> None:
        """Record for `take_changes` that these blocks were removed. Any thread."""
        self._note(hashes, False)

    def note_kept(self, hashes: Iterable[BlockHash]) -> None:
        """Record for `take_changes` that these blocks are stored. Any thread."""
        self._note(hashes, True)

    def _note(self, hashes: Iterable[BlockHash], is_stored: bool) -> None:
        if self._watched:
            with self._counts_lock:
                for name in hashes:
                    self._changed.pop(name, None)
                    self._changed[name] = is_stored


MAX_NOTE_BYTES = 2**16


def require_short_note(content: bytes, max_bytes: int = MAX_NOTE_BYTES) -> None:
    """Raise `StoreError` if a note is longer than `max_bytes` bytes."""
    if len(content) > max_bytes:
        raise StoreError(f"a note of {len(content)} bytes; at most {max_bytes} are accepted")


def part_of(runs: Sequence[BlockRun], first: int, last: int) -> list[BlockRun]:
    """The part of `runs` that holds blocks `[first, last)`, counted from the first block of `runs`."""
    part, start = [], 0
    for run in runs:
        begin, end = max(first, start), min(last, start + run.num_blocks)
        if begin < end:
            part.append(BlockRun(run.tier, end - begin))
        start += run.num_blocks
    return part


def joined(runs: Sequence[BlockRun]) -> tuple[BlockRun, ...]:
    """The same runs, with neighbours in one tier joined."""
    merged: list[BlockRun] = []
    for run in runs:
        if merged and merged[-1].tier == run.tier:
            run = BlockRun(run.tier, merged.pop().num_blocks + run.num_blocks)
        merged.append(run)
    return tuple(merged)
