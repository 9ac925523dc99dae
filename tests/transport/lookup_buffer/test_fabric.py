"""What only a lookup buffer between processes has to deal with: connections, and producers that die or lie."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace as replaced
from functools import partial

import pytest
from kv_support import BlockRegion, ProducerProcess, sharded, soon, table_for
from msgspec.structs import replace

from kvferry.core.blocks.layout import KVLayout
from kvferry.core.blocks.sharding import on_rank
from kvferry.core.clock import Clock, ManualClock
from kvferry.core.errors import (
    AuthenticationFailed,
    ConfigError,
    LayoutMismatch,
    LeaseEnded,
    PeerLost,
    ProtocolError,
    TransferTimeout,
)
from kvferry.transport.connection import Connection, Identity
from kvferry.transport.control import Listener
from kvferry.transport.fabric.base import FabricContext, FabricPeer, build_fabrics
from kvferry.transport.fabric.shm import ShmFabric
from kvferry.transport.lookup_buffer import peers
from kvferry.transport.lookup_buffer.base import Source, Want
from kvferry.transport.lookup_buffer.entries import Cursor, EntryBounds, EntryTable
from kvferry.transport.lookup_buffer.fabric import FabricLookupBuffer
from kvferry.transport.lookup_buffer.messages import (
    PURPOSE,
    FromConsumer,
    KeyUpdate,
    Part,
    ProducerInfo,
    Select,
    Take,
)
from kvferry.transport.memory import Span
from kvferry.transport.options import TransportOptions
from support.stopping import stop
from support.waiting import eventually

ALL = Part(0, 3, 0, [4])


class ImpatientPeer(peers.Peer):
    answer_s = 0.5


@asynccontextmanager
async def instance(
    region: BlockRegion,
    transport: str = "auto",
    *,
    port: int = 0,
    token: str = "secret",
    lease_s: float = 30,
    clock: Clock | None = None,
    engine_id: str = "engine",
) -> AsyncIterator[tuple[FabricLookupBuffer, Source]]:
    identity = Identity(engine_id, region.memory.layout)
    listener = Listener(identity, token, port=port)
    context = FabricContext(region.memory, listener)
    buffer = FabricLookupBuffer(
        context, build_fabrics(transport, context), table_for(region.memory, EntryBounds(lease_s), clock)
    )
    task = asyncio.create_task(buffer.run())
    try:
        yield buffer, Source(listener.host, listener.port)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()


def offer(buffer: FabricLookupBuffer, key: str) -> None:
    assert buffer.table.open(key)
    buffer.table.insert(key, ALL)
    buffer.table.seal(key, b"meta")


@pytest.mark.parametrize(
    ("ours", "theirs", "used"), [("auto", "auto", "shm"), ("auto", "tcp", "tcp"), ("tcp", "auto", "tcp")]
)
async def test_the_first_transport_that_both_have(
    make_region: Callable[..., BlockRegion], ours: str, theirs: str, used: str
) -> None:
    async with (
        instance(make_region(seed=1), theirs) as (producer, source),
        instance(make_region(), ours) as (consumer, _),
    ):
        offer(producer, "k")
        assert (await consumer.drop_select(Want("k", source, [0], soon()))).fabric == used


async def test_no_transport_in_common(make_region: Callable[..., BlockRegion]) -> None:
    async with instance(make_region(), "shm") as (_, source), instance(make_region(), "tcp") as (consumer, _):
        with pytest.raises(ConfigError, match="this one has tcp, the producer shm"):
            await consumer.drop_select(Want("k", source, [0], soon()))


async def test_a_wrong_token_fails_the_hand_off(make_region: Callable[..., BlockRegion]) -> None:
    async with (
        instance(make_region(), token="one") as (_, source),
        instance(make_region(), token="other") as (consumer, _),
    ):
        for _ in range(2):
            with pytest.raises(AuthenticationFailed):
                await consumer.drop_select(Want("k", source, [0], soon()))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_killed_producer_fails_all_its_hand_offs_at_once(
    make_region: Callable[..., BlockRegion], transport: str
) -> None:
    producer = ProducerProcess(transport)
    producer.tell("open", "begun")
    producer.tell("insert", "begun", 0, 4)
    async with instance(make_region(seed=2), transport) as (consumer, _):
        fetches = [
            asyncio.ensure_future(consumer.drop_select(Want(key, producer.source, [0], soon(60))))
            for key in ("begun", "unknown")
        ]
        await eventually(lambda: len(consumer.pool.peers) == 1, interval_s=0)
        producer.kill()
        for fetch in fetches:
            with pytest.raises(PeerLost):
                await fetch


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_stopped_producer_is_waited_for_once(make_region: Callable[..., BlockRegion], transport: str) -> None:
    producer, clock = ProducerProcess(transport), asyncio.get_running_loop()
    for key in ("begun", "later"):
        producer.tell("open", key)
        producer.tell("insert", key, 0, 4)
    async with instance(make_region(seed=2), transport) as (consumer, _):
        consumer.pool.peer_type = ImpatientPeer
        want = Want("begun", producer.source, [0], soon(60))
        under_way = [asyncio.ensure_future(consumer.drop_select(replaced(want, key=key))) for key in ("begun", "never")]
        await eventually(lambda: [len(peer.followers) for peer in consumer.pool.peers.values()] == [2], interval_s=0)
        await asyncio.to_thread(stop, producer.process)
        for fetch in under_way:
            with pytest.raises(PeerLost):
                await fetch
        for key in ("a", "b", "c"):
            begun = clock.time()
            with pytest.raises(TransferTimeout):
                await consumer.drop_select(replaced(want, key=key))
            assert clock.time() - begun < 2 * peers.PeerPool.reconnect_s  # of the 60 s that it may take
        os.kill(producer.process.pid, signal.SIGCONT)
        producer.tell("seal", "later")
        assert (await consumer.drop_select(replaced(want, key="later"))).meta == b"meta"
    producer.kill()


async def test_a_producer_without_updates_is_not_lost(make_region: Callable[..., BlockRegion]) -> None:
    async with instance(make_region(seed=1)) as (producer, source), instance(make_region()) as (consumer, _):
        consumer.pool.peer_type = ImpatientPeer
        fetching = asyncio.ensure_future(consumer.drop_select(Want("k", source, [0], soon(60))))
        await eventually(lambda: source in consumer.pool.peers, interval_s=0)
        done, _ = await asyncio.wait([fetching], timeout=1.2)
        assert not done
        offer(producer, "k")
        assert (await fetching).meta == b"meta"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_hand_off_from_another_process(make_region: Callable[..., BlockRegion], transport: str) -> None:
    producer = ProducerProcess(transport, seed=11)
    same = make_region(seed=11)
    ours = make_region(seed=2)
    async with instance(ours, transport) as (consumer, _):
        fetching = asyncio.ensure_future(consumer.drop_select(Want("k", producer.source, [0, 1], soon(60))))
        producer.tell("open", "k")
        producer.tell("insert", "k", 0, 4)
        producer.tell("insert", "k", 1, 9)
        producer.tell("seal", "k")
        assert (await fetching).meta == b"meta"
        assert ours.blocks([0, 1]) == same.blocks([4, 9])
    producer.kill()


async def test_connections_are_made_anew_after_a_loss(make_region: Callable[..., BlockRegion]) -> None:
    theirs = make_region(seed=1)
    async with instance(make_region()) as (consumer, _):
        async with instance(theirs) as (producer, source):
            offer(producer, "k")
            await consumer.drop_select(Want("k", source, [0], soon()))
        with pytest.raises(PeerLost):
            await consumer.drop_select(Want("k", source, [0], soon()))
        async with instance(theirs, port=source.port) as (producer, _):
            offer(producer, "k")
            await consumer.drop_select(Want("k", source, [0], soon()))


async def test_another_instance_at_the_ticket_s_address_is_noticed(make_region: Callable[..., BlockRegion]) -> None:
    async with instance(make_region()) as (_, source), instance(make_region()) as (consumer, _):
        stale = Source(source.host, source.port, "the engine before")
        with pytest.raises(PeerLost, match="another one now"):
            await consumer.drop_select(Want("k", stale, [0], soon()))


async def test_a_lease_is_renewed_while_a_consumer_is_at_work(make_region: Callable[..., BlockRegion]) -> None:
    lease_s, clock, renewals = 1.0, ManualClock(), list[str]()

    def renew(key: str) -> None:
        EntryTable.renew(producer.table, key)
        renewals.append(key)

    async with (
        instance(make_region(seed=1), "shm", lease_s=lease_s, clock=clock) as (producer, source),
        gated_instance(make_region()) as (consumer, gate, reading),
    ):
        fetching = asyncio.ensure_future(consumer.drop_select(Want("k", source, [0], soon())))
        offer(producer, "k")
        await reading.wait()
        producer.table.renew = renew
        for number in range(1, 5):
            await eventually(lambda number=number: len(renewals) >= number, interval_s=0)
            clock.advance(0.9 * lease_s)
            assert producer.table.ended(["k"]) == []
        gate.set()
        await fetching


@pytest.mark.parametrize(("engine_id", "ends"), [("another", False), ("ours", True)])
async def test_a_release_is_of_its_own_instance_where_another_reads_the_key(
    make_region: Callable[..., BlockRegion], engine_id: str, *, ends: bool
) -> None:
    """As after a retry: the first consumer, which was slow, gives up what the second has begun to read."""
    theirs, ours = make_region(seed=1), make_region()
    async with (
        instance(theirs, "shm") as (producer, source),
        instance(make_region(), "shm", engine_id=engine_id) as (first, _),
        instance(ours, "shm", engine_id="ours") as (second, _),
    ):
        fetching = asyncio.ensure_future(second.drop_select(Want("k", source, [0], soon())))
        assert producer.table.open("k")
        producer.table.insert("k", ALL)
        await eventually(lambda: ours.blocks([0]) == theirs.blocks([4]), interval_s=0)
        await first.release("k", source, deadline=soon())
        if ends:
            with pytest.raises(LeaseEnded, match="released"):
                await fetching
        else:
            await first.release("another", source, deadline=soon())
            await eventually(
                lambda: producer.table.next_update(Cursor("another")) == KeyUpdate(0, -1, end_reason="released"),
                interval_s=0,
            )
            producer.table.seal("k", b"meta")
            assert (await fetching).meta == b"meta"
        await eventually(lambda: producer.table.ended(["k"]) == ["k"], interval_s=0)


async def test_a_key_is_kept_for_a_consumer_whose_ranks_have_not_all_taken_it(
    make_region: Callable[..., BlockRegion], layout: KVLayout
) -> None:
    """As after a retry: one rank of the first consumer has taken the key, and so has the other rank of the second."""
    theirs = make_region(seed=1, layout=sharded(layout, 1))
    ranks = [make_region(layout=on_rank(sharded(layout, 2), rank)) for rank in (0, 1, 0)]
    async with (
        instance(theirs, "shm") as (producer, source),
        instance(ranks[0], "shm", engine_id="first") as (first, _),
        instance(ranks[1], "shm", engine_id="second") as (second, _),
        instance(ranks[2], "shm", engine_id="second") as (slow, _),
    ):
        offer(producer, "k")
        for consumer in (first, second):
            await consumer.drop_select(Want("k", source, [0], soon()))
        assert producer.table.ended(["k"]) == []
        await slow.drop_select(Want("k", source, [0], soon()))
        assert ranks[2].blocks([0]) == ranks[0].blocks([0])
        assert producer.table.end_reason("k") == "taken"


async def test_the_fence_a_drop_while_the_consumer_reads(make_region: Callable[..., BlockRegion]) -> None:
    """The bytes it then reads may be anything, so they must not count."""
    theirs = make_region(seed=1)
    async with (
        instance(theirs, "shm") as (producer, source),
        gated_instance(make_region()) as (consumer, gate, reading),
    ):
        fetching = asyncio.ensure_future(consumer.drop_select(Want("k", source, [0], soon())))
        offer(producer, "k")
        await reading.wait()
        producer.table.drop("k")
        theirs.fill(66)
        gate.set()
        with pytest.raises(LeaseEnded):
            await fetching
        assert producer.table.end_reason("k") == "dropped"


async def test_the_fence_a_reset_while_the_consumer_reads(make_region: Callable[..., BlockRegion]) -> None:
    theirs, ours = make_region(seed=1), make_region()
    async with (
        instance(theirs, "shm") as (producer, source),
        gated_instance(ours) as (consumer, gate, reading),
    ):
        fetching = asyncio.ensure_future(consumer.drop_select(Want("k", source, [0], soon())))
        producer.table.open("k")
        producer.table.insert("k", ALL)
        await reading.wait()
        producer.table.reset("k")
        theirs.fill(66)
        producer.table.insert("k", Part(0, 3, 0, [12]))
        producer.table.seal("k", b"again")
        gate.set()
        assert (await fetching).meta == b"again"
        assert ours.blocks([0]) == theirs.blocks([12])


async def test_the_fence_a_lease_that_ends_while_the_consumer_reads(make_region: Callable[..., BlockRegion]) -> None:
    """A renewal may be lost on the way: the blocks are somebody else's, and what is read of them must not count."""
    theirs, clock = make_region(seed=1), ManualClock()
    async with (
        instance(theirs, "shm", clock=clock) as (producer, source),
        gated_instance(make_region()) as (consumer, gate, reading),
    ):
        fetching = asyncio.ensure_future(consumer.drop_select(Want("k", source, [0], soon())))
        offer(producer, "k")
        await reading.wait()
        clock.advance(31)
        assert producer.table.end_reason("k") == "expired"
        theirs.fill(66)
        gate.set()
        with pytest.raises(LeaseEnded, match="lease"):
            await fetching


