"""KV blocks in this machine's memory: `memory:4GiB` is one arena that all instances of this user with the same layout
share.

Owns the slots, all of one size, which hold the records; `memory_index` knows which block is in which slot,
`memory_notes` has the notes. Blocks are copied in and out without the lock: a reader verifies its copy, so a slot that
was reused for another block meanwhile is a miss. The arena exists as long as one instance uses it.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.blocks.layout import KVLayout
from kvferry.core.errors import ConfigError
from kvferry.core.host.machine import require_memory
from kvferry.core.settings.units import format_bytes, parse_bytes
from kvferry.store.arena import Arena, rendezvous_id
from kvferry.store.base import (
    Block,
    BlockRead,
    LayerStore,
    PutResult,
    SharedStore,
    StoreOptions,
    StoreThreads,
    require_short_note,
)
from kvferry.store.copying import copy_bytes
from kvferry.store.machine import MACHINE, Machine
from kvferry.store.media.memory_index import ArenaSlot, MemoryIndex, table_bytes
from kvferry.store.media.memory_notes import NOTE_BYTES, MemoryNotes, min_size, notes_bytes, num_notes
from kvferry.store.record import CorruptBlock
from kvferry.store.threads import Stop

_ALIGNMENT = 64


class MemoryOptions(StoreOptions, frozen=True, kw_only=True):
    """Instances with the same `name`, size, layout and codec share the memory. `num_blocks`: the size in blocks, if the
    URL has no size. `threads`: maximum number of calls that copy at a time."""

    num_blocks: Annotated[int, msgspec.Meta(ge=1, le=2**40)] | None = None
    eviction: str = "lru"
    name: str = "shared"
    threads: StoreThreads = 2

    def check(self, location: str) -> None:
        """Raise `ConfigError` unless the location is a size, or is empty and there is `num_blocks`."""
        if location or not self.num_blocks:
            _size_of(location)

    def check_here(self, location: str) -> None:
        """Raise `ConfigError` unless the total memory and swap of the machine are as large. Does not check free memory,
        because another instance may have created the arena already."""
        if location:
            require_memory(_size_of(location), f"store memory:{location}")

    def shared_name(self, location: str) -> str:
        """The arena of this machine with this name and size."""
        size = f"{self.num_blocks} blocks" if self.num_blocks else f"{_size_of(location)} bytes"
        return f"memory {self.name} of {size} on {rendezvous_id()}"


class MemoryStore(SharedStore, LayerStore):
    """A store in memory that the instances of one machine share. `location`: its size, for blocks, index and notes
    together."""

    options_type = MemoryOptions
    options: MemoryOptions
    cancels_at_once = True
    medium = "CPU"
    index_type: type[MemoryIndex] = MemoryIndex

    def __init__(self, location: str, options: MemoryOptions, layout: KVLayout, machine: Machine = MACHINE) -> None:
        super().__init__(location, options, layout, machine)
        self._slot_bytes = -(-self.records.max_record_bytes // _ALIGNMENT) * _ALIGNMENT
        size = None if options.num_blocks else _size_of(location)
        self._num_notes = num_notes(size)
        self._num_slots = options.num_blocks or self._slots_in(size or 0)
        if self._num_slots < 1:
            min_bytes = min_size(table_bytes(0) + self._bytes_of_slot())
            raise ConfigError(
                f"store memory:{location} is too small: one block of this model takes {format_bytes(self._slot_bytes)},"
                f" and with index and notes the store needs at least {min_bytes} bytes"
            )
        self._notes_at = table_bytes(self._num_slots)
        self._slots_at = -(-(self._notes_at + notes_bytes(self._num_notes)) // _ALIGNMENT) * _ALIGNMENT
        self._joining = threading.Lock()
        self._arena: Arena | None = None
        self._abandoned: deque[int] = deque()
        """Slots that were reserved for blocks and never written. They are released when the lock is held the next
        time."""
        self._index: MemoryIndex
        self._notes: MemoryNotes
        self._threads = machine.threads(max(1, options.threads), "kvferry-memory-store")

    @property
    def num_slots(self) -> int:
        """Number of blocks that fit."""
        return self._num_slots

    def _slots_in(self, num_bytes: int) -> int:
        return (num_bytes - notes_bytes(self._num_notes) - table_bytes(0)) // self._bytes_of_slot()

    def _bytes_of_slot(self) -> int:
        """Bytes of a slot and of its index entry."""
        return self._slot_bytes + table_bytes(2**20) // 2**20 + 1

    async def open(self) -> None:
        """Attach to the arena, or create it. Raises `ConfigError`. May be called twice, and cancelled."""
        await self._threads.run(self._join)

    def _join(self, stop: Stop) -> None:
        with self._joining:
            if self._arena is None:
                self._join_arena()

    def _join_arena(self) -> None:
        options = self.options
        sizes = f"{self._num_slots} {self._slot_bytes} {self._slots_at}"
        identity = f"{self.layout.fingerprint()} {options.codec} {sizes} {options.name}"
        name = f"memory-{hashlib.sha256(identity.encode()).hexdigest()[:24]}"
        total = self._slots_at + self._num_slots * self._slot_bytes
        arena = self.machine.arena(name, total)
        self._index = self.index_type(arena, self._num_slots, options.eviction)
        self._notes = MemoryNotes(arena, self._notes_at, self._num_notes)
        self._arena = arena

    async def close(self) -> None:
        """Detach from the arena."""
        self._threads.close()
        if self._arena is not None:
            self._index.release_memory()
            self._notes.release_memory()
            self._arena.close()
            self._arena = None

    # Blocks.

    async def match(self, hashes: Sequence[BlockHash]) -> int:
        """Takes the lock once."""
        return await self._threads.run(lambda stop: self._match(hashes))

    async def get(self, reads: Sequence[BlockRead]) -> list[bool]:
        """Takes the lock once, then copies each block without it."""
        return await self._threads.run(lambda stop: self._get(reads, stop))

    async def get_layer(self, layer: int, reads: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        return await self._threads.run(lambda stop: self._get_layer(layer, reads, stop))

    async def put(self, blocks: Sequence[Block]) -> list[PutResult]:
        """Takes the lock twice, to reserve slots and to commit the blocks, and copies each block in between."""
        return await self._threads.run(lambda stop: [out for part in self._parts(blocks) for out in self._put(part)])

    async def pin(self, hashes: Sequence[BlockHash]) -> int:
        return await self._threads.run(lambda stop: self._pin(hashes))

    async def unpin(self, hashes: Sequence[BlockHash]) -> int:
        return await self._threads.run(lambda stop: self._unpin(hashes))

    async def delete(self, hashes: Sequence[BlockHash]) -> int:
        return await self._threads.run(lambda stop: self._delete(hashes))

    async def finish(self, hashes: Sequence[BlockHash], num_output_tokens: int) -> None:
        """Report the end of a request in the index, so that the policies of all instances that share the arena learn
        from it."""
        await self._threads.run(lambda stop: self._finish(hashes, num_output_tokens))

    def statistics(self) -> dict[str, float]:
        """The counters of this process, and the content of the arena as far as this process knows."""
        statistics = super().statistics()
        if self._arena is not None:
            statistics["kept_bytes"] = float(self._index.num_kept() * self._slot_bytes)
            statistics["pinned_blocks"] = float(self._index.num_pinned())
        return statistics

    # Notes.

    async def write_note(self, name: str, content: bytes, ttl_s: float) -> None:
        """Replaces the note with this name, or the note that expires first."""
        require_short_note(content, NOTE_BYTES)
        await self._threads.run(lambda stop: self._write_note(name, content, ttl_s))

    async def read_note(self, name: str) -> bytes | None:
        return await self._threads.run(lambda stop: self._read_note(name))

    async def remove_note(self, name: str) -> None:
        await self._threads.run(lambda stop: self._remove_note(name))

    # On the threads.

    def _match(self, hashes: Sequence[BlockHash]) -> int:
        with self._index.locked():
            for count, block_hash in enumerate(hashes):
                if self._index.find(block_hash) is None:
                    return count
        return len(hashes)

    def _find(self, hashes: Sequence[BlockHash]) -> list[ArenaSlot | None]:
        with self._index.locked():
            slots = [self._index.find(block_hash) for block_hash in hashes]
            for slot in slots:
                if slot is not None:
                    self._index.access(slot.number)
        missing = [name for name, slot in zip(hashes, slots, strict=True) if slot is None]
        self.activity.count(missing_blocks=len(missing))
        self.activity.removed(missing)
        return slots

    def _get(self, reads: Sequence[BlockRead], stop: Stop) -> list[bool]:
        slots = self._find([read.block_hash for read in reads])
        return [slot is not None and self._read(read, slot, stop) for read, slot in zip(reads, slots, strict=True)]

    def _read(self, read: BlockRead, slot: ArenaSlot, stop: Stop) -> bool:
        try:
            is_hit = self.records.decode(self._record(slot), read.block_hash, read.into, stop.write)
        except CorruptBlock:
            self._record_damage(read.block_hash, slot)
            return False
        self.activity.count(loaded_blocks=is_hit, read_bytes=is_hit * slot.length)
        return is_hit

    def _get_layer(self, layer: int, reads: Sequence[tuple[BlockHash, memoryview]], stop: Stop) -> list[bool]:
        slots = self._find([block_hash for block_hash, _ in reads])
        return [
            slot is not None and self._read_layer(layer, block_hash, into, slot, stop)
            for (block_hash, into), slot in zip(reads, slots, strict=True)
        ]

    def _read_layer(self, layer: int, block_hash: BlockHash, into: memoryview, slot: ArenaSlot, stop: Stop) -> bool:
        record = self._record(slot)
        try:
            header = self.records.header(record[: self.records.header_bytes], block_hash)
            is_hit = self.records.decode_layer(record, header, layer, into, stop.write)
        except CorruptBlock:
            self._record_damage(block_hash, slot)
            return False
        self.activity.count(read_bytes=is_hit * len(into))
        return is_hit

    def _record_damage(self, block_hash: BlockHash, slot: ArenaSlot) -> None:
        """Count a block that did not verify: it was evicted while it was read, or it is damaged and is removed now."""
        with self._index.locked():
            damaged = self._index.find(block_hash) == slot
            if damaged:
                self._index.remove(block_hash)
        self.activity.removed([block_hash])
        self.activity.count(**{"corrupt_blocks" if damaged else "missing_blocks": 1})

    def _parts(self, blocks: Sequence[Block]) -> Iterator[Sequence[Block]]:
        """Parts of a batch that are small enough for their blocks not to evict one another."""
        part_size = max(1, self._num_slots // 2)
        return (blocks[first : first + part_size] for first in range(0, len(blocks), part_size))

    def _put(self, blocks: Sequence[Block]) -> list[PutResult]:
        outcomes = [PutResult.DROPPED] * len(blocks)
        new_slots: dict[int, int] = {}
        evicted: list[BlockHash] = []
        try:
            self._reserve(blocks, new_slots, evicted, outcomes)
            self._fill(blocks, new_slots, outcomes)
        finally:
            self._abandoned.extend(new_slots.values())
        self.activity.removed(evicted)
        self.activity.stored(
            block.block_hash for block, out in zip(blocks, outcomes, strict=True) if out is not PutResult.DROPPED
        )
        self.activity.count(
            evicted_blocks=len(evicted),
            present_blocks=outcomes.count(PutResult.PRESENT),
            stored_blocks=outcomes.count(PutResult.STORED),
            dropped_blocks=outcomes.count(PutResult.DROPPED),
        )
        return outcomes

    def _reserve(
        self, blocks: Sequence[Block], new_slots: dict[int, int], evicted: list[BlockHash], outcomes: list[PutResult]
    ) -> None:
        """Reserve slots for the blocks that are not stored. A slot stays in `new_slots` until it is committed or
        released."""
        with self._index.locked():
            while self._abandoned:
                self._index.release(self._abandoned.popleft())
            for index, block in enumerate(blocks):
                if (slot := self._index.find(block.block_hash)) is not None:
                    self._index.access(slot.number)
                    outcomes[index] = PutResult.PRESENT
                elif (reserved := self._index.reserve()) is not None:
                    new_slots[index] = reserved[0]
                    evicted += [reserved[1]] if reserved[1] is not None else []

    def _fill(self, blocks: Sequence[Block], new_slots: dict[int, int], outcomes: list[PutResult]) -> None:
        """Copy the blocks to their reserved slots, and commit these; slots whose copy failed are released."""
        lengths: dict[int, int] = {}
        try:
            for index, number in new_slots.items():
                lengths[index] = self._write(blocks[index], number)
        finally:
            with self._index.locked():
                for index, number in list(new_slots.items()):
                    del new_slots[index]
                    block = blocks[index]
                    if index not in lengths or self._index.find(block.block_hash) is not None:
                        self._index.release(number)  # another process was faster, or this batch has the block twice
                        outcomes[index] = PutResult.PRESENT if index in lengths else PutResult.DROPPED
                        continue
                    self._index.commit(number, block.block_hash, block.parent, lengths[index])
                    outcomes[index] = PutResult.STORED

    def _write(self, block: Block, number: int) -> int:
        slot, offset = self._view(number, self._slot_bytes), 0
        for buffer in self.records.encode(block.block_hash, block.layers):
            copy_bytes(slot[offset : offset + len(buffer)], buffer)
            offset += len(buffer)
        self.activity.count(written_bytes=offset)
        return offset

    def _pin(self, hashes: Sequence[BlockHash]) -> int:
        with self._index.locked():
            num_left = int(self.options.pinned_share * self._num_slots) - self._index.num_pinned()
            for block_hash in hashes:
                if num_left > 0 and not self._index.is_pinned(block_hash):
                    num_left -= self._index.pin(block_hash, True)
            return sum(self._index.is_pinned(block_hash) for block_hash in hashes)

    def _unpin(self, hashes: Sequence[BlockHash]) -> int:
        with self._index.locked():
            return sum(self._index.pin(block_hash, False) for block_hash in hashes)

    def _delete(self, hashes: Sequence[BlockHash]) -> int:
        self.activity.removed(hashes)
        with self._index.locked():
            return sum(self._index.remove(block_hash) for block_hash in hashes)

    def _finish(self, hashes: Sequence[BlockHash], num_output_tokens: int) -> None:
        with self._index.locked():
            for block_hash in hashes:
                if (slot := self._index.find(block_hash)) is not None:
                    self._index.finish(slot.number, num_output_tokens)

    def _record(self, slot: ArenaSlot) -> memoryview:
        return self._view(slot.number, min(slot.length, self._slot_bytes))

    def _view(self, number: int, length: int) -> memoryview:
        assert self._arena is not None, "the store is not open"
        return self._arena.view(self._slots_at + number * self._slot_bytes, length)

    def _write_note(self, name: str, content: bytes, ttl_s: float) -> None:
        with self._index.locked():
            self._notes.write(name, content, ttl_s)

    def _read_note(self, name: str) -> bytes | None:
        with self._index.locked():
            return self._notes.read(name)

    def _remove_note(self, name: str) -> None:
        with self._index.locked():
            self._notes.remove(name)


def _size_of(location: str) -> int:
    if not location:
        raise ConfigError("store memory: needs a size, as in memory:4GiB")
    return parse_bytes(location, f"store memory:{location}")
