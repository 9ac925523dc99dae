"""KV blocks on a server of LMCache: `lmcache://host:port`, where `lmcache_server host port` runs.

The server neither evicts nor removes values. A store therefore uses as many keys as `max_bytes` has room for, and a new
block replaces an old one, so that the server's memory is bounded, also if writers are killed. `lmcache_sets` describes
the slots, and the index of the blocks in them. In a block's set, the unpinned block that was used least recently is
replaced.

A put first removes its slots from the index, sends the blocks, and then adds them to the index, so that no reader finds
or pins a slot whose value is about to change. An index is read just before it is written, by one store of a process at
a time. Two processes that change one index at the same time may lose one of the changes: a slot can then hold another
block than its index entry. That is a miss, because a record contains its block's hash. A pin is read back and repeated.

`max_bytes` must be the same on all instances, since it determines the slots. Notes have slots of their own.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

import msgspec

from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.blocks.layout import KVLayout
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError, StoreError
from kvferry.store.base import (
    MAX_NOTE_BYTES,
    Block,
    BlockRead,
    PutResult,
    SharedStore,
    StoreBytes,
    StoreFull,
    StoreOptions,
    require_short_note,
)
from kvferry.store.media.lmcache_client import MAX_BYTES, DamagedValue, LMCacheClient
from kvferry.store.media.lmcache_sets import LMCacheSets, LMCacheSlot, SlotAddress
from kvferry.store.record import CorruptBlock, read_label
from kvferry.store.threads import Stop, Threads

Item = TypeVar("Item")
WAYS = 8
"""Slots in a set."""
BATCH_BYTES = 64 * 2**20
"""Maximum bytes of blocks that are encoded, or sent, or received at a time."""
PIN_TRIES = 3
"""Number of attempts at a pin that another process overwrites."""


class LMCacheOptions(StoreOptions, frozen=True, kw_only=True):
    """`max_bytes`: maximum bytes of all blocks of one layout and codec on the server; must be the same on all
    instances. `pinned_share`: share of the slots of each set that may be pinned. Sets fill unevenly, so its default is
    larger than in other stores."""

    max_bytes: StoreBytes = 2**32
    pinned_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.75

    def check(self, location: str) -> None:
        """Raise `ConfigError` unless the location has a host and a port."""
        _address_of(location)

    def shared_name(self, location: str) -> str:
        """The name of the store with `max_bytes`, because the keys of blocks depend on it."""
        return f"lmcache of {self.max_bytes} bytes"


_Change = Callable[[list[LMCacheSlot], int], LMCacheSlot]
"""Called with the slots of a set and the index of one of them. Returns the new content of that slot."""


class LMCacheStore(SharedStore):
    """A store in an LMCache server, which other instances may share. `client`: its connections; `sets`: its index."""

    touch_s = 60.0
    """The time of a block's last use in the index is renewed only if it is older than this, to save requests."""
    num_note_slots = 2**18
    """Slots for notes, shared by all layouts."""
    client_type: type[LMCacheClient] = LMCacheClient

    options_type = LMCacheOptions
    options: LMCacheOptions
    cancels_at_once = True

    def __init__(self, location: str, options: LMCacheOptions, layout: KVLayout) -> None:
        super().__init__(location, options, layout)
        host, port = _address_of(location)
        record_bytes = self.records.max_record_bytes
        if record_bytes > MAX_BYTES:
            raise ConfigError(
                f"store lmcache:{location}: a block of {record_bytes} bytes is more than a value may have"
            )
        ways = max(1, min(WAYS, options.max_bytes // record_bytes))
        num_sets = max(1, options.max_bytes // (record_bytes * ways))
        share = options.pinned_share
        self._max_pinned = max(1, int(share * ways)) if share else 0
        """Number of slots of a set that can be pinned: at least one, unless `pinned_share` is 0."""
        name = f"kvferry.{layout.fingerprint()}.{self.records.codec.name}.{num_sets}.{ways}"
        self.client = self.client_type(host, port)
        self.sets = LMCacheSets(self.client, f"{host}:{port}", name, num_sets, ways)
        self._threads = Threads(2, "kvferry-lmcache-codec")
        self._put_lock = asyncio.Lock()

    async def open(self) -> None:
        """Does nothing: the store connects when it is first used, and again after a connection is lost."""

    async def close(self) -> None:
        """Close the connections, and end the threads that encode and decode."""
        self._threads.close()
        await self.client.close()

    # Blocks.

    async def match(self, hashes: Sequence[BlockHash]) -> int:
        """Reads the sets of all blocks in one batch."""
        sets = await self.sets.read(hashes)
        for index, block_hash in enumerate(hashes):
            if self.sets.find(sets, block_hash) is None:
                return index
        return len(hashes)

    async def get(self, reads: Sequence[BlockRead]) -> list[bool]:
        """Reads the sets, then the blocks. A block whose slot has another value is removed from the index."""
        hits: list[bool] = []
        for part in self._parts(reads):
            hits += await self._get(part)
        return hits

    async def put(self, blocks: Sequence[Block]) -> list[PutResult]:
        """Blocks that are stored already are not sent."""
        outcomes: list[PutResult] = []
        for part in self._parts(blocks):
            outcomes += await self._put(part)
        counts = {
            "stored_blocks": PutResult.STORED,
            "present_blocks": PutResult.PRESENT,
            "dropped_blocks": PutResult.DROPPED,
        }
        self.activity.count(**{name: outcomes.count(outcome) for name, outcome in counts.items()})
        return outcomes

    async def pin(self, hashes: Sequence[BlockHash]) -> int:
        """Sets a flag in the index and reads it back, `PIN_TRIES` times at most, since another process may overwrite
        it."""
        for _ in range(PIN_TRIES):
            await self._change(hashes, self._with_pin)
            sets = await self.sets.read(hashes)
            addresses = {address for name in hashes if (address := self.sets.find(sets, name)) is not None}
            num_pinned = sum(sets[address.set_number][address.way].pinned for address in addresses)
            slots = [(sets[address.set_number], address.way) for address in addresses]
            if all(self._with_pin(ways, way).pinned == ways[way].pinned for ways, way in slots):
                break
        return num_pinned

    def _with_pin(self, slots: Sequence[LMCacheSlot], way: int) -> LMCacheSlot:
        """The slot after `pin`: pinned, unless the set has as many pins as it may have."""
        has_room = sum(slot.pinned for slot in slots) < self._max_pinned
        return msgspec.structs.replace(slots[way], pinned=slots[way].pinned or has_room)

    async def unpin(self, hashes: Sequence[BlockHash]) -> int:
        return await self._change(hashes, lambda slots, way: msgspec.structs.replace(slots[way], pinned=False))

    async def delete(self, hashes: Sequence[BlockHash]) -> int:
        """Empties the slots, which then take no memory on the server."""
        self.activity.removed(hashes)
        return await self._change(hashes, lambda slots, way: LMCacheSlot(), empties=True)

    # Notes: time of expiry (8 bytes, Unix time in ms), digest of the name (32 bytes), content.

    async def write_note(self, name: str, content: bytes, ttl_s: float) -> None:
        """Replaces the note in the same slot, if any."""
        require_short_note(content)
        until = round((SYSTEM_CLOCK.wall() + ttl_s) * 1000).to_bytes(8, "little")
        key, digest = self._note_slot(name)
        await self.client.put([(key, until + digest + content)])

    async def read_note(self, name: str) -> bytes | None:
        """The note, unless it has expired or another note overwrote its slot."""
        key, digest = self._note_slot(name)
        [value] = await self.client.get([key], 40 + MAX_NOTE_BYTES)
        if not isinstance(value, bytes) or value[8:40] != digest:
            return None
        return value[40:] if int.from_bytes(value[:8], "little") >= SYSTEM_CLOCK.wall() * 1000 else None

    async def remove_note(self, name: str) -> None:
        if await self.read_note(name) is not None:
            await self.client.put([(self._note_slot(name)[0], b"")])

    def _note_slot(self, name: str) -> tuple[str, bytes]:
        """The key of a note's slot, and the digest that distinguishes the note from others in that slot."""
        digest = hashlib.sha256(name.encode()).digest()
        return f"kvferry.notes@1@0@{int.from_bytes(digest[:8], 'little') % self.num_note_slots:x}@uint8", digest

    # One batch.

    async def _get(self, reads: Sequence[BlockRead]) -> list[bool]:
        sets = await self.sets.read([read.block_hash for read in reads])
        addresses = [self.sets.find(sets, read.block_hash) for read in reads]
        keys = [self.sets.slot_key(address) for address in addresses if address is not None]
        records = iter(await self.client.get(keys, self.records.max_record_bytes))
        values = [next(records) if address is not None else None for address in addresses]
        hits = await self._threads.run(
            lambda stop: [self._decode(read, record, stop) for read, record in zip(reads, values, strict=True)]
        )
        results = list(zip(reads, addresses, hits, strict=True))
        with suppress(StoreError):  # the blocks have been read, even if the server has been lost since then
            await self._remove_stale(
                [read.block_hash for read, address, is_hit in results if address is not None and not is_hit]
            )
            await self._touch([read.block_hash for read, _, is_hit in results if is_hit], sets)
        return hits

    def _decode(self, read: BlockRead, record: bytes | DamagedValue | None, stop: Stop) -> bool:
        if record is None or record == b"" or self._holds_another_block(read, record):
            self.activity.count(missing_blocks=1)
            self.activity.removed([read.block_hash])
            return False
        try:
            if isinstance(record, DamagedValue):
                raise CorruptBlock("only a part of it was stored")
            is_hit = self.records.decode(memoryview(record), read.block_hash, read.into, stop.write)
        except CorruptBlock:
            self.activity.count(corrupt_blocks=1)
            self.activity.removed([read.block_hash])
            return False
        self.activity.count(loaded_blocks=is_hit, read_bytes=is_hit * len(record))
        return is_hit

    def _holds_another_block(self, read: BlockRead, record: bytes | DamagedValue) -> bool:
        """True if the slot holds another block than its index entry."""
        if isinstance(record, DamagedValue):
            return False
        try:
            return read_label(record).block_hash != read.block_hash
        except CorruptBlock:
            return False

    async def _remove_stale(self, hashes: Sequence[BlockHash]) -> None:
        """Remove blocks from the index that are not in their slots."""
        if hashes:
            await self._change(hashes, lambda slots, way: LMCacheSlot(), empties=True)

    async def _touch(self, hashes: Sequence[BlockHash], sets: dict[int, list[LMCacheSlot]]) -> None:
        now = SYSTEM_CLOCK.wall()
        addresses = {name: self.sets.find(sets, name) for name in hashes}
        slots = {name: sets[at.set_number][at.way] for name, at in addresses.items() if at is not None}
        old = [name for name, slot in slots.items() if now - slot.used_s > self.touch_s]
        if old:
            await self._change(old, lambda slots, way: msgspec.structs.replace(slots[way], used_s=now))

    async def _put(self, blocks: Sequence[Block]) -> list[PutResult]:
        async with self._put_lock:
            outcomes, claimed, evicted = await self._claim(blocks)
            self.activity.removed(evicted)
            records = await self._threads.run(lambda stop: [self._encode(block, stop) for block, _ in claimed])
            keys = [self.sets.slot_key(address) for _, address in claimed]
            try:
                await self.client.put(list(zip(keys, records, strict=True)))
                await self._add_to_index({address: block.block_hash for block, address in claimed})
            except StoreError:
                self.activity.count(dropped_blocks=len(claimed))
                raise
        self.activity.count(evicted_blocks=len(evicted), written_bytes=sum(map(len, records)))
        self.activity.stored(
            block.block_hash
            for block, outcome in zip(blocks, outcomes, strict=True)
            if outcome is not PutResult.DROPPED and block.block_hash not in evicted
        )
        return outcomes

    async def _claim(
        self, blocks: Sequence[Block]
    ) -> tuple[list[PutResult], list[tuple[Block, SlotAddress]], set[BlockHash]]:
        """Choose slots for these blocks, and remove their former blocks from the index. Returns the outcomes, the
        blocks to send with their slots, and the evicted blocks."""
        outcomes, claimed, evicted = [], [], set[BlockHash]()
        async with self.sets.locked():
            sets = await self.sets.read([block.block_hash for block in blocks])
            for block in blocks:
                outcome, way = self._make_room(sets[self.sets.set_of(block.block_hash)], block.block_hash, evicted)
                outcomes.append(outcome)
                if outcome is PutResult.STORED:
                    claimed.append((block, SlotAddress(self.sets.set_of(block.block_hash), way)))
            for _, address in claimed:
                sets[address.set_number][address.way] = LMCacheSlot(used_s=SYSTEM_CLOCK.wall())
            await self.client.put(self.sets.encoded(sets))
        return outcomes, claimed, evicted

    async def _add_to_index(self, claimed: dict[SlotAddress, BlockHash]) -> None:
        """Add blocks to the index, except where another process has added them meanwhile, or has pinned its own block
        in the slot."""
        async with self.sets.locked():
            sets = await self.sets.read(claimed.values())
            for address, block_hash in claimed.items():
                slots = sets[address.set_number]
                if self.sets.find(sets, block_hash) is None and not slots[address.way].pinned:
                    slots[address.way] = LMCacheSlot(block_hash, SYSTEM_CLOCK.wall())
            await self.client.put(self.sets.encoded(sets))

    def _encode(self, block: Block, stop: Stop) -> bytes:
        return b"" if stop.requested else b"".join(self.records.encode(block.block_hash, block.layers))

    def _make_room(
        self, slots: list[LMCacheSlot], block_hash: BlockHash, evicted: set[BlockHash]
    ) -> tuple[PutResult, int]:
        """Choose the block's slot in its set, and mark it as the block's. Adds its former block to `evicted`."""
        now = SYSTEM_CLOCK.wall()
        for way, slot in enumerate(slots):
            if slot.block_hash == block_hash:
                slots[way] = msgspec.structs.replace(slot, used_s=now)
                return PutResult.PRESENT, way
        free = [way for way, slot in enumerate(slots) if not slot.pinned]
        if not free:
            self.activity.warn_full(StoreFull("all blocks that share a slot with these are pinned"))
            return PutResult.DROPPED, 0
        way = min(free, key=lambda way: slots[way].used_s)  # 0: never used; now: about to be used
        evicted.discard(block_hash)
        if slots[way].block_hash:
            evicted.add(slots[way].block_hash)
        slots[way] = LMCacheSlot(block_hash, now)
        return PutResult.STORED, way

    async def _change(self, hashes: Sequence[BlockHash], change: _Change, *, empties: bool = False) -> int:
        """Change the slots of the blocks that are stored. Returns their number. `empties`: also remove their values."""
        if not hashes:
            return 0
        async with self.sets.locked():
            sets = await self.sets.read(hashes)
            addresses = {address for name in hashes if (address := self.sets.find(sets, name)) is not None}
            for address in addresses:
                sets[address.set_number][address.way] = change(sets[address.set_number], address.way)
            if addresses:
                emptied = [(self.sets.slot_key(address), b"") for address in addresses] if empties else []
                changed = {address.set_number for address in addresses}
                await self.client.put([*self.sets.encoded({n: sets[n] for n in changed}), *emptied])
        return len(addresses)

    def _parts(self, items: Sequence[Item]) -> list[Sequence[Item]]:
        part_size = max(1, BATCH_BYTES // self.records.max_record_bytes)
        return [items[first : first + part_size] for first in range(0, len(items), part_size)]


def _address_of(location: str) -> tuple[str, int]:
    """Host and port. Raises `ConfigError`."""
    try:
        url = urlsplit(f"lmcache:{location}")
        host, port = url.hostname, url.port
    except ValueError as error:
        raise ConfigError(f"store lmcache:{location}: {error}") from error
    if not host or not port or url.username is not None or url.path not in ("", "/") or url.fragment:
        raise ConfigError(f"store lmcache:{location}: name the server as in lmcache://host:65432")
    return host, port