async def test_a_key_is_kept_alive_without_being_read(make_region: Callable[..., BlockRegion]) -> None:
    lease_s = 0.5
    ours = make_region()
    before = ours.bytes.copy()
    async with (
        instance(make_region(seed=1), "shm", lease_s=lease_s) as (producer, source),
        instance(ours, "shm") as (consumer, _),
    ):
        offer(producer, "k")
        keeping = asyncio.ensure_future(consumer.keep("k", source, lambda: None))
        begun = asyncio.get_running_loop().time()
        await eventually(lambda: asyncio.get_running_loop().time() > begun + 2 * lease_s, interval_s=0)
        assert producer.table.ended(["k"]) == []
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await eventually(lambda: producer.table.ended(["k"]) == ["k"], interval_s=0)
        assert producer.table.end_reason("k") == "expired"
        assert (ours.bytes == before).all()


async def test_keeping_ends_with_the_key_and_with_the_producer(make_region: Callable[..., BlockRegion]) -> None:
    async with instance(make_region()) as (consumer, _):
        async with instance(make_region(seed=1)) as (producer, source):
            is_sealed = asyncio.Event()
            keeping = asyncio.ensure_future(consumer.keep("k", source, is_sealed.set))
            assert producer.table.open("k")
            producer.table.insert("k", ALL)
            await eventually(lambda: len(consumer.pool.peers) == 1, interval_s=0)
            assert not is_sealed.is_set()
            producer.table.seal("k", b"meta")
            await is_sealed.wait()
            producer.table.drop("k")
            await keeping
            keeping = asyncio.ensure_future(consumer.keep("later", source, is_sealed.set))
            await asyncio.sleep(0)
        with pytest.raises(PeerLost):
            await keeping


