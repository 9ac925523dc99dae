"""The producer's half: copies announced blocks to the server, piece by piece, and says when their source is free.

Owns what is under way, by key. It follows the entry table with a cursor a key, as a session of the control channel
does, so nothing is queued: blocks wait in the KV cache until it is their turn. When all of a sealed hand-off is copied
and the table says that it stood until then, its key ends there as "stored", and only then is it sealed on the server:
that is the fence. From then on its life is the server's.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import xxhash

from kvferry.core.errors import KvferryError
from kvferry.core.layout import KVLayout
from kvferry.transport.lookup_buffer.entries import Cursor, EndReason, EntryTable
from kvferry.transport.lookup_buffer.messages import Announced, Part
from kvferry.transport.lookup_buffer.messages import Over as EntryOver
from kvferry.transport.lookup_buffer.messages import Sealed as EntrySealed
from kvferry.transport.lookup_buffer.valkey.records import (
    Begun,
    Over,
    Piece,
    Record,
    Sealed,
    Stored,
    encode_record,
    place_of,
)
from kvferry.transport.lookup_buffer.valkey.server import Server, ServerFull
from kvferry.transport.memory import BlockMemory
from kvferry.transport.tasks import contained, translated

log = logging.getLogger(__name__)

PIECE_BYTES = 2**20
MAX_PIECE_BLOCKS = 2**17
BATCH_BYTES = 8 * 2**20
"""Copied, and sent to the server, in one step."""
ROOM_POLL_S = 0.1
"""How often a full buffer looks whether a consumer has taken something."""
REMEMBER_S = 60.0
"""How long the server knows why a hand-off is over."""


@dataclass
class _Upload:
    """A key on its way to the server. `waiting`: layers of announced parts that are not copied yet."""

    place: str
    cursor: Cursor = field(default_factory=Cursor)
    generation: int = -1
    number: int = 0
    num_bytes: int = 0
    waiting: deque[tuple[Part, int]] = field(default_factory=deque)
    sealed: EntrySealed | None = None


class Uploads:
    """`add` and `wake` may be called from any thread; the rest lives on the transfer loop, while `run` runs."""

    def __init__(self, table: EntryTable, memory: BlockMemory, server: Server, token: str) -> None:
        self._table, self._memory, self._server, self._token = table, memory, server, token
        self._layout: KVLayout = memory.layout
        self._added: deque[str] = deque()
        self._uploads: dict[str, _Upload] = {}
        self._stored: dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = False
        self._reached = True

    def add(self, key: str) -> None:
        """This key is about to be opened, or to be over before that."""
        self._added.append(key)

    def wake(self) -> None:
        """Something changed in the table."""
        loop = self._loop
        if loop is not None and not self._woken:
            self._woken = True
            loop.call_soon_threadsafe(self._on_wake)

    def _on_wake(self) -> None:
        self._woken = False  # before looking, so that a change after the look wakes again
        self._changed.set()

    async def run(self) -> None:
        """Copy what is announced, until cancelled."""
        self._loop = asyncio.get_running_loop()
        self._table.listen(self.wake)
        try:
            while True:
                await self._advance()
        finally:
            self._table.unlisten(self.wake)

    async def _advance(self) -> None:
        """One look at every key; then wait for a change, or for room."""
        self._changed.clear()
        while self._added:
            key = self._added.popleft()
            self._uploads.setdefault(key, _Upload(place_of(key, self._layout.tp_rank)))
        for key, upload in list(self._uploads.items()):
            await self._advance_one(key, upload)
        waiting = [key for key, upload in self._uploads.items() if upload.waiting]
        for key in waiting:  # for room, which comes as leases on the server end: its own is not to end before
            if self._reached:
                self._table.renew(key)
        try:
            async with asyncio.timeout(min(ROOM_POLL_S, self._table.bounds.lease_s / 10) if waiting else None):
                await self._changed.wait()
        except TimeoutError:
            await self.forget_taken()

    async def _advance_one(self, key: str, upload: _Upload) -> None:
        try:
            over = await self._follow(key, upload)
        except Exception as unexpected:  # noqa: BLE001 - the edge between this key and all others
            error = translated(unexpected)
            reason: EndReason = "full" if isinstance(error, ServerFull) else "dropped"
            await contained(partial(self._fail, key, upload, reason, error), f"giving up hand-off {key}")
            over = True
        if over:
            del self._uploads[key]

    # One key.

    async def _follow(self, key: str, upload: _Upload) -> bool:
        """Do on the server what happened in the table. True: there is nothing more to do."""
        self._table.expire()
        while True:
            changes, upload.cursor = self._table.changes(key, upload.cursor)
            for change in changes:
                match change:
                    case Announced():
                        if change.generation != upload.generation and not await self._begin(key, upload, change):
                            return True
                        for part in change.parts:
                            layers = range(part.first_layer, part.first_layer + part.num_layers)
                            upload.waiting.extend((part, layer) for layer in layers)
                    case EntrySealed():
                        upload.sealed = change
                    case EntryOver():
                        await self._say_over(key, upload, change.reason)
                        return True
            if upload.waiting and self._has_room(key):
                if not await self._store_batch(key, upload):
                    return True
            elif not changes:
                break
        return upload.sealed is not None and not upload.waiting and await self._seal(key, upload, upload.sealed)

    async def _begin(self, key: str, upload: _Upload, change: Announced) -> bool:
        upload.generation, upload.number, upload.num_bytes, upload.sealed = change.generation, 0, 0, None
        upload.waiting.clear()
        self._stored[key] = 0
        record = self._signed(upload, Begun(change.generation, self._layout))
        state = await self._server.begin(upload.place, change.generation, record, self._table.bounds.unsealed_s)
        return await self._require_open(key, upload, state)

    async def _store_batch(self, key: str, upload: _Upload) -> bool:
        """Copy the next blocks, up to a batch. What they hold counts only if the key still stands when it is sealed."""
        pieces: list[Piece] = []
        fields: dict[str, bytes] = {}
        num_bytes = 0
        while upload.waiting and num_bytes < BATCH_BYTES:
            part, layer = upload.waiting.popleft()
            for first, block_ids in self._cut(part, layer):
                data = self._read(layer, block_ids)
                name = f"{upload.generation}:{upload.number}:{len(pieces)}"
                pieces.append(Piece(name, layer, first, len(block_ids), xxhash.xxh3_128_digest(data)))
                fields[name] = data
                num_bytes += len(data)
        record = self._signed(upload, Stored(upload.generation, upload.number, pieces))
        ttl_s = self._table.bounds.unsealed_s
        state = await self._server.append(upload.place, upload.generation, record, ttl_s, fields)
        upload.number += 1
        self._stored[key] = self._stored.get(key, 0) + num_bytes
        self._counts["uploaded_bytes"] += num_bytes
        return await self._require_open(key, upload, state)

    async def _seal(self, key: str, upload: _Upload, sealed: EntrySealed) -> bool:
        lease_s = self._table.lease_of(key)
        if not self._table.store(key, upload.generation):
            return False  # it ended, or began anew, meanwhile: the next look tells
        record = self._signed(upload, Sealed(upload.generation, upload.number, sealed.meta, lease_s))
        state = await self._server.append(upload.place, upload.generation, record, lease_s, {}, "sealed")
        if state != "sealed":
            log.info("hand-off %s ended on the server before it was complete: %s", key, state)
        return True

    async def _say_over(self, key: str, upload: _Upload, reason: str) -> None:
        if reason != "stored":
            self._stored.pop(key, None)
            await self._server.end(upload.place, reason, self._signed(upload, Over(reason)), REMEMBER_S)

    async def _fail(self, key: str, upload: _Upload, reason: EndReason, error: KvferryError) -> None:
        log.warning("hand-off %s is not offered: %s", key, error)
        self._counts[f"failed_{type(error).__name__}"] += 1
        self._table.end(key, reason)
        try:
            await self._say_over(key, upload, reason)
        except KvferryError as again:  # consumers learn it from the time to live
            log.info("hand-off %s: the server could not be told: %s", key, again)

    async def _require_open(self, key: str, upload: _Upload, state: str) -> bool:
        """Whether the server still has the hand-off; if not, it ends here too."""
        if state == "open":
            return True
        self._stored.pop(key, None)
        self._table.end(key, "released" if state == "released" else "expired")
        if state == "expired":  # nothing is left of it there, also not why
            await self._say_over(key, upload, state)
        return False

    def _signed(self, upload: _Upload, record: Record) -> bytes:
        return encode_record(record, upload.place, self._token)

    # Blocks.

    def _cut(self, part: Part, layer: int) -> Iterator[tuple[int, list[int]]]:
        """(first block, block ids) of pieces of at most `PIECE_BYTES`, or of one block."""
        step = min(MAX_PIECE_BLOCKS, max(1, PIECE_BYTES // self._layout.span_bytes(layer)))
        for start in range(0, len(part.block_ids), step):
            yield part.first_block + start, part.block_ids[start : start + step]

    def _read(self, layer: int, block_ids: list[int]) -> bytes:
        return b"".join(self._memory.view(span) for span in self._memory.spans(layer, block_ids))

    # Room.

    def _has_room(self, key: str) -> bool:
        """Whether this key may take more of the server. One that has it for itself always may."""
        others = sum(num_bytes for name, num_bytes in self._stored.items() if name != key)
        return not others or others + self._stored.get(key, 0) < self._table.bounds.capacity_bytes

    async def forget_taken(self) -> None:
        """Look which hand-offs the server has no more: their bytes are free."""
        done = [key for key in self._stored if key not in self._uploads]
        try:
            states = await self._server.states([place_of(key, self._layout.tp_rank) for key in done])
        except KvferryError as error:
            log.info("cannot tell what the server still has: %s", error)
            self._reached = False
            return
        self._reached = True
        for key, state in zip(done, states, strict=True):
            if state != "sealed":
                del self._stored[key]

    def end_stored(self, key: str) -> bool:
        """Whether this key was stored by us, and may still be there."""
        return self._stored.pop(key, None) is not None

    async def release(self, key: str) -> None:
        """End a stored key on the server."""
        place = place_of(key, self._layout.tp_rank)
        await self._server.end(place, "released", encode_record(Over("released"), place, self._token), REMEMBER_S)

    def statistics(self) -> dict[str, float]:
        """Counters, and the bytes that the server keeps of ours as far as is known."""
        counts = {name: float(count) for name, count in self._counts.items()}
        return counts | {"stored_bytes": float(sum(list(self._stored.values())))}
