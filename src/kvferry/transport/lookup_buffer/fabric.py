"""The lookup buffer over fabrics: a consumer reads a producer's blocks directly into its own.

As a consumer, an instance has a `PeerPool` and a `Selection` for each hand-off that it fetches; as a producer, a
`Session` for each consumer that is connected.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvferry.core.blocks.layout import KVLayout
from kvferry.core.errors import ChecksumMismatch, ConfigError, KvferryError, LayoutMismatch, PeerLost, ProtocolError
from kvferry.transport.connection import RELEASE_PURPOSE, Connection, limited_to
from kvferry.transport.control import Listener
from kvferry.transport.fabric.base import Fabric, FabricContext, build_fabrics, check_transport
from kvferry.transport.lookup_buffer.base import LookupBuffer, LookupBufferContext, Source, Taken, Want
from kvferry.transport.lookup_buffer.entries import Cursor, EntryTable
from kvferry.transport.lookup_buffer.messages import (
    MAX_SELECTS,
    PURPOSE,
    FromConsumer,
    KeyUpdate,
    ProducerInfo,
    ReleaseKey,
    Renew,
    Select,
    Take,
    Unselect,
    Verify,
)
from kvferry.transport.lookup_buffer.peers import PeerPool
from kvferry.transport.lookup_buffer.selection import Selection
from kvferry.transport.memory import BlockMemory, Span
from kvferry.transport.options import TransportOptions
from kvferry.transport.transfer_loop import call_contained, run_together

if TYPE_CHECKING:
    from kvferry.transport.tls import ChannelTls

TICKS_PER_LEASE = 50
MAX_KEY_LENGTH = 512


class FabricLookupBuffer(LookupBuffer):
    """Both ends, for one instance."""

    max_tick_s = 0.25

    def __init__(self, context: FabricContext, fabrics: Sequence[Fabric], table: EntryTable) -> None:
        """`fabrics`, in order of preference, are built with the same context. Raises `ConfigError`."""
        self._checksum = context.settings.checksum
        if self._checksum and context.memory.device != "cpu":
            raise ConfigError("checksum needs KV in host memory; leave it out of kv_connector_extra_config")
        super().__init__(table)
        self._memory, self._listener, self.fabrics = context.memory, context.listener, fabrics
        self.pool = PeerPool(context.listener, fabrics)
        described = {fabric.name: fabric.describe() for fabric in fabrics}
        self._info = ProducerInfo(
            self._memory.num_blocks, self._memory.geometry.places, table.bounds.lease_s, described
        )
        self._sessions: set[Session] = set()
        self._num_mismatches = 0
        self._listener.handle(PURPOSE, self._serve)
        self._listener.handle(RELEASE_PURPOSE, self._serve_release)

    @classmethod
    def build(cls, context: LookupBufferContext) -> FabricLookupBuffer:
        """A buffer with a listener of its own."""
        config, settings, tls = context.config, context.settings, _tls(context.settings)
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
            fabric_context = FabricContext(context.memory, listener, settings)
            return cls(fabric_context, build_fabrics(settings.transport, fabric_context), context.table)
        except BaseException:
            listener.close()
            raise

    @classmethod
    def check_settings(cls, settings: TransportOptions) -> None:
        """Raise `ConfigError` for an unknown transport, a missing library, certificates, a transport that TLS does not
        cover."""
        check_transport(settings.transport, _tls(settings))

    # Consumer.

    async def drop_select(self, want: Want) -> Taken:
        async with limited_to(want.deadline, f"hand-off {want.key!r}"), self.pool.acquire(want.source) as peer:
            blocks = peer.blocks
            selection = Selection(want, blocks.geometry, self._memory.geometry)

            async def read(remote: Sequence[Span], local: Sequence[Span]) -> None:
                try:
                    await blocks.memory.read(remote, local, want.deadline)
                except PeerLost as error:
                    peer.fail(error)
                    raise
                if self._compares_digests(blocks.fabric):
                    peer_digest = peer.request_digest(select_id, remote)
                    if await _digest(self._memory, local) != await peer_digest:
                        self._num_mismatches += 1
                        raise ChecksumMismatch(f"hand-off {want.key!r}: what arrived differs from what was sent")

            def take(generation: int) -> None:
                peer.post(Take(select_id, generation, selection.share.reader, selection.share.num_readers))

            with peer.selected(want.key, selection.on_update) as select_id:
                return await selection.load(read, take, blocks.fabric.name)

    def _compares_digests(self, fabric: Fabric) -> bool:
        """True if bytes read over this fabric are compared by digest. Default: over TCP without TLS, since TLS
        authenticates its content."""
        if self._checksum is None:
            is_bare = fabric.over_tcp and not (fabric.under_tls and self._listener.tls)
            return is_bare and self._memory.device == "cpu"
        return self._checksum

    async def layout_at(self, source: Source, *, deadline: float) -> KVLayout:
        async with limited_to(deadline, f"reaching {source}"), self.pool.acquire(source) as peer:
            return peer.blocks.geometry.layout

    async def keep(self, key: str, source: Source, on_sealed: Callable[[], None]) -> None:
        """Select without reading, since a connection renews the leases of all selected keys. At most
        `PeerPool.max_renewed` keys of one producer are kept at a time; others wait."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ended.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio may log it

        def on_update(update: KeyUpdate | KvferryError) -> None:
            if ended.done():
                return
            if isinstance(update, KvferryError):
                ended.set_exception(update)
            elif update.end_reason:
                ended.set_result(None)
            elif update.meta is not None:
                on_sealed()

        async with self.pool.acquire(source) as peer, peer.renewals:
            await peer.wait_connected()  # it may have been lost meanwhile
            with peer.selected(key, on_update):
                await ended

    async def release(self, key: str, source: Source, *, deadline: float) -> None:
        async with limited_to(deadline, f"release of {key!r}"):
            try:
                async with self.pool.acquire(source) as peer:
                    peer.post(ReleaseKey(key))
            except LayoutMismatch:
                await self._release_unread(key, source, deadline)

    async def _release_unread(self, key: str, source: Source, deadline: float) -> None:
        """Release a key of a producer whose blocks cannot be read here."""
        connection = await self._listener.dial(source.host, source.port, RELEASE_PURPOSE, deadline)
        try:
            await connection.send(ReleaseKey(key))
        finally:
            await connection.close()

    # Producer.

    async def _serve_release(self, connection: Connection) -> None:
        """Release keys for a consumer that cannot read them."""
        while True:
            message: ReleaseKey = await connection.receive(ReleaseKey)
            self._release(_validated_key(message.key), connection.peer.engine_id)

    def _release(self, key: str, engine_id: str) -> None:
        """Release a key for the consumer's own instance only: another one may have selected it with the same ticket, as
        after a retry."""
        if not any(session.selects(key) and session.engine_id != engine_id for session in self._sessions):
            self.table.release(key)

    async def _serve(self, connection: Connection) -> None:
        """Serve one consumer until it disconnects. Keys that it has not taken stay until their lease expires."""
        session = Session(self.table, connection, self._memory, self._release)
        self._sessions.add(session)
        try:
            await connection.send(self._info)
            await run_together(session.receive(), session.send())
        finally:
            session.close()
            self._sessions.discard(session)

    def address(self) -> dict[str, Any]:
        return {"host": self._listener.host, "port": self._listener.port}

    # Both.

    async def run(self) -> None:
        """Serve consumers, keep connections to producers, and expire leases, until cancelled."""
        try:
            await run_together(self._listener.serve(), self.pool.run(), self._expire())
        finally:
            for fabric in self.fabrics:
                await fabric.close()

    async def _expire(self) -> None:
        """Expire leases periodically while there is a key, and wait for one otherwise."""
        tick_s = min(self.max_tick_s, self.table.bounds.lease_s / TICKS_PER_LEASE)
        loop, changed, is_waiting = asyncio.get_running_loop(), asyncio.Event(), False

        def on_change() -> None:  # from any thread
            if is_waiting:
                loop.call_soon_threadsafe(changed.set)

        self.table.listen(on_change)
        try:
            while True:
                is_waiting = True  # before the table is read, so that no key is missed
                changed.clear()
                while self.table.is_empty:
                    await changed.wait()
                    changed.clear()
                is_waiting = False
                await asyncio.sleep(tick_s)
                call_contained(self.table.expire, "ending leases", lambda error: None)
        finally:
            self.table.unlisten(on_change)

    def close(self) -> None:
        self._listener.close()

    def statistics(self) -> dict[str, float]:
        """The statistics of the listener, and the number of reads whose digests differed."""
        mismatches = {"mismatches": float(self._num_mismatches)} if self._num_mismatches else {}
        return self._listener.statistics() | mismatches