async def test_more_keys_than_may_be_watched_at_once(make_region: Callable[..., BlockRegion]) -> None:
    async with instance(make_region()) as (consumer, _):
        consumer.pool.max_renewed = 2
        async with instance(make_region(seed=1)) as (producer, source):
            sealed = list[str]()
            keys = [str(number) for number in range(5)]
            for key in keys:
                offer(producer, key)
            keeping = [asyncio.ensure_future(consumer.keep(key, source, partial(sealed.append, key))) for key in keys]
            await eventually(lambda: sealed == keys[:2], interval_s=0)
            producer.table.drop(keys[0])
            await eventually(lambda: sealed == keys[:3], interval_s=0)
        for one in keeping[1:]:
            with pytest.raises(PeerLost):
                await one


async def test_a_rank_that_was_not_meant(make_region: Callable[..., BlockRegion]) -> None:
    async with instance(make_region()) as (_, source), instance(make_region()) as (consumer, _):
        for meant in (Source(source.host, source.port, tp_rank=1), Source(source.host, source.port, tp_size=2)):
            with pytest.raises(LayoutMismatch):
                await consumer.drop_select(Want("k", meant, [0], soon()))


async def test_a_reset_between_read_and_digest_is_no_mismatch(make_region: Callable[..., BlockRegion]) -> None:
    """The digest is then of other bytes, but so is the generation."""
    theirs, ours = make_region(seed=1), make_region()
    async with (
        instance(theirs, "shm") as (producer, source),
        gated_instance(ours, checksum=True) as (consumer, gate, reading),
    ):
        fetching = asyncio.ensure_future(consumer.drop_select(Want("k", source, [0], soon())))
        producer.table.open("k")
        producer.table.insert("k", ALL)
        await reading.wait()
        gate.set()
        await eventually(lambda: ours.blocks([0]) == theirs.blocks([4]), interval_s=0)
        producer.table.reset("k")
        theirs.fill(66)
        producer.table.insert("k", Part(0, 3, 0, [12]))
        producer.table.seal("k", b"again")
        assert (await fetching).meta == b"again"
        assert ours.blocks([0]) == theirs.blocks([12])


