"""A lookup buffer of your own, in one file: the instances of one process find one another in a dictionary.

    "lookup_buffer": "in_process_lookup_buffer:InProcessLookupBuffer"

D asks P's table for its updates directly, where others send messages, and copies from P's memory. `EntryTable` and
`Selection` do the rest for any lookup buffer: keys, leases and the fence at P, and at D where each block belongs. It is
meant to be read, and for tests: a lease is not renewed while a request waits in D's queue.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from kvferry.core.blocks.layout import KVLayout
from kvferry.core.errors import PeerLost
from kvferry.transport.connection import limited_to
from kvferry.transport.fabric.shm import copy_one_by_one
from kvferry.transport.lookup_buffer.base import LookupBuffer, LookupBufferContext, Source, Taken, Want
from kvferry.transport.lookup_buffer.entries import Cursor
from kvferry.transport.lookup_buffer.messages import KeyUpdate
from kvferry.transport.lookup_buffer.selection import Selection
from kvferry.transport.memory import Span, join

_buffers: dict[int, InProcessLookupBuffer] = {}
"""Those that run, by number."""
_numbers = itertools.count(1)


class InProcessLookupBuffer(LookupBuffer):
    """One instance's end. Its address is a number, as the port of this machine's loopback interface."""

    def __init__(self, context: LookupBufferContext) -> None:
        super().__init__(context.table)
        self.memory, self.engine_id, self._number = context.memory, context.identity.engine_id, next(_numbers)

    @classmethod
    def build(cls, context: LookupBufferContext) -> InProcessLookupBuffer:
        """There is nothing here that could be missing."""
        return cls(context)

    async def drop_select(self, want: Want) -> Taken:
        """Copy what P announces, until all of it is here."""
        producer = _find(want.source)
        selection = Selection(want, producer.memory.geometry, self.memory.geometry)

        async def read(remote: Sequence[Span], local: Sequence[Span]) -> None:
            copy_one_by_one(join(remote, producer.memory.map, local, self.memory.map, self.memory.num_bytes))
            await asyncio.sleep(0)  # others have the loop

        def take(generation: int) -> None:
            share = selection.share
            if producer.table.take(want.key, generation, share.reader, share.num_readers, self.engine_id):
                selection.on_update(KeyUpdate(0, generation, take_confirmed=True))

        cursor, loop = Cursor(want.key), asyncio.get_running_loop()

        def pass_on() -> None:
            while (update := producer.table.next_update(cursor)) is not None:
                selection.on_update(update)

        def on_change() -> None:  # called on P's threads
            loop.call_soon_threadsafe(pass_on)

        producer.table.listen(on_change)
        try:
            pass_on()
            async with limited_to(want.deadline, f"hand-off {want.key!r}"):
                return await selection.load(read, take, "memory")
        finally:
            producer.table.unlisten(on_change)

    async def layout_at(self, source: Source, *, deadline: float) -> KVLayout:
        """What P's blocks mean."""
        return _find(source).memory.layout

    async def release(self, key: str, source: Source, *, deadline: float) -> None:
        """Tell P that nobody will come."""
        _find(source).table.release(key)

    def address(self) -> dict[str, Any]:
        """For tickets."""
        return {"host": "localhost", "port": self._number}

    async def run(self) -> None:
        """Be found by others, until cancelled."""
        _buffers[self._number] = self
        try:
            await asyncio.Event().wait()
        finally:
            del _buffers[self._number]


def _find(source: Source) -> InProcessLookupBuffer:
    found = _buffers.get(source.port)
    if found is None or source.engine_id not in ("", found.engine_id):
        raise PeerLost(f"the instance that had the KV is gone: no {source.port} runs in this process")
    return found
