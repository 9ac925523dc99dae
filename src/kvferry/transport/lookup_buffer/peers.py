"""A consumer's connections to producers: one to each, shared by all hand-offs from it, opened again after a loss.

Owns the connections and their fabric peers. It passes updates on to the followers of a key, and does not know how they
use it. Everything runs on the transfer loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from kvferry.core.blocks.layout import KVLayout
from kvferry.core.blocks.sharding import require_ordered
from kvferry.core.errors import ConfigError, KvferryError, LayoutMismatch, PeerLost, ProtocolError
from kvferry.transport.connection import Connection, limited_to
from kvferry.transport.control import Listener
from kvferry.transport.fabric.base import Fabric, FabricPeer
from kvferry.transport.lookup_buffer.base import Source
from kvferry.transport.lookup_buffer.messages import (
    MAX_SELECTS,
    PURPOSE,
    FromConsumer,
    KeyUpdate,
    ProducerInfo,
    Renew,
    Select,
    Unselect,
    Verify,
)
from kvferry.transport.memory import BlockGeometry, Span
from kvferry.transport.transfer_loop import run_together

logger = logging.getLogger(__name__)

CONNECT_S = 10.0
RENEWALS_PER_LEASE = 3

Follower = Callable[[KeyUpdate | KvferryError], None]
"""Gets the updates about one key, or the error after which there will be none."""


@dataclass(frozen=True)
class RemoteBlocks:
    """A producer's blocks: `geometry` has their addresses, and `memory`, made by `fabric`, reads them."""

    geometry: BlockGeometry
    fabric: Fabric
    memory: FabricPeer


class Dialler:
    """Makes the connections to producers, from this listener and over one of these fabrics."""

    def __init__(self, listener: Listener, fabrics: Sequence[Fabric]) -> None:
        self._listener, self._fabrics = listener, fabrics

    @asynccontextmanager
    async def dial(self, source: Source, deadline: float) -> AsyncIterator[tuple[Connection, ProducerInfo]]:
        """A control connection, and the producer's first message. Closed at the end."""
        connection = await self._listener.dial(source.host, source.port, PURPOSE, deadline)
        try:
            if source.engine_id and connection.peer.engine_id != source.engine_id:
                raise PeerLost(f"the instance that had the KV is gone; {source} is another one now")
            async with limited_to(deadline, f"first message of {source}"):
                info: ProducerInfo = await connection.receive(ProducerInfo)
            yield connection, info
        finally:
            await connection.close()

    @asynccontextmanager
    async def blocks(
        self, source: Source, layout: KVLayout, info: ProducerInfo, deadline: float
    ) -> AsyncIterator[RemoteBlocks]:
        """The producer's blocks, readable until the end. Raises `KvferryError` if they are not the intended ones, or
        unreachable."""
        _require_intended(source, layout)
        if len(info.places) != layout.num_layers:
            raise ProtocolError(f"{source} has {len(info.places)} layers, its layout has {layout.num_layers}")
        fabric = _shared_fabric(self._fabrics, info)
        memory = await fabric.connect(info.fabrics[fabric.name], deadline)
        logger.info("KV of %s is read over %s", source, fabric.name)
        try:
            yield RemoteBlocks(BlockGeometry(layout, info.num_blocks, info.places), fabric, memory)
        finally:
            await memory.close()


