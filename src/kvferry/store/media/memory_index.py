"""The index of the blocks in the slots of shared memory, consistent for all processes that share it.

Owns the table of slots in the arena, the journal beside it, and this process's copy of both: a dictionary and an
eviction policy. Every change is written to the table and the journal under the arena's lock. After taking the lock, a
process first reads the events that others have added to the journal, so that all policies see the same events in the
same order. A process that is too late for the journal reads the whole table; so do all after a holder of the lock has
died.

    offset  what
    0       8 bytes, unused; then the arena's flag
    16      counters: epoch, number of journal entries ever written, order of the newest block
    4096    slots: see `_SLOT`
    …       the journal, a ring of `_EVENT`
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.store.arena import RESERVED_BYTES, Arena
from kvferry.store.eviction.guarded import GuardedPolicy
from kvferry.store.eviction.table import make_eviction_policy

_SLOT = np.dtype(
    [
        ("hash", "V32"),
        ("parent", "V32"),
        ("length", "<u8"),
        ("order", "<u8"),
        ("started", "<u8"),
        ("pid", "<i4"),
        ("state", "u1"),
        ("pinned", "u1"),
        ("padding", "u1", 2),
    ]
)
_EVENT = np.dtype([("kind", "<u4"), ("slot", "<u4")])
_FREE, _WRITING, _READY = 0, 1, 2
_ADDED, _TAKEN, _FREED, _ACCESSED, _PINNED, _UNPINNED, _FINISHED = 1, 2, 3, 4, 5, 6, 7
_KIND_BITS = 8
"""The low bits of an event's `kind`; the bits above them are its number (of output tokens, for `_FINISHED`)."""
_NO_PARENT = bytes(32)
_RECLAIMS = 64
"""While as many blocks are stored as a full arena has slots, it is searched this many times for slots to which dead
processes were writing. A search of 400,000 slots takes 3 ms, with the lock held."""
_EPOCH, _NUM_EVENTS, _ORDER = 0, 1, 2
HEADER_BYTES = 4096


def table_bytes(num_slots: int) -> int:
    """Bytes of the arena that header, table and journal take."""
    return HEADER_BYTES + num_slots * _SLOT.itemsize + _num_journalled(num_slots) * _EVENT.itemsize


def _num_journalled(num_slots: int) -> int:
    return max(4096, 4 * num_slots)


@dataclass(frozen=True)
class ArenaSlot:
    """The slot of a block, and the bytes of its record."""

    number: int
    length: int


