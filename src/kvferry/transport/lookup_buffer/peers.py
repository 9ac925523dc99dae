"""The consumer's connections to producers: one each, shared by all hand-offs from it, made anew after a loss.

Owns the connections and the fabric peer of each. It hands news to who follows a key and does not know what they do. All
of it lives on the transfer loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from kvferry.core.errors import ConfigError, KvferryError, LayoutMismatch, PeerLost, ProtocolError
from kvferry.core.layout import KVLayout
from kvferry.core.sharding import require_ordered
from kvferry.transport.connection import Connection, limited_to
from kvferry.transport.fabric.base import Fabric, FabricContext, FabricPeer
from kvferry.transport.lookup_buffer.base import Source
from kvferry.transport.lookup_buffer.messages import (
    PURPOSE,
    Change,
    FromConsumer,
    FromProducer,
    News,
    Offer,
    Renew,
    Select,
    TakeAnswer,
    Unselect,
    Verify,
    VerifyAnswer,
)
from kvferry.transport.memory import BlockGeometry
from kvferry.transport.tasks import run_together

log = logging.getLogger(__name__)

CONNECT_S = 10.0
MAX_PEERS = 256
MAX_OUTBOX = 16384
RENEWALS_PER_LEASE = 3


@dataclass(frozen=True)
class Link:
    """A producer that is reached: its control connection, its blocks and how to read them."""

    connection: Connection
    geometry: BlockGeometry
    lease_s: float
    fabric_peer: FabricPeer
    fabric_name: str
    over_bare_tcp: bool = False


class Follower(Protocol):
    """Who hears the news of one key: a `Selection`, or a `Watch`."""

    key: str

    def feed(self, changes: Sequence[Change]) -> None: ...
    def answered(self, generation: int, held: bool) -> None: ...
    def fail(self, error: KvferryError) -> None: ...


class Peer:
    """One producer. `run` is its task; the rest is called by hand-offs on the same loop."""

    def __init__(self, source: Source, context: FabricContext, fabrics: Sequence[Fabric]) -> None:
        self.source = source
        self.failure: KvferryError | None = None
        self.num_users = 0
        self._context, self._fabrics = context, fabrics
        self._ids = itertools.count()
        self._followers: dict[int, Follower] = {}
        self._digests: dict[int, asyncio.Future[bytes]] = {}
        self._outbox: deque[FromConsumer] = deque()
        self._mail = asyncio.Event()
        self._settled = asyncio.Event()
        self._link: Link | None = None

    async def run(self) -> None:
        """Connect, then pass messages until the connection breaks. Every follower then fails with the error."""
        try:
            async with _linked(self.source, self._context, self._fabrics) as self._link:
                self._settled.set()
                await run_together(self._listen(self._link), self._speak(self._link), self._renew(self._link))
        except KvferryError as error:
            self.fail(error)
        except Exception as error:  # the edge between one producer and the instance: the other producers stay
            log.exception("the connection to %s:%s ended by a mistake here", self.source.host, self.source.port)
            self.fail(PeerLost(f"the connection broke: {error!r}"))
        finally:
            self.fail(PeerLost("this instance is closing its transfers"))

    async def link(self) -> Link:
        """Wait until the producer is reached. Raises why it is not."""
        await self._settled.wait()
        if self.failure is not None:
            raise self.failure
        assert self._link is not None
        return self._link

    def tell(self, message: FromConsumer) -> None:
        """Send, soon, in order."""
        if self.failure is not None:
            return
        if len(self._outbox) >= MAX_OUTBOX:
            self.fail(PeerLost(f"{self.source.host}:{self.source.port} does not read what it is told"))
            return
        self._outbox.append(message)
        self._mail.set()

    @property
    def num_following(self) -> int:
        """Keys whose news is heard."""
        return len(self._followers)

    @contextmanager
    def selecting(self, follower: Follower) -> Iterator[int]:
        """Feed a follower the news of its key, while the body runs."""
        select_id = next(self._ids)
        self._followers[select_id] = follower
        self.tell(Select(select_id, follower.key))
        try:
            yield select_id
        finally:
            del self._followers[select_id]
            if (asked := self._digests.pop(select_id, None)) is not None:
                asked.cancel()
            self.tell(Unselect(select_id))

    def ask(self, message: Verify) -> asyncio.Future[bytes]:
        """The producer's digest; one at a time of each selection. Raises why the producer is lost."""
        asked = self._digests[message.select_id] = asyncio.get_running_loop().create_future()
        asked.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever asked may have left
        if self.failure is not None:
            asked.set_exception(self.failure)
        self.tell(message)
        return asked

    def fail(self, error: KvferryError) -> None:
        """The producer is lost, or cannot be read any more: the next hand-off connects anew."""
        self.failure = self.failure or error
        self._settled.set()
        self._outbox.clear()
        if self._link is not None:
            self._link.connection.abort()
        for follower in self._followers.values():
            follower.fail(self.failure)
        for asked in self._digests.values():
            if not asked.done():
                asked.set_exception(self.failure)

    async def _listen(self, link: Link) -> None:
        while True:
            message: FromProducer = await link.connection.receive(FromProducer)
            follower = self._followers.get(message.select_id)
            if follower is None:  # its end and this message passed each other on the way
                continue
            match message:
                case News():
                    follower.feed(message.changes)
                case TakeAnswer():
                    follower.answered(message.generation, message.held)
                case VerifyAnswer():
                    self._digested(message)

    def _digested(self, message: VerifyAnswer) -> None:
        asked = self._digests.pop(message.select_id, None)
        if asked is None:
            raise ProtocolError("a digest that was not asked for")
        if not asked.done():
            asked.set_result(message.digest)

    async def _speak(self, link: Link) -> None:
        while True:
            await self._mail.wait()
            self._mail.clear()
            while self._outbox:
                await link.connection.send(self._outbox.popleft())

    async def _renew(self, link: Link) -> None:
        while True:
            await asyncio.sleep(link.lease_s / RENEWALS_PER_LEASE)
            if self._followers:
                self.tell(Renew(list(self._followers)))


