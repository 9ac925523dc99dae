"""The lookup buffer within one process: the reference that the others are compared with, and a test double."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Sequence

from kvferry.core.clock import Clock
from kvferry.core.errors import LeakError, PeerLost
from kvferry.core.layout import KVLayout
from kvferry.transport.connection import limited_to
from kvferry.transport.fabric.base import common_pieces
from kvferry.transport.lookup_buffer.arrival_map import ArrivalMap
from kvferry.transport.lookup_buffer.base import OnSealed, Source, Taken, ignore
from kvferry.transport.lookup_buffer.entries import Cursor, EntryBounds, EntryTable
from kvferry.transport.lookup_buffer.offering import OfferingBuffer
from kvferry.transport.lookup_buffer.selection import Selection
from kvferry.transport.memory import BlockMemory, Span

MemoryNetwork = dict[Source, "MemoryLookupBuffer"]
"""All buffers that can reach each other."""


class MemoryLookupBuffer(OfferingBuffer):
    """One instance's end. It is found by others in `network`, under `source`, while `run` runs."""

    def __init__(
        self,
        memory: BlockMemory,
        network: MemoryNetwork,
        source: Source,
        bounds: EntryBounds | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(memory, bounds, clock)
        self._network, self._source = network, source
        self._num_waiting = 0
        self._num_taken = 0

    async def drop_select(
        self,
        key: str,
        source: Source,
        into: Sequence[int],
        *,
        skip_blocks: int = 0,
        prefix: bool = False,
        on_sealed: OnSealed = ignore,
        deadline: float,
    ) -> Taken:
        """Wait, copy and take."""
        producer = self._find(source)
        arrivals = ArrivalMap(key, producer.memory.geometry, self.memory.geometry, into, skip_blocks, prefix=prefix)
        selection = Selection(key, arrivals, on_sealed)
        listener = _Listener(selection, producer.table)

        async def read(remote: Sequence[Span], local: Sequence[Span]) -> bool:
            ours, theirs = self.memory.map, producer.memory.map
            for source, target, length in common_pieces(remote, local, self.memory.num_bytes):
                ctypes.memmove(ours.address(target, length), theirs.address(source, length), length)
            await asyncio.sleep(0)
            return True

        async def take(generation: int) -> None:
            share = selection.share
            held = producer.table.take(key, generation, share.taker, share.num_takers)
            selection.answered(generation, held)

        self._num_waiting += 1
        try:
            with listener:
                async with limited_to(deadline, f"hand-off {key!r}"):
                    taken = await selection.load(read, take, "memory")
        finally:
            self._num_waiting -= 1
        self._num_taken += 1
        return taken

    async def layout_at(self, source: Source, *, deadline: float) -> KVLayout:
        """What the producer's blocks mean."""
        return self._find(source).memory.layout

    async def release(self, key: str, source: Source, *, deadline: float) -> None:
        """Tell the producer that nobody will come."""
        self._find(source).table.release(key)

    async def run(self) -> None:
        """Be found by others, until cancelled."""
        self._network[self._source] = self
        try:
            await asyncio.Event().wait()
        finally:
            del self._network[self._source]

    def statistics(self) -> dict[str, float]:
        """Of the table, and of what was taken here."""
        return self.table.statistics() | {"taken": float(self._num_taken)}

    def check(self) -> None:
        """Raise `LeakError` when a key, or a consumer's wait, is left."""
        super().check()
        if self._num_waiting:
            raise LeakError(f"{self._num_waiting} hand-offs are still being fetched")

    def _find(self, source: Source) -> MemoryLookupBuffer:
        if source not in self._network:
            raise PeerLost(f"nobody is at {source.host}:{source.port}")
        return self._network[source]


class _Listener:
    """Feeds a selection what happens in a producer's table, while entered."""

    def __init__(self, selection: Selection, table: EntryTable) -> None:
        self._selection, self._table = selection, table
        self._cursor = Cursor()
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> None:
        self._table.listen(self._on_change)
        self._tell()

    def __exit__(self, *exception: object) -> None:
        self._table.unlisten(self._on_change)

    def _on_change(self) -> None:
        self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        changes, self._cursor = self._table.changes(self._selection.key, self._cursor)
        while changes:
            self._selection.feed(changes)
            if self._selection.failed:
                return
            changes, self._cursor = self._table.changes(self._selection.key, self._cursor)
