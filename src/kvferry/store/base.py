"""The interface of KV stores: blocks by block hash, kept until they are evicted.

Several processes and machines may share a store. Its methods are coroutines of one event loop; calls that would block
the loop run on threads of the store. When a method has returned or raised, also by cancellation, the store no longer
reads or writes the caller's memory. The content that is stored under a hash never changes.

The content of a store may come from anyone who can write to it: `record` describes what is verified before it is used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, ClassVar

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
class BlockRead:
    """A block to read: `into` has one writable view for each layer, of `KVLayout.span_bytes` bytes."""

    block_hash: BlockHash
    into: LayerViews


class PutResult(Enum):
    """The result for a block that was to be stored."""

    STORED = "stored"
    PRESENT = "present"
    """The block was stored already, and counts as used now."""
    DROPPED = "dropped"
    """The block was not stored: there is no room for it, the store is unreachable, or the call was cancelled."""


Read, Put = BlockRead, PutResult
"""Deprecated names of `BlockRead` and `PutResult`."""


class StoreFull(StoreError):
    """A block was not stored because there is no room, although the store works. Raised and handled within a store,
    which answers `PutResult.DROPPED`."""


StoreBytes = Annotated[int, msgspec.Meta(gt=0, le=MAX_BYTES - 1)]
StoreThreads = Annotated[int, msgspec.Meta(ge=1, le=256)]


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that every store takes after the `?` of its URL. A store adds its own by deriving from this."""

    codec: str = "none"
    """Encoding of blocks: a name of `codecs.table`."""
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)] = 0.25
    """Maximum seconds for one call, plus the time that its blocks take at 64 MiB/s. A tier that does not answer in this
    time is not used until it answers again."""
    pinned_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    """Share of a bounded store's capacity that may be pinned, so that there is always room for other blocks."""

    def check(self, location: str) -> None:
        """Raise `ConfigError` for mistakes in options or location that can be found on any machine, before anything is
        opened."""

    def check_here(self, location: str) -> None:
        """Raise `ConfigError` if this machine lacks something that the store needs, such as a library or a folder.
        Called at start, before there is a layout. A server that does not answer is not an error: it may be started
        later."""

    def shared_name(self, location: str) -> str:
        """A name of the store that is equal on all instances that share it, as far as settings and machine determine
        it. An empty string stands for the name of the store's class. The name does not contain the address, since one
        server or directory may have several addresses."""
        return ""


class KVStore(ABC):
    """Blocks of one layout, by hash. A stored block that does not verify is removed; it counts as a miss, and in
    `corrupt_blocks`.

    Every method may raise `StoreError` if the store cannot be reached. It is then unknown which part of a batch was
    done. Implementations report to `activity`; `kvferry.testing.stores` has their contract suite. Stores that instances
    share derive from `SharedStore`, stores that can read single layers from `LayerStore`.
    """

    options_type: ClassVar[type[StoreOptions]] = StoreOptions
    medium: ClassVar[str] = "STORAGE"
    """Where the blocks are, as KV events name it: "CPU" or "STORAGE"."""
    cancels_at_once: ClassVar[bool] = False
    """True if a cancelled call ends at once and no longer uses the caller's memory, even if the medium hangs. The calls
    of other stores may hang or block their loop: they run on a separate loop, with copies of the caller's memory."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Accept `ends_calls`, the deprecated name of `cancels_at_once`."""
        super().__init_subclass__(**arguments)
        cls.cancels_at_once = cls.__dict__.get("ends_calls", cls.cancels_at_once)

    def __init__(self, location: str, options: StoreOptions, layout: KVLayout, machine: Machine = MACHINE) -> None:
        """Does not open the store. `location`: the part of the URL between the scheme and the `?`. `machine`: the
        threads, files and shared memory to use; the class of a store that uses none of these may lack the parameter.
        Raises `ConfigError`."""
        self.location, self.options, self.layout = location, options, layout
        self.machine = machine
        self.records = RecordFormat(layout, make_codec(options.codec, layout))
        self.activity = StoreActivity(self.medium)

    async def open(self) -> None:
        """Open the store. Called before all other methods, possibly repeatedly. Raises `ConfigError` or `StoreError` if
        the store cannot be used."""

    @abstractmethod
    async def match(self, hashes: Sequence[BlockHash]) -> int:
        """Number of blocks at the beginning of `hashes` that are stored. They are not read, so `get` may still find one
        of them damaged."""

    @abstractmethod
    async def get(self, reads: Sequence[BlockRead]) -> list[bool]:
        """Read blocks directly into `BlockRead.into`. Returns one value for each of `reads`; False: the block is not
        stored or did not verify, and its `into` has arbitrary bytes."""

    @abstractmethod
    async def put(self, blocks: Sequence[Block]) -> list[PutResult]:
        """Store blocks. Returns the result for each. A block that is only partly written is never found, even if this
        process is killed."""

    @abstractmethod
    async def pin(self, hashes: Sequence[BlockHash]) -> int:
        """Protect these blocks from eviction until `unpin`, as far as `pinned_share` allows. Returns how many of them
        are pinned now. Pins are not counted: one `unpin` undoes any number of `pin`."""

    @abstractmethod
    async def unpin(self, hashes: Sequence[BlockHash]) -> int:
        """Allow eviction of these blocks again. Returns how many of them are stored."""

    @abstractmethod
    async def delete(self, hashes: Sequence[BlockHash]) -> int:
        """Remove these blocks, also pinned ones. Returns how many of them were stored."""

    async def finish(self, hashes: Sequence[BlockHash], num_output_tokens: int) -> None:
        """A hint for eviction: a request whose prompt begins with these blocks has its complete answer. Called only if
        `StoreSpec.uses_finishes`. By default, it is ignored."""

    async def close(self) -> None:
        """Release all resources of this process. Stored blocks stay, unless they are in memory that ends with this
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
