"""The lookup buffer over a fabric: nothing is copied until a consumer asks, and then straight into its blocks.

Joins the parts: the entry table and the service that speaks for it (producer), the peers and selections (consumer).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from kvferry.core.clock import Clock
from kvferry.core.errors import ConfigError, PeerLost
from kvferry.core.layout import KVLayout
from kvferry.transport.checksum import digest
from kvferry.transport.connection import limited_to
from kvferry.transport.fabric.base import Fabric, FabricContext
from kvferry.transport.lookup_buffer.arrival_map import ArrivalMap
from kvferry.transport.lookup_buffer.base import OnSealed, Source, Taken, ignore
from kvferry.transport.lookup_buffer.entries import EntryBounds
from kvferry.transport.lookup_buffer.messages import PURPOSE, Offer, ReleaseKey, Take, Verify
from kvferry.transport.lookup_buffer.offering import OfferingBuffer
from kvferry.transport.lookup_buffer.peers import Dialler, Link, Peer, PeerPool
from kvferry.transport.lookup_buffer.selection import Selection
from kvferry.transport.lookup_buffer.service import MAX_SELECTS, ProducerService
from kvferry.transport.lookup_buffer.takings import Takings
from kvferry.transport.lookup_buffer.watch import Watch
from kvferry.transport.memory import Span
from kvferry.transport.tasks import call_contained, run_together

TICKS_PER_LEASE = 50
LONGEST_TICK_S = 0.25
MAX_WATCHED = MAX_SELECTS // 2
"""Tickets that wait, of one producer: half of what it lets us select, the rest is for loads."""


class FabricLookupBuffer(OfferingBuffer):
    """Both ends, for one instance. `fabrics` in order of preference; all are registered on the context's listener."""

    def __init__(
        self,
        context: FabricContext,
        fabrics: Sequence[Fabric],
        bounds: EntryBounds | None = None,
        clock: Clock | None = None,
        *,
        checksum: bool | None = None,
    ) -> None:
        """`checksum`: what is read here is compared with what the producer has; None: where it crosses TCP. Raises
        `ConfigError`."""
        if checksum and context.memory.device != "cpu":
            raise ConfigError("checksum needs KV in host memory; leave it out of kv_connector_extra_config")
        super().__init__(context.memory, bounds, clock)
        memory, listener = context.memory, context.listener
        self._listener, self._fabrics = listener, fabrics
        lease_s = self.table.bounds.lease_s
        described = {fabric.name: fabric.describe() for fabric in fabrics}
        offer = Offer(memory.num_blocks, memory.geometry.places, lease_s, described)
        listener.handle(PURPOSE, ProducerService(self.table, offer, memory).serve)
        self._checksum = checksum
        self._pool = PeerPool(Dialler(context, fabrics))
        self._tick_s = min(LONGEST_TICK_S, lease_s / TICKS_PER_LEASE)
        self._takings = Takings()

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
        """Connect, wait, read and take."""
        with self._takings.waiting():
            async with limited_to(deadline, f"hand-off {key!r}"), self._pool.using(source) as peer:
                link = await peer.link()
                arrivals = ArrivalMap(key, link.geometry, self.memory.geometry, into, skip_blocks, prefix=prefix)
                taken = await self._select(peer, link, Selection(key, arrivals, on_sealed), deadline)
        self._takings.add(taken)
        return taken

    async def _select(self, peer: Peer, link: Link, selection: Selection, deadline: float) -> Taken:
        async def read(remote: Sequence[Span], local: Sequence[Span]) -> bool:
            try:
                await link.fabric_peer.read(remote, local, deadline)
            except PeerLost as error:
                peer.lose(error)
                raise
            return not self._checks(link) or await self._verify(peer, select_id, remote, local)

        async def take(generation: int) -> None:
            peer.tell(Take(select_id, generation, selection.share.taker, selection.share.num_takers))

        with peer.selecting(selection) as select_id:
            return await selection.load(read, take, link.fabric_name)

    def _checks(self, link: Link) -> bool:
        if self._checksum is None:
            return link.over_bare_tcp and self.memory.device == "cpu"
        return self._checksum

    async def _verify(self, peer: Peer, select_id: int, remote: Sequence[Span], local: Sequence[Span]) -> bool:
        """Whether what was read is what the producer has; True also when its key is over, which news has told."""
        asked = peer.ask(Verify(select_id, list(remote)))
        ours = await digest(self.memory, local)
        intact = await asked == ours
        self._takings.counts["mismatches"] += not intact
        return intact

    async def layout_at(self, source: Source, *, deadline: float) -> KVLayout:
        """What the blocks of the producer's rank there mean."""
        where = f"{source.host}:{source.port}"
        async with limited_to(deadline, f"reaching {where}"), self._pool.using(source) as peer:
            return (await peer.link()).geometry.layout

    async def keep(self, key: str, source: Source) -> None:
        """Select without reading: the connection renews the lease of whatever is selected. Of very many, not all."""
        async with self._pool.using(source) as peer:
            await peer.link()
            if peer.num_following >= MAX_WATCHED:
                return
            watch = Watch(key)
            with peer.selecting(watch):
                await watch.over()

    async def release(self, key: str, source: Source, *, deadline: float) -> None:
        """Tell the producer that nobody will come."""
        async with limited_to(deadline, f"release of {key!r}"), self._pool.using(source) as peer:
            await peer.link()
            peer.tell(ReleaseKey(key))

    async def run(self) -> None:
        """Serve, connect and let leases end, until cancelled."""
        try:
            await run_together(self._listener.serve(), self._pool.run(), self._expire())
        finally:
            for fabric in self._fabrics:
                await fabric.close()

    def address(self) -> dict[str, Any]:
        """Of the listener."""
        return {"host": self._listener.host, "port": self._listener.port}

    def close(self) -> None:
        """Give the port back."""
        self._listener.close()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            call_contained(self.table.expire, "ending leases", lambda error: None)

    def statistics(self) -> dict[str, float]:
        """Of the table, of what was taken here, and of the listener."""
        return self.table.statistics() | self._takings.statistics() | self._listener.statistics()

    def check(self) -> None:
        """Raise `LeakError` when a key, or a consumer's wait, is left."""
        super().check()
        self._takings.check()