class Session:
    """The keys that one consumer has selected. Updates are not queued: a cursor for each key records how much was sent,
    and the table has the rest, so that a slow consumer costs no memory. It listens to the table while a key is
    selected. Used on the transfer loop, except `wake`."""

    max_readers = 1024

    def __init__(
        self, table: EntryTable, connection: Connection, memory: BlockMemory, release: Callable[[str, str], None]
    ) -> None:
        """`release`: a key, for the consumer with an engine id."""
        self._table, self._connection, self._memory, self._on_release = table, connection, memory, release
        self._loop = asyncio.get_running_loop()
        self._selected: dict[int, Cursor] = {}
        self._answers: deque[KeyUpdate] = deque()
        self._has_updates = asyncio.Event()
        self._is_wake_pending = False

    def wake(self) -> None:
        """Signal that there may be updates. From any thread; several calls before the loop runs count as one."""
        if not self._is_wake_pending:
            self._is_wake_pending = True
            self._loop.call_soon_threadsafe(self._on_wake)

    def _on_wake(self) -> None:
        self._is_wake_pending = False  # first, so that a change during `send` wakes it again
        self._has_updates.set()

    async def receive(self) -> None:
        """Handle the consumer's messages."""
        while True:
            message: FromConsumer = await self._connection.receive(FromConsumer)
            match message:
                case Select():
                    self._select(message)
                case Unselect():
                    self._unselect(message.select_id)
                case Verify():
                    if self._memory.device != "cpu":
                        raise ProtocolError("checksums can only be computed in host memory")
                    digest = await _digest(self._memory, message.spans)
                    self._answer(KeyUpdate(message.select_id, 0, digest=digest))
                case Take():
                    self._take(message)
                case Renew():
                    self._table.renew(*(cursor.key for cursor in self._selected.values()))
                    await self._connection.send(message)
                case ReleaseKey():
                    self._on_release(_validated_key(message.key), self.engine_id)

    def _select(self, message: Select) -> None:
        if len(self._selected) >= MAX_SELECTS or message.select_id in self._selected:
            raise ProtocolError(f"select {message.select_id}: in use, or one of more than {MAX_SELECTS}")
        cursor = Cursor(_validated_key(message.key), message.select_id)
        if not self._selected:
            self._table.listen(self.wake)
        self._selected[message.select_id] = cursor
        self._has_updates.set()

    def _unselect(self, select_id: int) -> None:
        if self._selected.pop(select_id, None) is not None and not self._selected:
            self._table.unlisten(self.wake)

    def close(self) -> None:
        """End the session, as the consumer has left."""
        self._selected.clear()
        self._table.unlisten(self.wake)

    def _take(self, message: Take) -> None:
        if not 0 <= message.reader < message.num_readers <= self.max_readers:
            raise ProtocolError(f"reader {message.reader} of {message.num_readers}")
        cursor = self._selected.get(message.select_id)
        if cursor is not None and self._table.take(
            cursor.key, message.generation, message.reader, message.num_readers, self.engine_id
        ):
            self._unselect(message.select_id)
            self._answer(KeyUpdate(message.select_id, message.generation, take_confirmed=True))

    @property
    def engine_id(self) -> str:
        """The engine id of the consumer."""
        return self._connection.peer.engine_id

    def selects(self, key: str) -> bool:
        """True if the consumer has selected this key."""
        return any(cursor.key == key for cursor in self._selected.values())

    def _answer(self, answer: KeyUpdate) -> None:
        if len(self._answers) >= MAX_SELECTS:
            raise ProtocolError("the peer requests answers faster than it reads them")
        self._answers.append(answer)
        self._has_updates.set()

    async def send(self) -> None:
        """Send answers, and the updates about the selected keys."""
        while True:
            await self._has_updates.wait()
            self._has_updates.clear()
            while self._answers:
                answer = self._answers.popleft()
                if (cursor := self._selected.get(answer.select_id)) is not None:
                    await self._send_updates(
                        cursor
                    )  # first: a digest of blocks that were withdrawn must not precede that update
                await self._connection.send(answer)
            for cursor in list(self._selected.values()):
                await self._send_updates(cursor)

    async def _send_updates(self, cursor: Cursor) -> None:
        while self._selected.get(cursor.select_id) is cursor:
            update = self._table.next_update(cursor)
            if update is None:
                return
            if update.end_reason:
                self._unselect(cursor.select_id)
            await self._connection.send(update)


def _validated_key(key: str) -> str:
    if not 0 < len(key) <= MAX_KEY_LENGTH:
        raise ProtocolError(f"a key of {len(key)} characters; 1 to {MAX_KEY_LENGTH} are accepted")
    return key


def _tls(settings: TransportOptions) -> ChannelTls | None:
    if not (settings.tls_cert or settings.tls_key or settings.tls_ca or settings.tls_control_only):
        return None
    from kvferry.transport.tls import channel_tls

    return channel_tls(settings)


async def _digest(memory: BlockMemory, spans: Sequence[Span]) -> bytes:
    from kvferry.transport.checksum import digest  # only if checksums are compared

    return await digest(memory, spans)