class PeerPool:
    """All producers that this instance is connected to."""

    def __init__(self, context: FabricContext, fabrics: Sequence[Fabric]) -> None:
        self._context, self._fabrics = context, fabrics
        self._peers: dict[Source, Peer] = {}
        self._tasks: dict[Source, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._started = asyncio.Event()

    async def run(self) -> None:
        """Keep the connections until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._group:
                self._started.set()
                await asyncio.Event().wait()
        finally:
            self._group = None

    @asynccontextmanager
    async def using(self, source: Source) -> AsyncIterator[Peer]:
        """The producer at `source`, connected or about to be, which stays while the body runs."""
        await self._started.wait()
        peer = self._find(source)
        peer.num_users += 1
        try:
            yield peer
        finally:
            peer.num_users -= 1

    def _find(self, source: Source) -> Peer:
        peer = self._peers.get(source)
        if peer is not None and peer.failure is None:
            return peer
        if self._group is None:
            raise PeerLost("this instance is closing its transfers")
        self._make_room()
        peer = self._peers[source] = Peer(source, self._context, self._fabrics)
        self._tasks[source] = self._group.create_task(self._keep(source, peer))
        return peer

    async def _keep(self, source: Source, peer: Peer) -> None:
        try:
            await peer.run()
        finally:
            if self._peers.get(source) is peer:
                del self._peers[source], self._tasks[source]

    def _make_room(self) -> None:
        """Part with the connection that has been there longest and is idle, when there are very many."""
        if len(self._peers) >= MAX_PEERS:
            idle = next((source for source, peer in self._peers.items() if not peer.num_users), None)
            if idle is not None:
                self._tasks[idle].cancel()


@asynccontextmanager
async def _linked(source: Source, context: FabricContext, fabrics: Sequence[Fabric]) -> AsyncIterator[Link]:
    deadline = asyncio.get_running_loop().time() + CONNECT_S
    where = f"{source.host}:{source.port}"
    connection = await context.dial(source.host, source.port, PURPOSE, deadline)
    try:
        engine_id = connection.peer.engine_id
        if source.engine_id and engine_id != source.engine_id:
            raise PeerLost(f"the instance that had the KV is gone; {where} is another one now")
        async with limited_to(deadline, f"first message of {where}"):
            offer: Offer = await connection.receive(Offer)
        fabric = _shared_fabric(fabrics, offer)
        fabric_peer = await fabric.connect(offer.fabrics[fabric.name], deadline)
        log.info("KV of %s is read over %s", where, fabric.name)
        try:
            layout = connection.peer.layout
            if len(offer.places) != layout.num_layers:
                raise ProtocolError(
                    f"{where} offers {len(offer.places)} layers, and its layout has {layout.num_layers}"
                )
            require_ordered(layout)
            _require_meant(source, layout)
            geometry = BlockGeometry(layout, offer.num_blocks, offer.places)
            yield Link(connection, geometry, offer.lease_s, fabric_peer, fabric.name, _over_bare_tcp(fabric))
        finally:
            await fabric_peer.close()
    finally:
        await connection.close()


def _shared_fabric(fabrics: Sequence[Fabric], offer: Offer) -> Fabric:
    """The first of ours that the producer has too and that reaches it."""
    for fabric in fabrics:
        description = offer.fabrics.get(fabric.name)
        if description is not None and fabric.reachable(description):
            return fabric
    ours, theirs = ", ".join(fabric.name for fabric in fabrics), ", ".join(offer.fabrics)
    raise ConfigError(
        f"no transport joins these two instances: this one has {ours}, the producer {theirs}; shm needs both on one"
        " machine with a common view of /proc; set kv_connector_extra_config.transport to tcp or auto on both"
    )


def _over_bare_tcp(fabric: Fabric) -> bool:
    """What TLS carries it has authenticated."""
    return fabric.over_tcp and not (fabric.under_tls and fabric.context.tls)


def _require_meant(source: Source, layout: KVLayout) -> None:
    """Raise `LayoutMismatch` unless this is the rank that was meant: another one's heads are others."""
    if source.tp_size not in (None, layout.tp_size):
        raise LayoutMismatch("tp_size", source.tp_size, layout.tp_size)
    if source.tp_rank not in (None, layout.tp_rank):
        raise LayoutMismatch("tp_rank", source.tp_rank, layout.tp_rank)
