"""What only a pipe that is made a fabric has to deal with: pulls, pieces, pipes that break, and peers that lie."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import torch
from kv_support import BlockRegion, ProducerProcess, soon, table_for, until
from pipe_support import KINDS

from kvferry.core.errors import ConfigError, PeerLost, ProtocolError
from kvferry.transport.connection import Connection, Identity
from kvferry.transport.control import Listener
from kvferry.transport.fabric import pipe as pipe_fabric
from kvferry.transport.fabric.base import FabricContext, FabricPeer
from kvferry.transport.fabric.pipe import Open, PipeFabric, PipePeer, Pull
from kvferry.transport.lookup_buffer.base import Source, Want
from kvferry.transport.lookup_buffer.entries import EntryBounds
from kvferry.transport.lookup_buffer.fabric import FabricLookupBuffer
from kvferry.transport.lookup_buffer.messages import Part
from kvferry.transport.memory import BlockMemory, Pieces, join
from kvferry.transport.pipe.base import PipeSender, PipeSettings, pipe_class, pipe_kind
from kvferry.transport.pipe.meeting import PipeServer

MakeRegion = Callable[..., BlockRegion]


@asynccontextmanager
async def instance(
    region: BlockRegion, pipe: str, *, engine_id: str = "engine"
) -> AsyncIterator[tuple[FabricLookupBuffer, Source]]:
    identity = Identity(engine_id, region.memory.layout)
    listener = Listener(identity, "secret")
    context = FabricContext(region.memory, listener)
    fabric = PipeFabric.through(pipe_class(KINDS.get(pipe, pipe)), context)
    buffer = FabricLookupBuffer(context, [fabric], table_for(region.memory, EntryBounds(capacity_bytes=4 * 2**20)))
    task = asyncio.create_task(buffer.run())
    try:
        yield buffer, Source(listener.host, listener.port)
        buffer.check()
        buffer.table.check()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled(), task.exception()


def offer(buffer: FabricLookupBuffer, key: str, block_id: int) -> None:
    assert buffer.table.open(key)
    buffer.table.insert(key, Part(0, 3, 0, [block_id]))
    buffer.table.seal(key, b"meta")


@pytest.mark.parametrize("pipe", KINDS)
async def test_the_last_of_four_is_fetched_first(make_region: MakeRegion, pipe: str) -> None:
    """A FIFO that serves by key: nothing is in it that nobody asked for."""
    theirs, ours = make_region(seed=1), make_region()
    async with instance(theirs, pipe) as (producer, source), instance(ours, pipe) as (consumer, _):
        for block_id, key in enumerate("abcd"):
            offer(producer, key, block_id)
        for key in "cadb":
            block_id = "abcd".index(key)
            taken = await consumer.drop_select(Want(key, source, [block_id], soon()))
            assert taken.fabric == ("unix" if pipe == "example" else pipe)
            assert producer.table.ended() == [(key, "taken")]
            assert ours.blocks([block_id]) == theirs.blocks([block_id])


@pytest.mark.parametrize("pipe", KINDS)
async def test_hand_offs_of_many_pieces(make_region: MakeRegion, pipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces end in the middle of blocks; each is of the bounded size."""
    monkeypatch.setattr(pipe_fabric, "PIECE_BYTES", 1000)
    sizes: list[int] = []
    gather = pipe_fabric.gathered

    def watch(pieces: Pieces, device: torch.device) -> torch.Tensor:
        sizes.append(int(pieces.lengths.sum()))
        return gather(pieces, device)

    monkeypatch.setattr(pipe_fabric, "gathered", watch)
    theirs, ours = make_region(seed=1), make_region()
    async with instance(theirs, pipe) as (producer, source), instance(ours, pipe) as (consumer, _):
        producer.table.open("k")
        producer.table.insert("k", Part(0, 3, 0, [9, 2, 3, 4, 7]))
        producer.table.seal("k", b"")
        await consumer.drop_select(Want("k", source, [1, 5, 6, 0, 15], soon()))
        producer.table.ended()
    assert ours.blocks([1, 5, 6, 0, 15]) == theirs.blocks([9, 2, 3, 4, 7])
    assert len(sizes) > 3
    assert max(sizes) <= 1000


@asynccontextmanager
async def reading(make_region: MakeRegion, pipe: str) -> AsyncIterator[tuple[PipePeer, BlockRegion, BlockRegion]]:
    """(peer, its region, our region), without a lookup buffer."""
    theirs, ours = make_region(seed=1), make_region(seed=2)
    identities = [Identity(name, theirs.memory.layout) for name in ("theirs", "ours")]
    listeners = [Listener(identity, "secret") for identity in identities]
    fabrics = [
        PipeFabric(FabricContext(region.memory, listener), pipe_kind(KINDS[pipe], PipeSettings()))
        for region, listener in zip((theirs, ours), listeners, strict=True)
    ]
    serving = [asyncio.create_task(listener.serve()) for listener in listeners]
    peer = await fabrics[1].connect(fabrics[0].describe(), soon())
    assert isinstance(peer, PipePeer)
    try:
        yield peer, theirs, ours
    finally:
        await peer.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


