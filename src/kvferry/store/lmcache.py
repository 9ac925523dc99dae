"""KV blocks on a server of LMCache's: `lmcache://host:port`, where `lmcache_server host port` runs.

Such a server keeps values under keys, and neither evicts nor removes any. So its keys are places here, as many as
`max_bytes` has room for, and what is put into a place replaces what was there: the server's memory is bounded, whoever
writes and however they end. A block belongs into one of the `WAYS` places of its *set*, which follows from its hash. A
set's *index* is one more value, and says what is where, when it was used, and what is pinned; of an unpinned block the
one used longest ago makes room.

An index is read just before it is written, by one store of a process at a time. A put first takes its places off the
index, sends the blocks, and then enters them: nobody finds or pins what is about to be replaced. Two processes that
change one index within these two round trips lose what one of them did: a place may hold another block than the index
says (records say whose they are, so that is a miss), and a pin is read back and set again.

All instances say the same `max_bytes`: another one is another set of places. Notes (markers of hand-offs) have
places of their own.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from threading import Lock
from typing import TypeVar
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import msgspec
import xxhash

from kvferry.core.block_hash import BlockHash
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError, StoreError
from kvferry.core.layout import KVLayout
from kvferry.store.base import MAX_NOTE_BYTES, Block, KVStore, Put, Read, StoreFull, StoreOptions
from kvferry.store.lmcache_client import MAX_BYTES, DamagedValue, LMCacheClient
from kvferry.store.record import CorruptBlock, read_label
from kvferry.store.threads import Stop, Threads

Item = TypeVar("Item")
WAYS = 8
NUM_NOTE_PLACES = 2**18
TOUCH_S = 60.0
"""A block's time of use is renewed when it is older than this, to spare the server."""
BATCH_BYTES = 64 * 2**20
MAX_INDEX_BYTES = 4096
PIN_TRIES = 3
LOCK_POLL_S = 0.001


class LMCacheOptions(StoreOptions, frozen=True, kw_only=True):
    """`max_bytes`: of all blocks of one layout and codec on the server; all instances say the same."""

    max_bytes: int = 2**32


class LMCachePlace(msgspec.Struct, array_like=True):
    """One place of a set. `used_s`: since the epoch."""

    block_hash: bytes = b""
    used_s: float = 0.0
    pinned: bool = False


@dataclass(frozen=True)
class _Found:
    """Where the index says that a block is."""

    set_number: int
    way: int


class _IndexLock:
    """Of the indexes of one layout on one server: all stores of this process share it, whatever loop they are on."""

    def __init__(self) -> None:
        self._lock = Lock()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Polled, as the holder may be on another thread's loop and a cancelled wait must not take it."""
        while not self._lock.acquire(blocking=False):  # noqa: ASYNC110 - no event reaches from loop to loop
            await asyncio.sleep(LOCK_POLL_S)
        try:
            yield
        finally:
            self._lock.release()


_index_locks: WeakValueDictionary[str, _IndexLock] = WeakValueDictionary()

_Change = Callable[[LMCachePlace], LMCachePlace]


