"""The index of an LMCache store, which maps blocks to slots.

LMCache's server neither lists nor evicts nor removes values, so a store uses a fixed number of keys, its *slots*, like
a set-associative cache: a block's hash determines its *set*, and the block is in one of the `ways` slots of that set.
A set's index is one more value: for each of its slots the block's hash, the time of its last use, and whether it is
pinned.

Knows the keys and the form of an index. `lmcache` decides which block goes into which slot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from threading import Lock
from weakref import WeakValueDictionary

import msgspec
import xxhash

from kvferry.core.blocks.block_hash import BlockHash
from kvferry.store.media.lmcache_client import DamagedValue, LMCacheClient


class LMCacheSlot(msgspec.Struct, array_like=True):
    """The index entry of one slot. An empty `block_hash`: no block. `used_s`: time of the last use, since the epoch."""

    block_hash: bytes = b""
    used_s: float = 0.0
    pinned: bool = False


SlotsBySet = dict[int, list[LMCacheSlot]]
"""The slots of each set, by the set's number."""


@dataclass(frozen=True)
class SlotAddress:
    """Names one slot: the index of its set, and its own index in the set, both from 0."""

    set_number: int
    way: int


class LMCacheSets:
    """The sets of one layout and codec on one server. `name` is a part of all its keys. Methods that read or write may
    raise `StoreError`."""

    max_index_bytes = 4096
    """Maximum bytes of an index; a longer value is not read."""

    def __init__(self, client: LMCacheClient, server: str, name: str, num_sets: int, ways: int) -> None:
        """`server`: its address; stores of this process with the same `server` and `name` share one lock."""
        self._client, self._name = client, name
        self.num_sets, self.ways = num_sets, ways
        self._lock = _locks.setdefault(f"{server}/{name}", _IndexLock())

    def locked(self) -> _IndexLock:
        """Lock to hold (`async with`) from the reading of an index until it is written. It excludes other stores of
        this process, but not other processes."""
        return self._lock

    def set_of(self, block_hash: BlockHash) -> int:
        """The number of the block's set."""
        return int.from_bytes(block_hash[:8], "little") % self.num_sets

    def find(self, sets: SlotsBySet, block_hash: BlockHash) -> SlotAddress | None:
        """The address of a block; `sets` includes its set."""
        number = self.set_of(block_hash)
        ways = (way for way, slot in enumerate(sets[number]) if slot.block_hash == block_hash)
        way = next(ways, None)
        return None if way is None else SlotAddress(number, way)

    async def read(self, hashes: Iterable[BlockHash]) -> SlotsBySet:
        """The sets of these blocks, in one batch. An index that is missing or damaged reads as empty slots."""
        numbers = sorted({self.set_of(block_hash) for block_hash in hashes})
        values = await self._client.get([self.index_key(number) for number in numbers], self.max_index_bytes)
        return {number: self._decoded(value) for number, value in zip(numbers, values, strict=True)}

    def _decoded(self, value: bytes | DamagedValue | None) -> list[LMCacheSlot]:
        if isinstance(value, bytes) and xxhash.xxh3_64_digest(value[8:]) == value[:8]:
            try:
                slots = msgspec.msgpack.decode(value[8:], type=list[LMCacheSlot])
            except (msgspec.DecodeError, RecursionError):
                slots = []
            if len(slots) == self.ways:
                return slots
        return [LMCacheSlot() for _ in range(self.ways)]

    def encoded(self, sets: SlotsBySet) -> list[tuple[str, bytes]]:
        """Key and value of each set's index, for `LMCacheClient.put`: 8 bytes of XXH3-64, then msgpack."""
        bodies = {number: msgspec.msgpack.encode(slots) for number, slots in sets.items()}
        return [(self.index_key(number), xxhash.xxh3_64_digest(body) + body) for number, body in bodies.items()]

    # Keys, in the form that LMCache's server parses: name@world size@worker@chunk hash@dtype.

    def index_key(self, number: int) -> str:
        """The key of a set's index."""
        return f"{self._name}@1@0@{number:x}@uint8"

    def slot_key(self, address: SlotAddress) -> str:
        """The key of a slot."""
        return f"{self._name}@1@{address.way + 1}@{address.set_number:x}@uint8"


class _IndexLock:
    """Mutual exclusion of the stores of this process, which may be on different event loops."""

    lock_poll_s = 0.001

    def __init__(self) -> None:
        self._lock = Lock()

    async def __aenter__(self) -> None:
        # Polled, because the holder may be on another thread's loop, and a cancelled wait must not take the lock.
        while not self._lock.acquire(blocking=False):  # noqa: ASYNC110 - no event reaches from loop to loop
            await asyncio.sleep(self.lock_poll_s)

    async def __aexit__(self, *error: object) -> None:
        self._lock.release()


_locks: WeakValueDictionary[str, _IndexLock] = WeakValueDictionary()