async def test_the_consumer_s_connection_breaks_before_the_take(make_region: Callable[..., BlockRegion]) -> None:
    theirs, ours = make_region(seed=1), make_region()
    async with instance(theirs, "shm") as (producer, source), instance(ours) as (second, _):
        async with gated_instance(make_region()) as (first, _, reading):
            fetching = asyncio.ensure_future(first.drop_select(Want("k", source, [0], soon())))
            offer(producer, "k")
            await reading.wait()
        with pytest.raises(PeerLost):
            await fetching
        assert producer.table.ended(["k"]) == []
        await second.drop_select(Want("k", source, [0], soon()))
        assert ours.blocks([0]) == theirs.blocks([4])


LIES = {
    "blocks outside of its memory": KeyUpdate(0, 1, [Part(0, 3, 0, [16])]),
    "negative blocks": KeyUpdate(0, 1, [Part(0, 3, 0, [-1])]),
    "layers that do not exist": KeyUpdate(0, 1, [Part(2, 2, 0, [1])]),
    "negative layers": KeyUpdate(0, 1, [Part(-1, 2, 0, [1])]),
    "no layers": KeyUpdate(0, 1, [Part(0, 0, 0, [1])]),
    "blocks before the first": KeyUpdate(0, 1, [Part(0, 3, -1, [1, 2])]),
    "a seal without parts": KeyUpdate(0, 1, meta=b""),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_producer_that_lies_is_not_believed(make_region: Callable[..., BlockRegion], lie: str) -> None:
    theirs, ours = make_region(), make_region(seed=2)
    before = ours.bytes.copy()

    async def serve(connection: Connection) -> None:
        shm = ShmFabric(FabricContext(theirs.memory, listener))
        await connection.send(
            ProducerInfo(theirs.memory.num_blocks, theirs.memory.geometry.places, 30.0, {"shm": shm.describe()})
        )
        select: Select = await connection.receive(FromConsumer)
        await connection.send(KeyUpdate(99, 1))
        await connection.send(KeyUpdate(select.select_id, 7, take_confirmed=True))
        await connection.send(replace(LIES[lie], select_id=select.select_id))
        while True:
            assert not isinstance(await connection.receive(FromConsumer), Take)

    identity = Identity("liar", theirs.memory.layout)
    listener = Listener(identity, "secret")
    listener.handle(PURPOSE, serve)
    serving = asyncio.create_task(listener.serve())
    async with instance(ours) as (consumer, _):
        with pytest.raises(ProtocolError):
            await consumer.drop_select(Want("k", Source(listener.host, listener.port), [0], soon()))
        assert (ours.bytes == before).all()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


class GatedPeer(FabricPeer):
    """Reads when the test opens the gate."""

    def __init__(self, peer: FabricPeer, gate: asyncio.Event, reading: asyncio.Event) -> None:
        self._peer, self._gate, self._reading = peer, gate, reading

    async def read(self, remote: Sequence[Span], local: Sequence[Span], deadline: float) -> None:
        self._reading.set()
        await self._gate.wait()
        await self._peer.read(remote, local, deadline)

    async def close(self) -> None:
        self._gate.set()
        await self._peer.close()


class GatedShm(ShmFabric):
    def __init__(self, context: FabricContext) -> None:
        super().__init__(context)
        self.gate, self.reading = asyncio.Event(), asyncio.Event()

    async def connect(self, description: dict[str, object], deadline: float) -> FabricPeer:
        return GatedPeer(await super().connect(description, deadline), self.gate, self.reading)


@asynccontextmanager
async def gated_instance(
    region: BlockRegion, *, checksum: bool = False
) -> AsyncIterator[tuple[FabricLookupBuffer, asyncio.Event, asyncio.Event]]:
    identity = Identity("gated", region.memory.layout)
    settings = TransportOptions(checksum=checksum)
    context = FabricContext(region.memory, Listener(identity, "secret"), settings)
    fabric = GatedShm(context)
    buffer = FabricLookupBuffer(context, [fabric], table_for(region.memory))
    task = asyncio.create_task(buffer.run())
    try:
        yield buffer, fabric.gate, fabric.reading
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_lost_read_connection_is_made_anew(make_region: Callable[..., BlockRegion]) -> None:
    """The control connection lives, the one that carries blocks does not."""
    theirs, ours = make_region(seed=1), make_region()
    async with instance(theirs, "tcp") as (producer, source), instance(ours, "tcp") as (consumer, _):
        [fabric] = consumer.fabrics
        connect, fabric_peers = fabric.connect, []

        async def remembering(description: dict[str, object], deadline: float) -> FabricPeer:
            fabric_peers.append(await connect(description, deadline))
            return fabric_peers[-1]

        fabric.connect = remembering  # type: ignore[method-assign]
        for key in ("first", "lost", "again"):
            offer(producer, key)
        await consumer.drop_select(Want("first", source, [0], soon()))
        await fabric_peers[0].close()
        with pytest.raises(PeerLost):
            await consumer.drop_select(Want("lost", source, [1], soon()))
        await consumer.drop_select(Want("again", source, [2], soon()))
        assert len(fabric_peers) == 2
        assert ours.blocks([2]) == theirs.blocks([4])
        producer.table.release("lost")