class Peer:
    """One producer. `task` runs `run`; hand-offs call the rest on the same loop. `is_responsive`: true if it has
    answered the last message that requires an answer."""

    max_outbox = 16384
    answer_s = 5.0
    """A connected producer that does not answer a `Renew` within this time is lost: its process or network has
    stopped."""

    task: asyncio.Task[None]

    def __init__(self, source: Source, dialler: Dialler, max_renewed: int) -> None:
        self.source, self._dialler = source, dialler
        self.failure: KvferryError | None = None
        self.num_users = 0
        self.renewals = asyncio.Semaphore(max_renewed)
        self.is_responsive = False
        self._unanswered_since: float | None = None
        self._ids = itertools.count()
        self.followers: dict[int, Follower] = {}
        """The follower of each selected key, by select id."""
        self._digests: deque[asyncio.Future[bytes]] = deque()
        """Awaited digests; they arrive in the order of their requests."""
        self._outbox: asyncio.Queue[FromConsumer] = asyncio.Queue(self.max_outbox)
        self._connected_or_failed, self._has_followers = asyncio.Event(), asyncio.Event()
        self._connection: Connection | None = None
        self._blocks: RemoteBlocks | None = None

    async def run(self, connect_s: float) -> None:
        """Connect, then pass messages on until the connection breaks; all followers then get the error. `connect_s`:
        maximum seconds of the handshake."""
        deadline = asyncio.get_running_loop().time() + connect_s
        try:
            async with self._dialler.dial(self.source, deadline) as (connection, info):
                self._connection, self.is_responsive = connection, True
                layout, deadline = connection.peer.layout, deadline + CONNECT_S
                async with self._dialler.blocks(self.source, layout, info, deadline) as self._blocks:
                    self._connected_or_failed.set()
                    await run_together(self._receive(connection), self._send(connection), self._renew(info.lease_s))
        except KvferryError as error:
            self.fail(error)
        except Exception as error:  # the edge between one producer and the instance: the other producers stay
            logger.exception("the connection to %s ended by an internal error", self.source)
            self.fail(PeerLost(f"the connection broke: {error!r}"))
        finally:
            self.fail(PeerLost("this instance is closing its transfers"))

    async def wait_connected(self) -> None:
        """Wait until the producer is connected. Raises the error if it cannot be."""
        await self._connected_or_failed.wait()
        if self.failure is not None:
            raise self.failure

    @property
    def blocks(self) -> RemoteBlocks:
        """The producer's blocks, after `wait_connected`."""
        assert self._blocks is not None
        return self._blocks

    def post(self, message: FromConsumer) -> None:
        """Queue a message; messages are sent in order."""
        if self.failure is None:
            try:
                self._outbox.put_nowait(message)
            except asyncio.QueueFull:
                self.fail(PeerLost(f"{self.source} does not read the messages that are sent to it"))

    def request_digest(self, select_id: int, spans: Sequence[Span]) -> asyncio.Future[bytes]:
        """Request the digest of these spans of the producer's memory. The update about a reset that happened before it
        was computed arrives before it. Raises, when awaited, the error if it does not arrive."""
        digest: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        digest.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio may log it
        self._digests.append(digest)
        self.post(Verify(select_id, list(spans)))
        if self.failure is not None:
            self.fail(self.failure)
        return digest

    @contextmanager
    def selected(self, key: str, on_update: Follower) -> Iterator[int]:
        """Select a key while the body runs: `on_update` gets the updates about it, and its lease is renewed. Yields the
        select id."""
        select_id = next(self._ids)
        self.followers[select_id] = on_update
        self._has_followers.set()
        self.post(Select(select_id, key))
        try:
            yield select_id
        finally:
            del self.followers[select_id]
            self.post(Unselect(select_id))

    def fail(self, error: KvferryError) -> None:
        """Mark the producer as lost, or no longer readable: the next hand-off opens a new connection."""
        self.failure = self.failure or error
        self._connected_or_failed.set()
        if self._connection is not None:
            self._connection.abort()
        for on_update in self.followers.values():
            on_update(self.failure)
        while self._digests:
            if not (digest := self._digests.popleft()).done():
                digest.set_exception(self.failure)

    async def _receive(self, connection: Connection) -> None:
        while True:
            message: KeyUpdate | Renew = await connection.receive(KeyUpdate | Renew)
            self._unanswered_since = None
            if isinstance(message, Renew):
                continue
            if message.digest:
                self._on_digest(message.digest)
            elif (on_update := self.followers.get(message.select_id)) is not None:
                on_update(message)  # otherwise it crossed our `Unselect` on the way

    def _on_digest(self, digest: bytes) -> None:
        if not self._digests:
            raise ProtocolError("a digest that was not requested")
        if not (awaited := self._digests.popleft()).done():
            awaited.set_result(digest)

    async def _send(self, connection: Connection) -> None:
        while True:
            await connection.send(await self._outbox.get())

    async def _renew(self, lease_s: float) -> None:
        """Renew the leases of the followed keys, until the producer does not answer a renewal. If this process itself
        had stopped, the answer to the last renewal has been received by now."""
        loop = asyncio.get_running_loop()
        while True:
            if not self.followers and self._unanswered_since is None:
                self._has_followers.clear()
                await self._has_followers.wait()
            await asyncio.sleep(min(lease_s / RENEWALS_PER_LEASE, self.answer_s))
            if self._unanswered_since is not None and loop.time() - self._unanswered_since >= self.answer_s:
                self.is_responsive = False
                self.fail(PeerLost(f"{self.source} is connected, and has not answered for {self.answer_s:g} s"))
            elif self.followers:
                self._unanswered_since = self._unanswered_since or loop.time()
                self.post(Renew())


