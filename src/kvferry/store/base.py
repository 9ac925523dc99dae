"""The interface of KV stores: blocks by block hash, kept until they are evicted.

Several processes and machines may share a store. Its methods are coroutines of one event loop; what blocks runs on
threads of the store. When a method has returned or raised, also by cancellation, nothing reads or writes the caller's
memory any more. What is stored under a hash never changes.

The content of a store may come from anyone who can write to it: `record` describes what is verified before it is used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, ClassVar

import msgspec

from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.blocks.layout import KVLayout
from kvferry.core.errors import StoreError
from kvferry.core.settings.bounds import MAX_BYTES, MAX_SECONDS
from kvferry.store.activity import StoreActivity
from kvferry.store.codecs.table import make_codec
from kvferry.store.machine import MACHINE, Machine
from kvferry.store.record import LayerViews, RecordFormat


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

    def check(self, location: str) -> None:
        """Raise `ConfigError` for mistakes in options or location that can be found before anything is opened."""

    def check_here(self, location: str) -> None:
        """Raise `ConfigError` if this machine does not have what the store needs. Called at start, before there is a
        layout. A server that does not answer is not an error: it may be started later."""

    def shared_name(self, location: str) -> str:
        """A name that is the same on all instances that share the store, as far as settings and machine determine that;
        empty: the class of the store. It does not contain the address, since one server or directory may have several
        names."""
        return ""


class KVStore(ABC):
    """Blocks of one layout, by hash. A stored block that does not verify counts as a miss and in `corrupt_blocks`, and
    is removed.

    Every method may raise `StoreError` if the store cannot be reached; which part of a batch was done then is unknown.
    Implementations report to `activity`; `kvferry.testing.stores` has their contract suite. Those that other instances
    share derive from `SharedStore`, those that read single layers from `LayerStore`.
    """

    options_type: ClassVar[type[StoreOptions]] = StoreOptions
    medium: ClassVar[str] = "STORAGE"
    """Where the blocks are, as KV events name it: "CPU" or "STORAGE"."""
    ends_calls: ClassVar[bool] = False
    """True if a cancelled call ends at once and no longer touches the caller's memory, whatever the medium does. Other
    stores, whose calls may hang or block their loop, are called on a separate loop, with copies of the caller's
    memory."""

    def __init__(self, location: str, options: StoreOptions, layout: KVLayout, machine: Machine = MACHINE) -> None:
        """Do not open the store yet. `location`: the URL between the scheme and the `?`. `machine`: the threads, files
        and shared memory to use; a store that uses none of these leaves the parameter out. Raises `ConfigError`."""
        self.location, self.options, self.layout = location, options, layout
        self.machine = machine
        self.records = RecordFormat(layout, make_codec(options.codec, layout))
        self.activity = StoreActivity(self.medium)

    async def open(self) -> None:
        """Called before anything else, perhaps repeatedly. Raises `ConfigError` or `StoreError` if the store cannot be
        used."""

    @abstractmethod
    async def match(self, hashes: Sequence[BlockHash]) -> int:
        """Number of leading blocks that are stored. They are not read, so `get` may still find one damaged."""

    @abstractmethod
    async def get(self, reads: Sequence[Read]) -> list[bool]:
        """Read blocks directly into `Read.into`. False: the block is not there or did not verify; its `into` then holds
        arbitrary bytes."""

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

    async def finish(self, hashes: Sequence[BlockHash], num_output_tokens: int) -> None:
        """A hint for eviction: the request whose prompt begins with these blocks has its whole answer. Given only if
        `StoreSpec.uses_finishes`. Default: ignored."""

    async def close(self) -> None:
        """Release all resources of this process. What is stored stays, unless it is in memory that ends with this
        process."""

    def statistics(self) -> dict[str, float]:
        """Counters of this process: `stored_blocks`, `present_blocks`, `loaded_blocks`, `missing_blocks`,
        `corrupt_blocks`, `dropped_blocks`, `evicted_blocks`, `read_bytes`, `written_bytes`; and the gauges `kept_bytes`
        and `pinned_blocks` if they are known."""
        return self.activity.counts()


class SharedStore(KVStore):
    """A store whose blocks other instances find. It also keeps notes: small named messages between instances, such as
    the markers of hand-offs."""

    @abstractmethod
    async def write_note(self, name: str, content: bytes, ttl_s: float) -> None:
        """Write a note of at most `MAX_NOTE_BYTES`, replacing one of the same name. It may disappear after `ttl_s`
        seconds."""

    @abstractmethod
    async def read_note(self, name: str) -> bytes | None:
        """The note, or None if there is none or it has expired."""

    @abstractmethod
    async def remove_note(self, name: str) -> None:
        """Remove a note, if it exists."""


class LayerStore(KVStore):
    """A store that can read single layers of blocks."""

    @abstractmethod
    async def get_layer(self, layer: int, reads: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        """Like `get` for one layer."""


MAX_NOTE_BYTES = 2**16


def require_short_note(content: bytes, max_bytes: int = MAX_NOTE_BYTES) -> None:
    """Raise `StoreError` if a note is longer than `max_bytes` bytes."""
    if len(content) > max_bytes:
        raise StoreError(f"a note of {len(content)} bytes; at most {max_bytes} are accepted")