class LMCacheStore(KVStore):
    """A store in an LMCache server, which other instances may share."""

    options_type = LMCacheOptions
    options: LMCacheOptions

    def __init__(self, location: str, options: LMCacheOptions, layout: KVLayout) -> None:
        super().__init__(location, options, layout)
        host, port = _address_of(location)
        record_bytes = self.records.max_record_bytes
        if record_bytes > MAX_BYTES:
            raise ConfigError(
                f"store lmcache:{location}: a block of {record_bytes} bytes is more than a value may have"
            )
        self._ways = max(1, min(WAYS, options.max_bytes // record_bytes))
        self._num_sets = max(1, options.max_bytes // (record_bytes * self._ways))
        self._name = f"kvferry.{layout.fingerprint()}.{self.records.codec.name}.{self._num_sets}.{self._ways}"
        self._client = LMCacheClient(host, port)
        self._threads = Threads(2, "kvferry-lmcache-codec")
        self._index_lock = _index_locks.setdefault(f"{host}:{port}/{self._name}", _IndexLock())
        self._put_lock = asyncio.Lock()

    @classmethod
    def check(cls, location: str, options: object) -> None:
        """A host and a port."""
        _address_of(location)

    async def open(self) -> None:
        """Nothing: it connects when it is first used, and again whenever that is needed."""

    async def close(self) -> None:
        """End every connection, and the threads that encode and decode."""
        self._threads.close()
        await self._client.close()

    # Blocks.

    async def match(self, hashes: Sequence[BlockHash]) -> int:
        """One index a block, in one go."""
        sets = await self._read_sets(hashes)
        for index, block_hash in enumerate(hashes):
            if self._find(sets, block_hash) is None:
                return index
        return len(hashes)

    async def get(self, reads: Sequence[Read]) -> list[bool]:
        """First what is where, then the blocks."""
        found: list[bool] = []
        for part in self._parts(reads):
            found += await self._get(part)
        return found

    async def put(self, blocks: Sequence[Block]) -> list[Put]:
        """What is there already is not sent."""
        outcomes: list[Put] = []
        for part in self._parts(blocks):
            outcomes += await self._put(part)
        counts = {"stored_blocks": Put.STORED, "present_blocks": Put.PRESENT, "dropped_blocks": Put.DROPPED}
        self.count(**{name: outcomes.count(outcome) for name, outcome in counts.items()})
        return outcomes

    async def pin(self, hashes: Sequence[BlockHash]) -> int:
        """A flag in the index, which is read back."""
        for _ in range(PIN_TRIES):
            num_there = await self._change(hashes, lambda place: msgspec.structs.replace(place, pinned=True))
            sets = await self._read_sets(hashes)
            found = {at for name in hashes if (at := self._find(sets, name)) is not None}
            num_pinned = sum(sets[at.set_number][at.way].pinned for at in found)
            if num_pinned >= num_there:
                break
        return num_pinned

    async def unpin(self, hashes: Sequence[BlockHash]) -> int:
        """The other way."""
        return await self._change(hashes, lambda place: msgspec.structs.replace(place, pinned=False))

    async def delete(self, hashes: Sequence[BlockHash]) -> int:
        """Their places are empty then, and take no memory."""
        self.note_removed(hashes)
        return await self._change(hashes, lambda place: LMCachePlace(), empties=True)

    # Notes: until when (Unix time, ms), whose, and what it says.

    async def write_note(self, name: str, content: bytes, ttl_s: float) -> None:
        """In place of one that is there."""
        if len(content) > MAX_NOTE_BYTES:
            raise StoreError(f"a note of {len(content)} bytes, and {MAX_NOTE_BYTES} is the most")
        until = round((SYSTEM_CLOCK.wall() + ttl_s) * 1000).to_bytes(8, "little")
        key, digest = _note_place(name)
        await self._client.put([(key, until + digest + content)])

    async def read_note(self, name: str) -> bytes | None:
        """Unless its time is over, or another one took its place."""
        key, digest = _note_place(name)
        [found] = await self._client.get([key], 40 + MAX_NOTE_BYTES)
        if not isinstance(found, bytes) or found[8:40] != digest:
            return None
        return found[40:] if int.from_bytes(found[:8], "little") >= SYSTEM_CLOCK.wall() * 1000 else None

    async def remove_note(self, name: str) -> None:
        """Its place is empty then."""
        if await self.read_note(name) is not None:
            await self._client.put([(_note_place(name)[0], b"")])

    # One batch.

    async def _get(self, reads: Sequence[Read]) -> list[bool]:
        sets = await self._read_sets([read.block_hash for read in reads])
        places = [self._find(sets, read.block_hash) for read in reads]
        keys = [self._place_key(place) for place in places if place is not None]
        records = iter(await self._client.get(keys, self.records.max_record_bytes))
        given = [next(records) if place is not None else None for place in places]
        found = await self._threads.run(
            lambda stop: [
                not stop.requested and self._decode(read, record) for read, record in zip(reads, given, strict=True)
            ]
        )
        pairs = list(zip(reads, places, found, strict=True))
        with suppress(StoreError):  # what was read was read, also where the server is gone since
            await self._tidy([read.block_hash for read, place, there in pairs if place is not None and not there])
            await self._touch([read.block_hash for read, _, there in pairs if there], sets)
        return found

    def _decode(self, read: Read, record: bytes | DamagedValue | None) -> bool:
        if record is None or record == b"" or self._is_another(read, record):
            self.count(missing_blocks=1)
            self.note_removed([read.block_hash])
            return False
        try:
            if isinstance(record, DamagedValue):
                raise CorruptBlock("it was put in part")
            self.records.decode(memoryview(record), read.block_hash, read.into)
        except CorruptBlock:
            self.count(corrupt_blocks=1)
            self.note_removed([read.block_hash])
            return False
        self.count(loaded_blocks=1, read_bytes=len(record))
        return True

    def _is_another(self, read: Read, record: bytes | DamagedValue) -> bool:
        """Whether its place was given to another block, which the index does not know of."""
        if isinstance(record, DamagedValue):
            return False
        try:
            return read_label(record).block_hash != read.block_hash
        except CorruptBlock:
            return False

    async def _tidy(self, hashes: Sequence[BlockHash]) -> None:
        """What is not where it should be is in the index no more."""
        if hashes:
            await self._change(hashes, lambda place: LMCachePlace(), empties=True)

    async def _touch(self, hashes: Sequence[BlockHash], sets: dict[int, list[LMCachePlace]]) -> None:
        now = SYSTEM_CLOCK.wall()
        places = {name: self._find(sets, name) for name in hashes}
        old = [
            name for name, at in places.items() if at is not None and now - sets[at.set_number][at.way].used_s > TOUCH_S
        ]
        if old:
            await self._change(old, lambda place: msgspec.structs.replace(place, used_s=now))

    async def _put(self, blocks: Sequence[Block]) -> list[Put]:
        async with self._put_lock:
            outcomes, placed, gone = await self._claim(blocks)
            self.note_removed(gone)
            records = await self._threads.run(lambda stop: [self._encode(block, stop) for block, _ in placed])
            values = [(self._place_key(at), record) for (_, at), record in zip(placed, records, strict=True)]
            try:
                await self._client.put(values)
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

    async def _claim(self, blocks: Sequence[Block]) -> tuple[list[Put], list[tuple[Block, _Found]], set[BlockHash]]:
        """Places for these, in which the index says nothing is any more; what was there is the last of the results."""
        outcomes, placed, gone = [], [], set[BlockHash]()
        async with self._index_lock.held():
            sets = await self._read_sets([block.block_hash for block in blocks])
            for block in blocks:
                outcome, way = self._make_room(sets[self._set_of(block.block_hash)], block.block_hash, gone)
                outcomes.append(outcome)
                if outcome is Put.STORED:
                    placed.append((block, _Found(self._set_of(block.block_hash), way)))
            for _, at in placed:
                sets[at.set_number][at.way] = LMCachePlace(used_s=SYSTEM_CLOCK.wall())
            await self._client.put(self._index_values(sets))
        return outcomes, placed, gone

    async def _enter(self, placed: dict[_Found, BlockHash]) -> None:
        """These are in their places now; unless another process has put them meanwhile, or pinned what it put there."""
        async with self._index_lock.held():
            sets = await self._read_sets(placed.values())
            for at, block_hash in placed.items():
                places = sets[at.set_number]
                if self._find(sets, block_hash) is None and not places[at.way].pinned:
                    places[at.way] = LMCachePlace(block_hash, SYSTEM_CLOCK.wall())
            await self._client.put(self._index_values(sets))

    def _encode(self, block: Block, stop: Stop) -> bytes:
        return b"" if stop.requested else b"".join(self.records.encode(block.block_hash, block.layers))

    def _make_room(self, places: list[LMCachePlace], block_hash: BlockHash, gone: set[BlockHash]) -> tuple[Put, int]:
        """The block's way in its set, which is its own now."""
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
        places[way] = LMCachePlace(block_hash, now)
        return Put.STORED, way

    async def _change(self, hashes: Sequence[BlockHash], change: _Change, *, empties: bool = False) -> int:
        """Change the places of blocks that are there; returns how many are."""
        if not hashes:
            return 0
        async with self._index_lock.held():
            sets = await self._read_sets(hashes)
            found = {at for name in hashes if (at := self._find(sets, name)) is not None}
            for at in found:
                sets[at.set_number][at.way] = change(sets[at.set_number][at.way])
            if found:
                emptied = [(self._place_key(at), b"") for at in found] if empties else []
                changed = {at.set_number for at in found}
                await self._client.put([*self._index_values({n: sets[n] for n in changed}), *emptied])
        return len(found)

    # Sets.

    def _set_of(self, block_hash: BlockHash) -> int:
        return int.from_bytes(block_hash[:8], "little") % self._num_sets

    def _find(self, sets: dict[int, list[LMCachePlace]], block_hash: BlockHash) -> _Found | None:
        number = self._set_of(block_hash)
        ways = (way for way, place in enumerate(sets[number]) if place.block_hash == block_hash)
        way = next(ways, None)
        return None if way is None else _Found(number, way)

    async def _read_sets(self, hashes: Iterable[BlockHash]) -> dict[int, list[LMCachePlace]]:
        numbers = sorted({self._set_of(block_hash) for block_hash in hashes})
        found = await self._client.get([self._index_key(number) for number in numbers], MAX_INDEX_BYTES)
        return {number: self._read_index(value) for number, value in zip(numbers, found, strict=True)}

    def _read_index(self, value: bytes | DamagedValue | None) -> list[LMCachePlace]:
        """Of a set; one that cannot be read is empty."""
        if isinstance(value, bytes) and xxhash.xxh3_64_digest(value[8:]) == value[:8]:
            try:
                places = msgspec.msgpack.decode(value[8:], type=list[LMCachePlace])
            except (msgspec.DecodeError, RecursionError):
                places = []
            if len(places) == self._ways:
                return places
        return [LMCachePlace() for _ in range(self._ways)]

    def _index_values(self, sets: dict[int, list[LMCachePlace]]) -> list[tuple[str, bytes]]:
        encoded = {number: msgspec.msgpack.encode(places) for number, places in sets.items()}
        return [(self._index_key(number), xxhash.xxh3_64_digest(body) + body) for number, body in encoded.items()]

    def _index_key(self, number: int) -> str:
        return f"{self._name}@1@0@{number:x}@uint8"

    def _place_key(self, at: _Found) -> str:
        return f"{self._name}@1@{at.way + 1}@{at.set_number:x}@uint8"

    def _parts(self, items: Sequence[Item]) -> list[Sequence[Item]]:
        most = max(1, BATCH_BYTES // self.records.max_record_bytes)
        return [items[first : first + most] for first in range(0, len(items), most)]


def _note_place(name: str) -> tuple[str, bytes]:
    """The key of a note's place, and what tells it from others there."""
    digest = hashlib.sha256(name.encode()).digest()
    return f"kvferry.notes@1@0@{int.from_bytes(digest[:8], 'little') % NUM_NOTE_PLACES:x}@uint8", digest


def _address_of(location: str) -> tuple[str, int]:
    """Raises `ConfigError`."""
    try:
        url = urlsplit(f"lmcache:{location}")
        host, port = url.hostname, url.port
    except ValueError as error:
        raise ConfigError(f"store lmcache:{location}: {error}") from error
    if not host or not port or url.username is not None or url.path not in ("", "/") or url.fragment:
        raise ConfigError(f"store lmcache:{location}: name the server as in lmcache://host:65432")
    return host, port