@pytest.mark.parametrize("pipe", KINDS)
async def test_spans_outside_of_the_memory_are_refused(make_region: MakeRegion, pipe: str) -> None:
    async with reading(make_region, pipe) as (peer, theirs, ours):
        before = ours.bytes.copy()
        size = theirs.memory.num_bytes
        for span in [(size - 3, 4), (-1, 4), (2**40, 4)]:
            with pytest.raises(ProtocolError, match="outside"):
                await peer.read([span], [(0, 4)], soon())
        with pytest.raises(ProtocolError, match="own region"):
            await peer.read([(0, 4)], [(size - 3, 4)], soon())
        with pytest.raises(ProtocolError, match="cannot fill"):
            await peer.read([(0, 4)], [(0, 5)], soon())
        assert (ours.bytes == before).all()
        await peer.read([(8, 4)], [(0, 4)], soon())
        assert (ours.bytes[:4] == theirs.bytes[8:12]).all(), "the pipe lives on"


@pytest.mark.parametrize("pipe", KINDS)
async def test_a_read_given_up_writes_nothing_more(make_region: MakeRegion, pipe: str) -> None:
    async with reading(make_region, pipe) as (peer, theirs, ours):
        everything = [(0, theirs.memory.num_bytes)]
        for _ in range(20):
            giving_up = asyncio.create_task(peer.read(everything, everything, soon()))
            for _ in range(5):
                await asyncio.sleep(0)
            giving_up.cancel()
            await asyncio.gather(giving_up, return_exceptions=True)
            ours.fill(3)
            before = ours.bytes.copy()
            await peer.read([(8, 4)], [(0, 4)], soon())
            assert (ours.bytes[4:] == before[4:]).all()


@pytest.mark.parametrize("pipe", KINDS)
async def test_a_pipe_that_broke_is_made_anew(make_region: MakeRegion, pipe: str) -> None:
    async with reading(make_region, pipe) as (peer, theirs, ours):
        session = await peer.connect(soon())
        await session._pipe.close()
        with pytest.raises(PeerLost):
            await peer.read([(8, 4)], [(0, 4)], soon())
        await peer.read([(8, 4)], [(0, 4)], soon())
        assert (ours.bytes[:4] == theirs.bytes[8:12]).all()


async def test_reads_after_the_end(make_region: MakeRegion) -> None:
    async with reading(make_region, "plain") as (peer, _, _):
        await peer.close()
        with pytest.raises(PeerLost):
            await peer.read([(8, 4)], [(0, 4)], soon())


LIES = {
    "more than was asked for": torch.zeros(5, dtype=torch.uint8),
    "nothing": torch.zeros(0, dtype=torch.uint8),
    "another dtype": torch.zeros(4, dtype=torch.int8),
    "another shape": torch.zeros((2, 2), dtype=torch.uint8),
    "no dimension": torch.tensor(1, dtype=torch.uint8),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_peer_that_sends_something_else(make_region: MakeRegion, lie: str) -> None:
    ours = make_region(seed=2)
    before = ours.bytes.copy()
    identity = Identity("liar", ours.memory.layout)
    listener, kind = Listener(identity, "secret"), pipe_kind(KINDS["plain"])
    server = PipeServer(listener, kind)

    async def serve(connection: Connection) -> None:
        opened: Open = await connection.receive(Open)
        pipe: PipeSender = await server.accept(opened.ticket, soon())
        await connection.receive(Pull)
        await pipe.send_tensor(LIES[lie], deadline=soon())
        await connection.receive(Pull)

    listener.handle("pull", serve)
    task = asyncio.create_task(listener.serve())
    own = Listener(identity, "secret")
    fabric = PipeFabric(FabricContext(ours.memory, own), kind)
    peer: FabricPeer = await fabric.connect({"host": listener.host, "port": listener.port}, soon())
    with pytest.raises(ProtocolError, match="for a read of 4"):
        await peer.read([(8, 4)], [(0, 4)], soon())
    assert (ours.bytes == before).all()
    await peer.close()
    own.close()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.processes
@pytest.mark.parametrize("pipe", KINDS)
async def test_a_producer_that_is_killed(make_region: MakeRegion, pipe: str) -> None:
    producer = ProducerProcess(KINDS[pipe], seed=11)
    ours, same = make_region(), make_region(seed=11)
    async with instance(ours, pipe) as (consumer, _):
        try:
            producer.tell("open", "whole")
            producer.tell("insert", "whole", 0, 4)
            producer.tell("seal", "whole")
            await consumer.drop_select(Want("whole", producer.source, [3], soon(60)))
            assert ours.blocks([3]) == same.blocks([4])
            producer.tell("open", "k")
            producer.tell("insert", "k", 0, 4)
            fetching = asyncio.create_task(consumer.drop_select(Want("k", producer.source, [0], soon(60))))
            await until(lambda: ours.blocks([0]) == same.blocks([4]))
        finally:
            producer.kill()
        with pytest.raises(PeerLost):
            await fetching


async def test_kinds_that_differ(make_region: MakeRegion) -> None:
    async with instance(make_region(), "gloo") as (_, source), instance(make_region(), "plain") as (consumer, _):
        with pytest.raises(ConfigError, match="this one has plain, the producer gloo"):
            await consumer.drop_select(Want("k", source, [0], soon()))


def test_memory_in_several_regions(make_region: MakeRegion) -> None:
    parts = [make_region(seed=number).memory for number in (1, 2)]
    memory = BlockMemory(parts[0].geometry, parts[0].regions + parts[1].regions)
    size = parts[0].num_bytes
    spans = [(size - 4, 4), (size, 8)]
    data = pipe_fabric.gathered(join(spans, memory.map, spans, memory.map, size), torch.device("cpu"))
    assert bytes(data.numpy()) == bytes(memory.view((size - 4, 4))) + bytes(memory.view((size, 8)))
