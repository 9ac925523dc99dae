"""The lookup buffer within one process: the reference that the others are compared with, and a test double."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvferry.core.errors import PeerLost
from kvferry.core.layout import KVLayout
from kvferry.transport.fabric.shm import copy_one_by_one
from kvferry.transport.lookup_buffer.base import LookupBuffer, LookupBufferContext, Source, Taken, Want
from kvferry.transport.lookup_buffer.entries import Cursor, EntryTable
from kvferry.transport.lookup_buffer.messages import News
from kvferry.transport.lookup_buffer.selection import Selection
from kvferry.transport.memory import BlockMemory, Span, join

MemoryNetwork = dict[Source, "MemoryLookupBuffer"]
"""All buffers that can reach each other."""


class MemoryLookupBuffer(LookupBuffer):
    """One instance's end. It is found by others in `network`, under `source`, while `run` runs."""

    def __init__(self, memory: BlockMemory, table: EntryTable, network: MemoryNetwork, source: Source) -> None:
        super().__init__(table)
        self.memory, self._network, self._source = memory, network, source

    @classmethod
    def build(cls, context: LookupBufferContext) -> MemoryLookupBuffer:
        """In a network of its own, where it finds only itself."""
        return cls(context.memory, context.table, {}, Source("memory", 0))

    async def _take(self, want: Want) -> Taken:
        producer = self._find(want.source)
        selection = Selection(want, producer.memory.geometry, self.memory.geometry)

        async def read(remote: Sequence[Span], local: Sequence[Span]) -> bool:
            copy_one_by_one(join(remote, producer.memory.map, local, self.memory.map, self.memory.num_bytes))
            await asyncio.sleep(0)
            return True

        def take(generation: int) -> None:
            share = selection.share
            consumer = self._source.engine_id
            if producer.table.take(want.key, generation, share.taker, share.num_takers, consumer):
                selection.hear(News(0, generation, held=True))

        cursor, loop = Cursor(want.key), asyncio.get_running_loop()

        def tell() -> None:
            while (news := producer.table.news(cursor)) is not None:
                selection.hear(news)

        def on_change() -> None:
            loop.call_soon_threadsafe(tell)

        producer.table.listen(on_change)
        try:
            tell()
            return await selection.load(read, take, "memory")
        finally:
            producer.table.unlisten(on_change)

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

    def _find(self, source: Source) -> MemoryLookupBuffer:
        if source not in self._network:
            raise PeerLost(f"nobody is at {source.host}:{source.port}")
        return self._network[source]
