"""What only fabrics over pipes have to deal with: pieces, pipes that break, peers that lie."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import torch
from kv_support import BlockRegion, ProducerProcess, make_layout, soon, table_for, tls_of
from pipe_support import EXAMPLES, KINDS
from torch import Tensor

from kvferry.core.errors import ConfigError, PeerLost, ProtocolError, TransferTimeout
from kvferry.core.messages.wire import Message
from kvferry.testing.pipe import PipeContract
from kvferry.transport.connection import Connection, Identity
from kvferry.transport.control import Listener
from kvferry.transport.fabric.base import FabricContext, FabricPeer, build_fabrics
from kvferry.transport.fabric.pipe import PipeFabric, Pull, Pulled, TensorPipe
from kvferry.transport.fabric.process_group import Formed, Published
from kvferry.transport.lookup_buffer.base import Source, Want
from kvferry.transport.lookup_buffer.entries import EntryBounds
from kvferry.transport.lookup_buffer.fabric import FabricLookupBuffer
from kvferry.transport.lookup_buffer.messages import Part
from kvferry.transport.memory import BlockMemory
from kvferry.transport.tls import ChannelTls
from support.waiting import eventually

MakeRegion = Callable[..., BlockRegion]


class TestGloo(PipeContract):
    transport = "gloo"


class TestNcclOverGloo(PipeContract):
    """The code path of NCCL, which needs GPUs, over gloo."""

    transport = "nccl_over_gloo:NcclOverGloo"


class TestExamplePipe(PipeContract):
    transport = KINDS["example"]
    path = str(EXAMPLES)


class TestExamplePipeUnderTls(TestExamplePipe):
    @classmethod
    def tls(cls) -> ChannelTls | None:
        return tls_of("tls-")


@asynccontextmanager
async def instance(region: BlockRegion, pipe: str) -> AsyncIterator[tuple[FabricLookupBuffer, Source]]:
    listener = Listener(Identity("engine", region.memory.layout), "secret")
    context = FabricContext(region.memory, listener)
    bounds = EntryBounds(capacity_bytes=4 * 2**20)
    buffer = FabricLookupBuffer(context, build_fabrics(KINDS[pipe], context), table_for(region.memory, bounds))
    task = asyncio.create_task(buffer.run())
    try:
        yield buffer, Source(listener.host, listener.port)
        buffer.table.check()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled(), task.exception()


def offer(buffer: FabricLookupBuffer, key: str, block_ids: list[int]) -> None:
    assert buffer.table.open(key)
    buffer.table.insert(key, Part(0, 3, 0, block_ids))
    buffer.table.seal(key, b"meta")


@pytest.mark.parametrize("pipe", KINDS)
async def test_the_last_of_four_is_fetched_first(make_region: MakeRegion, pipe: str) -> None:
    """A FIFO that serves by key: nothing is in it that nobody asked for."""
    theirs, ours = make_region(seed=1), make_region()
    async with instance(theirs, pipe) as (producer, source), instance(ours, pipe) as (consumer, _):
        for block_id, key in enumerate("abcd"):
            offer(producer, key, [block_id])
        for key in "cadb":
            block_id = "abcd".index(key)
            taken = await consumer.drop_select(Want(key, source, [block_id], soon()))
            assert taken.fabric == ("unix" if pipe == "example" else pipe)
            assert producer.table.end_reason(key) == "taken"
            assert ours.blocks([block_id]) == theirs.blocks([block_id])


@asynccontextmanager
async def reading(
    make_region: MakeRegion, pipe: str, memory: BlockMemory | None = None, piece_bytes: int | None = None
) -> AsyncIterator[tuple[FabricPeer, BlockRegion, BlockRegion]]:
    """(peer, its region, our region), without a lookup buffer. `memory`: of the peer, if not its region."""
    theirs, ours = make_region(seed=1), make_region(seed=2)
    async with (
        fabric(memory or theirs.memory, pipe, piece_bytes) as served,
        fabric(ours.memory, pipe, piece_bytes) as own,
    ):
        peer = await own.connect(served.describe(), soon())
        try:
            yield peer, theirs, ours
        finally:
            await peer.close()


@asynccontextmanager
async def fabric(memory: BlockMemory, pipe: str, piece_bytes: int | None = None) -> AsyncIterator[PipeFabric]:
    listener = Listener(Identity("engine", memory.layout), "secret")
    [built] = build_fabrics(KINDS[pipe], FabricContext(memory, listener))
    serving = asyncio.create_task(listener.serve())
    assert isinstance(built, PipeFabric)
    built.piece_bytes = piece_bytes or built.piece_bytes
    try:
        yield built
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


@pytest.mark.parametrize("pipe", KINDS)
async def test_reads_of_many_pieces(make_region: MakeRegion, pipe: str) -> None:
    """Pieces end in the middle of spans, which differ on the two sides."""
    async with reading(make_region, pipe, piece_bytes=1000) as (peer, theirs, ours):
        await peer.read([(100, 7000), (3, 5)], [(2, 5), (5000, 7000)], soon())
        expected = bytes(theirs.bytes[100:7100]) + bytes(theirs.bytes[3:8])
        assert bytes(ours.bytes[2:7]) + bytes(ours.bytes[5000:12000]) == expected


@pytest.mark.parametrize("pipe", KINDS)
async def test_memory_in_several_regions(make_region: MakeRegion, pipe: str) -> None:
    parts = [make_region(seed=number) for number in (1, 2)]
    size = parts[0].memory.num_bytes
    memory = BlockMemory(parts[0].memory.geometry, parts[0].memory.regions + parts[1].memory.regions)
    async with reading(make_region, pipe, memory) as (peer, _, ours):
        await peer.read([(size - 4, 4), (size, 8)], [(0, 12)], soon())
        assert bytes(ours.bytes[:12]) == bytes(parts[0].bytes[-4:]) + bytes(parts[1].bytes[:8])


@pytest.mark.parametrize("pipe", KINDS)
async def test_reads_that_are_given_up_write_nothing_more(make_region: MakeRegion, pipe: str) -> None:
    """At any place: the next read has a new pipe where the old one may hold bytes of the last."""
    async with reading(make_region, pipe) as (peer, theirs, ours):
        everything = [(0, theirs.memory.num_bytes)]
        for num_turns in range(12):
            giving_up = asyncio.create_task(peer.read(everything, everything, soon()))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            giving_up.cancel()
            await asyncio.gather(giving_up, return_exceptions=True)
            ours.fill(3)
            before = ours.bytes.copy()
            await peer.read([(8, 4)], [(0, 4)], soon())
            assert (ours.bytes[4:] == before[4:]).all()
            assert (ours.bytes[:4] == theirs.bytes[8:12]).all()


async def test_reads_after_the_end(make_region: MakeRegion) -> None:
    async with reading(make_region, "example") as (peer, _, _):
        await peer.close()
        with pytest.raises(PeerLost):
            await peer.read([(8, 4)], [(0, 4)], soon())


class _MadeUp(TensorPipe):
    """A pipe out of which comes whatever it was made with; an exception is raised."""

    def __init__(self, comes: Tensor | Exception | None) -> None:
        self.comes = comes
        self.receives = False
        self.closed = 0

    async def send_tensor(self, tensor: Tensor) -> None:
        if isinstance(self.comes, Exception):
            raise self.comes
        await asyncio.Event().wait()

    async def recv_tensor(self, num_bytes: int) -> Tensor:
        self.receives = True
        if self.comes is None:
            await asyncio.Event().wait()
        if isinstance(self.comes, Exception):
            raise self.comes
        assert self.comes is not None
        return self.comes

    async def close(self) -> None:
        self.closed += 1


class _MadeUpFabric(PipeFabric):
    name = "made up"

    def __init__(self, context: FabricContext, comes: Tensor | Exception | None = None) -> None:
        super().__init__(context)
        self.comes = comes
        self.pipes: list[_MadeUp] = []

    async def open_pipe(self, connection: Connection, deadline: float, *, sends: bool) -> TensorPipe:
        self.pipes.append(_MadeUp(self.comes))
        return self.pipes[-1]


@asynccontextmanager
async def made_up(
    make_region: MakeRegion, comes: Tensor | Exception | None, sending: Exception | None = None
) -> AsyncIterator[tuple[FabricPeer, _MadeUpFabric, _MadeUpFabric, BlockRegion]]:
    """(peer, our fabric, its fabric, our region). `comes` is for the reader, `sending` for its peer."""
    theirs, ours = make_region(seed=1), make_region(seed=2)
    listeners = [Listener(Identity("engine", region.memory.layout), "secret") for region in (ours, theirs)]
    own, served = (
        _MadeUpFabric(FabricContext(region.memory, listener), what)
        for region, listener, what in zip((ours, theirs), listeners, (comes, sending), strict=True)
    )
    serving = [asyncio.create_task(listener.serve()) for listener in listeners]
    peer = await own.connect(served.describe(), soon())
    try:
        yield peer, own, served, ours
    finally:
        await peer.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        assert [pipe.closed for fabric in (own, served) for pipe in fabric.pipes] == [1] * 2 * len(own.pipes)


WRONG = {
    "more than was asked for": (torch.zeros(5, dtype=torch.uint8), ProtocolError, "for a read of 4"),
    "nothing": (torch.zeros(0, dtype=torch.uint8), ProtocolError, "for a read of 4"),
    "another dtype": (torch.zeros(4, dtype=torch.int8), ProtocolError, "for a read of 4"),
    "another shape": (torch.zeros((2, 2), dtype=torch.uint8), ProtocolError, "for a read of 4"),
    "an error of a library": (RuntimeError("[rank 1] oh no"), PeerLost, "made up pipe.*oh no"),
    "an error of ours": (TransferTimeout("too slow"), TransferTimeout, "too slow"),
}


@pytest.mark.parametrize("what", WRONG)
async def test_what_else_may_come_out_of_a_pipe(make_region: MakeRegion, what: str) -> None:
    comes, error, words = WRONG[what]
    async with made_up(make_region, comes) as (peer, own, _, ours):
        before = ours.bytes.copy()
        for attempt in (1, 2):
            with pytest.raises(error, match=words):
                await peer.read([(8, 4)], [(0, 4)], soon())
            assert [pipe.closed for pipe in own.pipes] == [1] * attempt, "each attempt has a pipe of its own"
        assert (ours.bytes == before).all()


@pytest.mark.parametrize("who", ["the reader", "the peer"])
async def test_a_pipe_need_not_notice_the_end(make_region: MakeRegion, who: str) -> None:
    """The connection does."""
    async with made_up(make_region, None, RuntimeError("broken") if who == "the peer" else None) as (peer, own, _, _):
        read = asyncio.create_task(peer.read([(8, 4)], [(0, 4)], soon(60)))
        if who == "the reader":
            await eventually(lambda: own.pipes[0].receives, interval_s=0)
            await peer.close()
        with pytest.raises(PeerLost, match="closed the connection"):
            await read


async def test_a_peer_that_speaks_out_of_turn(make_region: MakeRegion) -> None:
    ours = make_region(seed=2)
    identity = Identity("liar", ours.memory.layout)
    listener, own = Listener(identity, "secret"), Listener(identity, "secret")

    async def serve(connection: Connection) -> None:
        await connection.receive(Pull)
        await connection.send(Pull([]))
        await connection.peek_byte()

    listener.handle("pull", serve)
    task = asyncio.create_task(listener.serve())
    peer = await _MadeUpFabric(FabricContext(ours.memory, own)).connect(
        {"host": listener.host, "port": listener.port}, soon()
    )
    with pytest.raises(ProtocolError):
        await peer.read([(8, 4)], [(0, 4)], soon())
    await peer.close()
    own.close()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


GROUP_LIES: dict[str, list[Message]] = {
    "an address that is none": [Published("0/0", b"nonsense")],
    "an endless store": [Published(str(number), b"x") for number in range(100)],
    "a value that is too long": [Published("k", b"x" * 10_000)],
    "a failure": [Formed("no")],
    "another message": [Pulled()],
    "nothing": [],
}


@pytest.mark.parametrize("lie", GROUP_LIES)
async def test_a_group_is_not_formed_with_liars(make_region: MakeRegion, lie: str) -> None:
    async def speak(connection: Connection) -> None:
        for message in GROUP_LIES[lie]:
            await connection.send(message)
        await connection.peek_byte()
        await asyncio.Event().wait()

    listener = Listener(Identity("liar", make_layout()), "secret")
    listener.handle("pull", speak)
    task = asyncio.create_task(listener.serve())
    async with fabric(make_region().memory, "gloo") as own:
        with pytest.raises((ProtocolError, PeerLost, TransferTimeout)):
            await own.connect({"host": listener.host, "port": listener.port}, soon(1))
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
            await eventually(lambda: ours.blocks([0]) == same.blocks([4]), interval_s=0)
        finally:
            producer.kill()
        with pytest.raises(PeerLost):
            await fetching


@pytest.mark.processes
@pytest.mark.parametrize("pipe", KINDS)
async def test_a_producer_that_is_killed_in_the_middle_of_a_read(make_region: MakeRegion, pipe: str) -> None:
    ours = make_region(64, 7, make_layout(block_size=2048))
    before = ours.bytes[:64].copy()
    async with fabric(ours.memory, pipe) as own:
        producer = ProducerProcess(KINDS[pipe], num_blocks=64, block_size=2048)
        peer = await own.connect(next(iter(producer.where["fabrics"].values())), soon(60))
        everything = [(0, ours.memory.num_bytes)]
        reading = asyncio.create_task(peer.read(everything, everything, soon(60)))
        await eventually(lambda: not (ours.bytes[:64] == before).all(), interval_s=0)
        producer.kill()
        with pytest.raises(PeerLost):
            await reading
        await peer.close()


async def test_kinds_that_differ(make_region: MakeRegion) -> None:
    async with instance(make_region(), "gloo") as (_, source), instance(make_region(), "example") as (consumer, _):
        with pytest.raises(ConfigError, match="this one has unix, the producer gloo"):
            await consumer.drop_select(Want("k", source, [0], soon()))
