"""The lookup buffer over fabrics: nothing is copied until a consumer asks, and then straight into its blocks.

Joins the parts: the producer's table and the service that speaks for it, the consumer's peers and selections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from kvferry.core.errors import ConfigError, PeerLost
from kvferry.core.layout import KVLayout
from kvferry.transport.checksum import digest
from kvferry.transport.connection import limited_to
from kvferry.transport.control import Listener
from kvferry.transport.fabric.base import Fabric, FabricContext
from kvferry.transport.fabric.table import build_fabrics, check_transport
from kvferry.transport.lookup_buffer.arrival_map import ArrivalMap
from kvferry.transport.lookup_buffer.base import LookupBuffer, LookupBufferContext, Source, Taken, Want
from kvferry.transport.lookup_buffer.entries import EntryTable
from kvferry.transport.lookup_buffer.messages import PURPOSE, Offer, ReleaseKey, Take, Verify
from kvferry.transport.lookup_buffer.peers import Link, Peer, PeerPool
from kvferry.transport.lookup_buffer.selection import Selection, Watch
from kvferry.transport.lookup_buffer.service import MAX_SELECTS, ProducerService
from kvferry.transport.memory import Span
from kvferry.transport.options import TransportOptions
from kvferry.transport.tasks import call_contained, run_together
from kvferry.transport.tls import channel_tls

TICKS_PER_LEASE = 50
LONGEST_TICK_S = 0.25
MAX_WATCHED = MAX_SELECTS // 2
"""Tickets that wait, of one producer: half of what it lets us select, the rest is for loads."""


class FabricLookupBuffer(LookupBuffer):
    """Both ends, for one instance. `fabrics` in order of preference; all are registered on the context's listener."""

    def __init__(self, context: FabricContext, fabrics: Sequence[Fabric], table: EntryTable) -> None:
        """Raises `ConfigError`."""
        self._checksum = context.settings.checksum
        if self._checksum and context.memory.device != "cpu":
            raise ConfigError("checksum needs KV in host memory; leave it out of kv_connector_extra_config")
        super().__init__(table)
        self._memory, self._listener, self._fabrics = context.memory, context.listener, fabrics
        described = {fabric.name: fabric.describe() for fabric in fabrics}
        offer = Offer(self._memory.num_blocks, self._memory.geometry.places, table.bounds.lease_s, described)
        self._listener.handle(PURPOSE, ProducerService(table, offer, self._memory).serve)
        self._pool = PeerPool(context, fabrics)

    @classmethod
    def build(cls, context: LookupBufferContext) -> FabricLookupBuffer:
        """With a listener of its own."""
        config, settings, tls = context.config, context.settings, channel_tls(context.settings)
        listener = Listener(
            context.identity,
            context.token,
            config.kv_ip,
            config.kv_port,
            advertised_host=settings.advertise_host,
            advertised_port=settings.advertise_port,
            tls=tls,
        )
        try:
            fabric_context = FabricContext(context.memory, listener, context.identity, context.token, settings, tls)
            return cls(fabric_context, build_fabrics(settings.transport, fabric_context), context.table)
        except BaseException:
            listener.close()
            raise

    @classmethod
    def check_settings(cls, settings: TransportOptions) -> None:
        """A transport that is not known, whose library is not installed, or which TLS does not cover; certificates."""
        check_transport(settings.transport, channel_tls(settings))

    async def _take(self, want: Want) -> Taken:
        async with self._pool.using(want.source) as peer:
            link = await peer.link()
            arrivals = ArrivalMap(want, link.geometry, self._memory.geometry)
            return await self._read(peer, link, Selection(want, arrivals), want.deadline)

    async def _read(self, peer: Peer, link: Link, selection: Selection, deadline: float) -> Taken:
        async def read(remote: Sequence[Span], local: Sequence[Span]) -> bool:
            try:
                await link.fabric_peer.read(remote, local, deadline)
            except PeerLost as error:
                peer.fail(error)
                raise
            return not self._checks(link) or await self._verify(peer, select_id, remote, local)

        async def take(generation: int) -> None:
            peer.tell(Take(select_id, generation, selection.share.taker, selection.share.num_takers))

        with peer.selecting(selection) as select_id:
            return await selection.load(read, take, link.fabric_name)

    def _checks(self, link: Link) -> bool:
        if self._checksum is None:
            return link.over_bare_tcp and self._memory.device == "cpu"
        return self._checksum

    async def _verify(self, peer: Peer, select_id: int, remote: Sequence[Span], local: Sequence[Span]) -> bool:
        """Whether what was read is what the producer has; True also when its key is over, which news has told."""
        asked = peer.ask(Verify(select_id, list(remote)))
        ours = await digest(self._memory, local)
        intact = await asked == ours
        self._counts["mismatches"] += not intact
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

    async def _expire(self) -> None:
        tick_s = min(LONGEST_TICK_S, self.table.bounds.lease_s / TICKS_PER_LEASE)
        while True:
            await asyncio.sleep(tick_s)
            call_contained(self.table.expire, "ending leases", lambda error: None)

    def address(self) -> dict[str, Any]:
        """Of the listener."""
        return {"host": self._listener.host, "port": self._listener.port}

    def close(self) -> None:
        """Give the port back."""
        self._listener.close()

    def statistics(self) -> dict[str, float]:
        """Of the table, of what was taken here, and of the listener."""
        return super().statistics() | self._listener.statistics()
