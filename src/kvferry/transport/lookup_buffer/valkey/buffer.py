"""The lookup buffer over a key-value server: the producer puts blocks there and is done, the consumer takes them there.

Neither needs to reach the other, and the producer's blocks are free as soon as they are copied. It costs a copy into
the server and one out of it. Everything on the server has a time to live, so that nothing stays whoever dies.

`kv_buffer_size` bounds what the server keeps of ours: beyond it blocks wait in the KV cache, and prefills with them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from kvferry.core.clock import Clock
from kvferry.core.errors import ConfigError, KvferryError
from kvferry.transport.connection import limited_to
from kvferry.transport.lookup_buffer.base import OnSealed, Source, Taken, ignore
from kvferry.transport.lookup_buffer.entries import EntryBounds
from kvferry.transport.lookup_buffer.offering import OfferingBuffer
from kvferry.transport.lookup_buffer.takings import Takings
from kvferry.transport.lookup_buffer.valkey.fetch import RENEWALS_PER_LEASE, Fetch, Want
from kvferry.transport.lookup_buffer.valkey.records import Over, encode_record, place_of
from kvferry.transport.lookup_buffer.valkey.server import Server
from kvferry.transport.lookup_buffer.valkey.uploads import REMEMBER_S, Uploads
from kvferry.transport.memory import BlockMemory
from kvferry.transport.tasks import call_contained, contained, run_together

TICK_S = 0.25
TIDY_S = 5.0


class ValkeyLookupBuffer(OfferingBuffer):
    """Both ends, for one instance. `url`: `valkey://[[user]:password@]host:port/database`, `unix://path`, …

    A key ends for its producer as "stored", once the server has all of it. A `source` is not looked at.
    """

    def __init__(
        self, memory: BlockMemory, url: str, token: str, bounds: EntryBounds | None = None, clock: Clock | None = None
    ) -> None:
        if memory.device != "cpu":
            raise ConfigError(
                f"lookup_buffer valkey moves KV in host memory only, and this engine's is on {memory.device};"
                " run it with --device cpu"
            )
        super().__init__(memory, bounds, clock)
        self._server, self._token = Server(url), token
        self._uploads = Uploads(self.table, memory, self._server, token)
        self._takings = Takings()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._releasing: set[asyncio.Task[None]] = set()

    # Producer: the rest is the entry table's.

    def open(self, key: str) -> bool:
        """Begin a key."""
        self._uploads.add(key)
        return super().open(key)

    def drop(self, key: str) -> None:
        """Withdraw a key, or have the server say that it never comes."""
        self._uploads.add(key)
        super().drop(key)

    def end(self, key: str) -> bool:
        """End a key as released, also when the server has it already, or before it begins."""
        self._uploads.add(key)
        if super().end(key):
            return True
        stored = self._uploads.end_stored(key)
        if stored and self._loop is not None:
            self._loop.call_soon_threadsafe(self._release_stored, key)
        return stored

    def _release_stored(self, key: str) -> None:
        task = asyncio.ensure_future(self._uploads.release(key))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # its time to live ends it, then

    # Consumer.

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
        """Wait, read and take."""
        want = Want(key, self._place(key), into, skip_blocks, prefix, on_sealed)
        with self._takings.waiting():
            async with limited_to(deadline, f"hand-off {key!r}"):
                taken = await Fetch(self._server, self._token, self.memory, want).run()
        self._takings.add(taken)
        return taken

    async def keep(self, key: str, source: Source) -> None:
        """Renew the lease on the server now and then."""
        lease_s = self.table.bounds.lease_s
        while True:
            if await self._server.renew(self._place(key), lease_s) not in ("", "open", "sealed"):
                return
            await asyncio.sleep(lease_s / RENEWALS_PER_LEASE)

    async def release(self, key: str, source: Source, *, deadline: float) -> None:
        """Tell the server, and thereby the producer, that nobody will come."""
        place = self._place(key)
        async with limited_to(deadline, f"release of {key!r}"):
            record = encode_record(Over("released"), place, self._token)
            await self._server.end(place, "released", record, REMEMBER_S)

    def _place(self, key: str) -> str:
        return place_of(key, self.memory.layout.tp_rank)

    # Both.

    async def run(self) -> None:
        """Copy to the server and let leases end, until cancelled."""
        self._loop = asyncio.get_running_loop()
        try:
            await run_together(self._uploads.run(), self._expire(), self._tidy())
        finally:
            self._loop = None
            for task in self._releasing:
                task.cancel()
            with suppress(KvferryError):
                await self._server.close()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(min(TICK_S, self.table.bounds.lease_s / 50))
            call_contained(self.table.expire, "ending leases", lambda error: None)

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(TIDY_S)
            await contained(self._uploads.forget_taken, "tidying the server")

    def address(self) -> dict[str, Any]:
        """The server's, for routers: a consumer is configured with it. On a Unix socket there is none."""
        return {"host": self._server.host, "port": self._server.port}

    def statistics(self) -> dict[str, float]:
        """Of the table, of what was copied to the server, and of what was taken from it."""
        return self.table.statistics() | self._uploads.statistics() | self._takings.statistics()

    def check(self) -> None:
        """Raise `LeakError` when a key, or a consumer's wait, is left."""
        super().check()
        self._takings.check()
