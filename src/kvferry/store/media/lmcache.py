"""KV blocks on a server of LMCache's: `lmcache://host:port`, where `lmcache_server host port` runs.

The server neither evicts nor removes values. A store therefore uses as many keys as `max_bytes` has room for, and a new
block replaces an old one, so that the server's memory is bounded however writers end. `lmcache_sets` describes the
places, and the index that says which block is where. In a block's set, the unpinned block that was used least recently
is replaced.

A put first removes its places from the index, sends the blocks, and then enters them in the index, so that nobody finds
or pins a place whose value is about to change. An index is read just before it is written, by one store of a process at
a time. Two processes that change one index at the same time may lose one of the changes: a place can then hold another
block than the index says, which is a miss, because a record contains its block's hash; a pin is read back and repeated.

`max_bytes` must be the same on all instances, since it determines the places. Notes have places of their own.
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
    KVStore,
    Put,
    Read,
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
"""Places in a set."""
NUM_NOTE_PLACES = 2**18
"""Places for notes, shared by all layouts."""
TOUCH_S = 60.0
"""A block's time of use in the index is renewed only if it is older than this, to spare the server."""
BATCH_BYTES = 64 * 2**20
"""Most bytes of blocks that are encoded, or sent, or received at a time."""
PIN_TRIES = 3
"""How often a pin that another process has overwritten is repeated."""


class LMCacheOptions(StoreOptions, frozen=True, kw_only=True):
    """`max_bytes`: of all blocks of one layout and codec on the server; must be the same on all instances.
    `pinned_share`: of the places of each set. Sets fill unevenly, so it is more than the half of other stores."""

    max_bytes: StoreBytes = 2**32
    pinned_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.75


_Change = Callable[[list[LMCacheSlot], int], LMCacheSlot]
"""Takes a set's places and the index of one, and returns what that place becomes."""