class PeerPool:
    """The producers that this instance is connected to, and the unresponsive ones: `peers`."""

    max_peers = 256
    max_renewed = MAX_SELECTS // 2
    """Maximum number of waiting tickets of one producer whose leases are renewed: half of its limit of selected keys;
    the rest is for loads."""
    reconnect_s = 1.0
    """`CONNECT_S` for a producer that was unresponsive the last time."""
    peer_type: type[Peer] = Peer

    def __init__(self, listener: Listener, fabrics: Sequence[Fabric]) -> None:
        self._dialler = Dialler(listener, fabrics)
        self.peers: dict[Source, Peer] = {}
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
    async def acquire(self, source: Source) -> AsyncIterator[Peer]:
        """The producer at `source`, connected; not closed as idle while the body runs. Raises the error if it is
        unreachable."""
        await self._started.wait()
        peer = self._find(source)
        peer.num_users += 1
        try:
            await peer.wait_connected()
            yield peer
        finally:
            peer.num_users -= 1

    def _find(self, source: Source) -> Peer:
        peer = self.peers.get(source)
        if peer is not None and peer.failure is None:
            return peer
        if self._group is None:
            raise PeerLost("this instance is closing its transfers")
        self._make_room()
        was_unresponsive = peer is not None and not peer.is_responsive
        peer = self.peers[source] = self.peer_type(source, self._dialler, self.max_renewed)
        peer.task = self._group.create_task(self._run_peer(peer, self.reconnect_s if was_unresponsive else CONNECT_S))
        return peer

    async def _run_peer(self, peer: Peer, connect_s: float) -> None:
        try:
            await peer.run(connect_s)
        finally:
            if peer.is_responsive and peer is self.peers.get(peer.source):
                del self.peers[peer.source]

    def _make_room(self) -> None:
        """Close the oldest connection without users, and forget it, if there are `max_peers`. If all have users, there
        will be more than `max_peers`."""
        if len(self.peers) >= self.max_peers:
            idle = next((peer for peer in self.peers.values() if not peer.num_users), None)
            if idle is not None:
                del self.peers[idle.source]
                idle.task.cancel()


def _shared_fabric(fabrics: Sequence[Fabric], info: ProducerInfo) -> Fabric:
    """The first local fabric that the producer has too and that reaches it. Raises `ConfigError`."""
    for fabric in fabrics:
        description = info.fabrics.get(fabric.name)
        if description is not None and fabric.reachable(description):
            return fabric
    own_names, peer_names = ", ".join(fabric.name for fabric in fabrics), ", ".join(info.fabrics)
    raise ConfigError(
        f"no transport joins these two instances: this one has {own_names}, the producer {peer_names}; shm needs both"
        " on one machine with a common view of /proc; set kv_connector_extra_config.transport to tcp or auto on both"
    )


def _require_intended(source: Source, layout: KVLayout) -> None:
    """Raise `LayoutMismatch` unless this is the intended rank, since another one has other heads."""
    require_ordered(layout)
    if source.tp_size not in (None, layout.tp_size):
        raise LayoutMismatch("tp_size", source.tp_size, layout.tp_size)
    if source.tp_rank not in (None, layout.tp_rank):
        raise LayoutMismatch("tp_rank", source.tp_rank, layout.tp_rank)