class MemoryIndex:
    """The index of an arena. All methods but `locked` and `release_memory` may be called only within `locked`."""

    max_answer_tokens = 2**24 - 1
    """The largest number of output tokens that an event can hold."""

    def __init__(self, arena: Arena, num_slots: int, eviction: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._arena, self._eviction = arena, eviction
        self._counters = np.frombuffer(arena.buffer, "<u8", 8, RESERVED_BYTES)
        self._slots = np.frombuffer(arena.buffer, _SLOT, num_slots, HEADER_BYTES)
        events_at = HEADER_BYTES + num_slots * _SLOT.itemsize
        self._events = np.frombuffer(arena.buffer, _EVENT, _num_journalled(num_slots), events_at)
        self._policy: GuardedPolicy
        self._spare: GuardedPolicy | None = None
        """An empty policy, for when the whole table must be read. It is made before the lock is taken, because making
        it may import its module."""
        self._slot_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self._free: dict[int, None] = {}
        self._epoch, self._num_read = -1, 0
        self._num_since_reclaim = num_slots
        """Slots reserved since the last search for dead processes."""
        self._identity = arena.identity

    def release_memory(self) -> None:
        """Release the arena's memory, so that it can be unmapped. No other method may be called afterwards."""
        del self._counters, self._slots, self._events

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the arena's lock, with this process's copy up to date. Raises `StoreError`."""
        if self._spare is None:  # not `or`: an empty policy counts as False
            self._spare = GuardedPolicy(make_eviction_policy(self._eviction, len(self._slots)))
        with self._arena.locked() as broken:
            if broken:
                self._repair()
            self._catch_up()
            yield
            self._num_read = int(self._counters[_NUM_EVENTS])

    # Queries.

    def find(self, block_hash: BlockHash) -> ArenaSlot | None:
        """The slot of a block; None: it is not stored."""
        number = self._slot_of.get(block_hash)
        return None if number is None else ArenaSlot(number, int(self._slots["length"][number]))

    def num_kept(self) -> int:
        """Number of blocks in the index."""
        return len(self._slot_of)

    def num_pinned(self) -> int:
        """Number of pinned blocks."""
        return int(np.count_nonzero((self._slots["pinned"] == 1) & (self._slots["state"] == _READY)))

    # Changes.

    def access(self, number: int) -> None:
        """Record a use of the block in this slot."""
        self._policy.access(self._hash_of[number], self._clock.monotonic())
        self._report_event(_ACCESSED, number)

    def finish(self, number: int, num_output_tokens: int) -> None:
        """Record that a request whose prompt includes the block in this slot has its complete answer."""
        num_tokens = min(num_output_tokens, self.max_answer_tokens)
        self._policy.finish([self._hash_of[number]], num_tokens, self._clock.monotonic())
        self._report_event(_FINISHED | num_tokens << _KIND_BITS, number)

    def reserve(self) -> tuple[int, BlockHash | None] | None:
        """Reserve a slot to write to. Returns it and the block that was evicted for it, if any. None: all blocks are
        pinned or being written."""
        self._num_since_reclaim += 1
        if not self._free and self._num_since_reclaim > len(self._slots) // _RECLAIMS:
            self._reclaim()
        victim = None if self._free else self._policy.evict(self._clock.monotonic())
        if not self._free and not isinstance(victim, bytes):
            self._reclaim()
        if self._free:
            number, _ = self._free.popitem()
            return self._begin(number), None
        if not isinstance(victim, bytes):
            return None
        number = self._slot_of.pop(victim)
        del self._hash_of[number]
        self._slots["state"][number] = _FREE
        self._report_event(_FREED, number)
        return self._begin(number), victim

    def commit(self, number: int, block_hash: BlockHash, parent: BlockHash | None, length: int) -> None:
        """Record that a reserved slot has this block, with a record of `length` bytes."""
        slots, order = self._slots, int(self._counters[_ORDER]) + 1
        self._counters[_ORDER] = order
        slots["hash"][number] = np.void(block_hash)
        slots["parent"][number] = np.void(parent or _NO_PARENT)
        slots["length"][number], slots["order"][number], slots["pinned"][number] = length, order, 0
        slots["state"][number] = _READY  # last, so that a slot that is ready is complete
        self._add(number)
        self._report_event(_ADDED, number)

    def release(self, number: int) -> None:
        """Release a reserved slot without a block."""
        self._slots["state"][number] = _FREE
        self._free[number] = None
        self._report_event(_FREED, number)

    def remove(self, block_hash: BlockHash) -> bool:
        """Remove a block. Returns true if it was stored."""
        number = self._slot_of.pop(block_hash, None)
        if number is None:
            return False
        del self._hash_of[number]
        self._policy.remove(block_hash)
        self.release(number)
        return True

    def is_pinned(self, block_hash: BlockHash) -> bool:
        """True if the block is stored and pinned."""
        number = self._slot_of.get(block_hash)
        return number is not None and bool(self._slots["pinned"][number])

    def pin(self, block_hash: BlockHash, pinned: bool) -> bool:
        """Pin or unpin a block. Returns true if it is stored."""
        number = self._slot_of.get(block_hash)
        if number is not None and bool(self._slots["pinned"][number]) != pinned:
            self._slots["pinned"][number] = pinned
            self._pin_in_policy(block_hash, pinned)
            self._report_event(_PINNED if pinned else _UNPINNED, number)
        return number is not None

    def _pin_in_policy(self, block_hash: BlockHash, pinned: bool) -> None:
        if pinned:
            self._policy.pin(block_hash)
        else:
            self._policy.unpin(block_hash, self._clock.monotonic())

    # Events of all processes.

    def _report_event(self, kind: int, number: int) -> None:
        count = int(self._counters[_NUM_EVENTS])
        self._events[count % len(self._events)] = (kind, number)
        self._counters[_NUM_EVENTS] = count + 1

    def _catch_up(self) -> None:
        count = int(self._counters[_NUM_EVENTS])
        if self._epoch != int(self._counters[_EPOCH]) or count - self._num_read > len(self._events):
            self._read_table()
        else:
            unread = self._events[np.arange(self._num_read, count) % len(self._events)]
            for event, number in unread.tolist():
                self._apply(event % 2**_KIND_BITS, number, event >> _KIND_BITS)
        self._num_read = count

    def _apply(self, kind: int, number: int, num_tokens: int) -> None:
        """Apply an event of another process. If the slot has changed again since then, later events report it."""
        if kind in (_ACCESSED, _PINNED, _UNPINNED, _FINISHED):
            if (block_hash := self._hash_of.get(number)) is not None:
                self._apply_to_policy(kind, block_hash, num_tokens)
            return
        self._drop(number)
        state = int(self._slots["state"][number])
        if kind == _ADDED and state == _READY:
            self._add(number)
        elif state == _FREE:
            self._free[number] = None

    def _apply_to_policy(self, kind: int, block_hash: BlockHash, num_tokens: int) -> None:
        now = self._clock.monotonic()
        if kind == _ACCESSED:
            self._policy.access(block_hash, now)
        elif kind == _FINISHED:
            self._policy.finish([block_hash], num_tokens, now)
        else:
            self._pin_in_policy(block_hash, kind == _PINNED)

    def _drop(self, number: int) -> None:
        self._free.pop(number, None)
        block_hash = self._hash_of.pop(number, None)
        if block_hash is not None:
            self._policy.remove(block_hash)
            if self._slot_of.get(block_hash) == number:
                del self._slot_of[block_hash]

    def _add(self, number: int) -> None:
        block_hash, parent = self._slots["hash"][number].tobytes(), self._slots["parent"][number].tobytes()
        if block_hash in self._slot_of:
            self._drop(self._slot_of[block_hash])
        self._slot_of[block_hash], self._hash_of[number] = number, block_hash
        self._policy.insert(block_hash, self._clock.monotonic(), None if parent == _NO_PARENT else parent)

    def _read_table(self) -> None:
        assert self._spare is not None
        self._policy, self._spare = self._spare, None
        self._slot_of, self._hash_of = {}, {}
        states = self._slots["state"]
        self._free = dict.fromkeys(np.flatnonzero(states == _FREE).tolist())
        ready = np.flatnonzero(states == _READY)
        for number in ready[np.argsort(self._slots["order"][ready], kind="stable")].tolist():
            self._add(number)
            if self._slots["pinned"][number]:
                self._policy.pin(self._hash_of[number])
        self._epoch = int(self._counters[_EPOCH])

    def _repair(self) -> None:
        """Recover after a holder of the lock died, perhaps in the middle of a change: the new epoch makes all processes
        read the table again. The table itself is consistent, because a slot becomes ready only after everything else
        about it is written."""
        self._counters[_EPOCH] += np.uint64(1)
        self._free_slots_of_dead()

    def _begin(self, number: int) -> int:
        self._slots["pid"][number], self._slots["started"][number] = self._identity
        self._slots["state"][number] = _WRITING
        self._report_event(_TAKEN, number)
        return number

    def _reclaim(self) -> None:
        self._num_since_reclaim = 0
        for number in self._free_slots_of_dead():
            self._free[number] = None
            self._report_event(_FREED, number)

    def _free_slots_of_dead(self) -> list[int]:
        """Free the slots that dead processes were writing."""
        slots, freed = self._slots, []
        for number in np.flatnonzero(slots["state"] == _WRITING).tolist():
            if not self._arena.is_alive((int(slots["pid"][number]), int(slots["started"][number]))):
                slots["state"][number] = _FREE
                freed.append(number)
        return freed