class LMCacheStore(KVStore):
    """A store in an LMCache server, which other instances may share. `client`: its connections; `sets`: its index."""

    options_type = LMCacheOptions
    options: LMCacheOptions
    ends_calls = True

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
        """How many places of a set can be pinned: at least one, unless `pinned_share` is 0."""
        name = f"kvferry.{layout.fingerprint()}.{self.records.codec.name}.{num_sets}.{ways}"
        self.client = LMCacheClient(host, port)
        self.sets = LMCacheSets(self.client, f"{host}:{port}", name, num_sets, ways)
        self._threads = Threads(2, "kvferry-lmcache-codec")
        self._put_lock = asyncio.Lock()

    @classmethod
    def check(cls, location: str, options: object) -> None:
        """Raise `ConfigError` unless the location has a host and a port."""
        _address_of(location)

    @classmethod
    def shared_name(cls, location: str, options: LMCacheOptions) -> str:
        """The name of the store with `max_bytes`, because the key of a block depends on it."""
        return f"lmcache of {options.max_bytes} bytes"

    async def open(self) -> None:
        """Does nothing: the store connects when it is first used, and again when that is needed."""

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

    async def get(self, reads: Sequence[Read]) -> list[bool]:
        """Reads the sets, then the blocks. A block whose place holds something else is removed from the index."""
        found: list[bool] = []
        for part in self._parts(reads):
            found += await self._get(part)
        return found

    async def put(self, blocks: Sequence[Block]) -> list[Put]:
        """Blocks that are there already are not sent."""
        outcomes: list[Put] = []
        for part in self._parts(blocks):
            outcomes += await self._put(part)
        counts = {"stored_blocks": Put.STORED, "present_blocks": Put.PRESENT, "dropped_blocks": Put.DROPPED}
        self.count(**{name: outcomes.count(outcome) for name, outcome in counts.items()})
        return outcomes

    async def pin(self, hashes: Sequence[BlockHash]) -> int:
        """Sets a flag in the index and reads it back, `PIN_TRIES` times at most, since another process may overwrite
        it."""
        for _ in range(PIN_TRIES):
            await self._change(hashes, self._pinned)
            sets = await self.sets.read(hashes)
            found = {at for name in hashes if (at := self.sets.find(sets, name)) is not None}
            num_pinned = sum(sets[at.set_number][at.way].pinned for at in found)
            if all(
                self._pinned(sets[at.set_number], at.way).pinned == sets[at.set_number][at.way].pinned for at in found
            ):
                break
        return num_pinned

    def _pinned(self, places: Sequence[LMCacheSlot], way: int) -> LMCacheSlot:
        """A place of a set as `pin` leaves it: pinned, unless the set has its share of pins already."""
        has_room = sum(place.pinned for place in places) < self._max_pinned
        return msgspec.structs.replace(places[way], pinned=places[way].pinned or has_room)

    async def unpin(self, hashes: Sequence[BlockHash]) -> int:
        return await self._change(hashes, lambda places, way: msgspec.structs.replace(places[way], pinned=False))

    async def delete(self, hashes: Sequence[BlockHash]) -> int:
        """Empties the places, which then take no memory on the server."""
        self.note_removed(hashes)
        return await self._change(hashes, lambda places, way: LMCacheSlot(), empties=True)

    # Notes: time of expiry (8 bytes, Unix time in ms), digest of the name (32 bytes), content.

    async def write_note(self, name: str, content: bytes, ttl_s: float) -> None:
        """Replaces whatever note has the same place."""
        require_short_note(content)
        until = round((SYSTEM_CLOCK.wall() + ttl_s) * 1000).to_bytes(8, "little")
        key, digest = _note_place(name)
        await self.client.put([(key, until + digest + content)])

    async def read_note(self, name: str) -> bytes | None:
        """The note, unless it has expired or another note took its place."""
        key, digest = _note_place(name)
        [found] = await self.client.get([key], 40 + MAX_NOTE_BYTES)
        if not isinstance(found, bytes) or found[8:40] != digest:
            return None
        return found[40:] if int.from_bytes(found[:8], "little") >= SYSTEM_CLOCK.wall() * 1000 else None

    async def remove_note(self, name: str) -> None:
        if await self.read_note(name) is not None:
            await self.client.put([(_note_place(name)[0], b"")])

    # One batch.

    async def _get(self, reads: Sequence[Read]) -> list[bool]:
        sets = await self.sets.read([read.block_hash for read in reads])
        places = [self.sets.find(sets, read.block_hash) for read in reads]
        keys = [self.sets.place_key(place) for place in places if place is not None]
        records = iter(await self.client.get(keys, self.records.max_record_bytes))
        given = [next(records) if place is not None else None for place in places]
        found = await self._threads.run(
            lambda stop: [self._decode(read, record, stop) for read, record in zip(reads, given, strict=True)]
        )
        pairs = list(zip(reads, places, found, strict=True))
        with suppress(StoreError):  # the blocks were read even if the server is gone since
            await self._tidy([read.block_hash for read, place, there in pairs if place is not None and not there])
            await self._touch([read.block_hash for read, _, there in pairs if there], sets)
        return found

    def _decode(self, read: Read, record: bytes | DamagedValue | None, stop: Stop) -> bool:
        if record is None or record == b"" or self._is_another(read, record):
            self.count(missing_blocks=1)
            self.note_removed([read.block_hash])
            return False
        try:
            if isinstance(record, DamagedValue):
                raise CorruptBlock("only a part of it was stored")
            found = self.records.decode(memoryview(record), read.block_hash, read.into, stop.write)
        except CorruptBlock:
            self.count(corrupt_blocks=1)
            self.note_removed([read.block_hash])
            return False
        self.count(loaded_blocks=found, read_bytes=found * len(record))
        return found

    def _is_another(self, read: Read, record: bytes | DamagedValue) -> bool:
        """Whether the place holds another block than its index says."""
        if isinstance(record, DamagedValue):
            return False
        try:
            return read_label(record).block_hash != read.block_hash
        except CorruptBlock:
            return False

    async def _tidy(self, hashes: Sequence[BlockHash]) -> None:
        """Remove blocks from the index that are not where it says."""
        if hashes:
            await self._change(hashes, lambda places, way: LMCacheSlot(), empties=True)

    async def _touch(self, hashes: Sequence[BlockHash], sets: dict[int, list[LMCacheSlot]]) -> None:
        now = SYSTEM_CLOCK.wall()
        places = {name: self.sets.find(sets, name) for name in hashes}
        old = [
            name for name, at in places.items() if at is not None and now - sets[at.set_number][at.way].used_s > TOUCH_S
        ]
        if old:
            await self._change(old, lambda places, way: msgspec.structs.replace(places[way], used_s=now))

    async def _put(self, blocks: Sequence[Block]) -> list[Put]:
        async with self._put_lock:
            outcomes, placed, gone = await self._claim(blocks)
            self.note_removed(gone)
            records = await self._threads.run(lambda stop: [self._encode(block, stop) for block, _ in placed])
            values = [(self.sets.place_key(at), record) for (_, at), record in zip(placed, records, strict=True)]
            try:
                await self.client.put(values)
                await self._enter({at: block.block_hash for block, at in placed})
            except StoreError:
                self.count(dropped_blocks=len(placed))
                raise
        self.count(evicted_blocks=len(gone), written_bytes=sum(map(len, records)))
        self.note_kept(
            block.block_hash
            for block, outcome in zip(blocks, outcomes, strict=True)
            if outcome is not Put.DROPPED and block.block_hash not in gone
        )
        return outcomes

    async def _claim(
        self, blocks: Sequence[Block]
    ) -> tuple[list[Put], list[tuple[Block, SlotAddress]], set[BlockHash]]:
        """Choose places for these blocks, and remove from the index what was in them. Returns the outcomes, the blocks
        to send with their places, and the blocks that are gone."""
        outcomes, placed, gone = [], [], set[BlockHash]()
        async with self.sets.locked():
            sets = await self.sets.read([block.block_hash for block in blocks])
            for block in blocks:
                outcome, way = self._make_room(sets[self.sets.set_of(block.block_hash)], block.block_hash, gone)
                outcomes.append(outcome)
                if outcome is Put.STORED:
                    placed.append((block, SlotAddress(self.sets.set_of(block.block_hash), way)))
            for _, at in placed:
                sets[at.set_number][at.way] = LMCacheSlot(used_s=SYSTEM_CLOCK.wall())
            await self.client.put(self.sets.encoded(sets))
        return outcomes, placed, gone

    async def _enter(self, placed: dict[SlotAddress, BlockHash]) -> None:
        """Enter blocks in the index, except where another process has entered them meanwhile, or has pinned what it put
        there."""
        async with self.sets.locked():
            sets = await self.sets.read(placed.values())
            for at, block_hash in placed.items():
                places = sets[at.set_number]
                if self.sets.find(sets, block_hash) is None and not places[at.way].pinned:
                    places[at.way] = LMCacheSlot(block_hash, SYSTEM_CLOCK.wall())
            await self.client.put(self.sets.encoded(sets))

    def _encode(self, block: Block, stop: Stop) -> bytes:
        return b"" if stop.requested else b"".join(self.records.encode(block.block_hash, block.layers))

    def _make_room(self, places: list[LMCacheSlot], block_hash: BlockHash, gone: set[BlockHash]) -> tuple[Put, int]:
        """Choose the block's place in its set, and mark it as the block's. Adds the block that was there to `gone`."""
        now = SYSTEM_CLOCK.wall()
        for way, place in enumerate(places):
            if place.block_hash == block_hash:
                places[way] = msgspec.structs.replace(place, used_s=now)
                return Put.PRESENT, way
        free = [way for way, place in enumerate(places) if not place.pinned]
        if not free:
            self.warn_full(StoreFull("all blocks that share a place with these are pinned"))
            return Put.DROPPED, 0
        way = min(free, key=lambda way: places[way].used_s)  # never used: 0; about to be: now
        gone.discard(block_hash)
        if places[way].block_hash:
            gone.add(places[way].block_hash)
        places[way] = LMCacheSlot(block_hash, now)
        return Put.STORED, way

    async def _change(self, hashes: Sequence[BlockHash], change: _Change, *, empties: bool = False) -> int:
        """Change the places of those blocks that are there; returns how many are. `empties`: their values are removed
        too."""
        if not hashes:
            return 0
        async with self.sets.locked():
            sets = await self.sets.read(hashes)
            found = {at for name in hashes if (at := self.sets.find(sets, name)) is not None}
            for at in found:
                sets[at.set_number][at.way] = change(sets[at.set_number], at.way)
            if found:
                emptied = [(self.sets.place_key(at), b"") for at in found] if empties else []
                changed = {at.set_number for at in found}
                await self.client.put([*self.sets.encoded({n: sets[n] for n in changed}), *emptied])
        return len(found)

    def _parts(self, items: Sequence[Item]) -> list[Sequence[Item]]:
        most = max(1, BATCH_BYTES // self.records.max_record_bytes)
        return [items[first : first + most] for first in range(0, len(items), most)]


def _note_place(name: str) -> tuple[str, bytes]:
    """The key of a note's place, and the digest that distinguishes the note from others in that place."""
    digest = hashlib.sha256(name.encode()).digest()
    return f"kvferry.notes@1@0@{int.from_bytes(digest[:8], 'little') % NUM_NOTE_PLACES:x}@uint8", digest


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
