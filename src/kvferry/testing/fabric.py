"""The contract of fabrics, and of pipes that are used as fabrics. In a package that provides one:

    from kvferry.testing.fabric import FabricContract

    class TestMyFabric(FabricContract):
        transport = "my_package.my_module:MyFabric"

Needs pytest and pytest-asyncio.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import msgspec
import pytest

from kvferry.core.blocks.layout import KVLayout
from kvferry.core.clock import Clock
from kvferry.core.errors import PeerLost, ProtocolError, TransferTimeout
from kvferry.testing.kv import BlockRegion, make_layout, soon, table_for, until
from kvferry.transport.connection import Identity
from kvferry.transport.control import Listener
from kvferry.transport.fabric.base import FabricContext, FabricPeer, build_fabrics
from kvferry.transport.lookup_buffer.entries import EntryBounds
from kvferry.transport.lookup_buffer.fabric import FabricLookupBuffer
from kvferry.transport.options import TransportOptions
from kvferry.transport.tls import ChannelTls
from kvferry.transport.transfer_loop import TransferLoop


class Node:
    """One instance's data plane: transfer thread, listener, fabrics and lookup buffer over a region."""

    def __init__(
        self,
        region: BlockRegion,
        options: TransportOptions | None = None,
        *,
        token: str = "secret",
        tls: ChannelTls | None = None,
        bounds: EntryBounds | None = None,
        clock: Clock | None = None,
        engine_id: str = "engine",
    ) -> None:
        options = options or TransportOptions()
        self.region = region
        self.loop = TransferLoop("kvferry-test")
        identity = Identity(engine_id, region.memory.layout)
        self.listener = Listener(identity, token, tls=tls)
        self.context = FabricContext(region.memory, self.listener, options)
        self.fabrics = build_fabrics(options.transport, self.context)
        self.table = table_for(region.memory, bounds, clock)
        self.buffer = FabricLookupBuffer(self.context, self.fabrics, self.table)
        self.loop.start()
        self.service = self.loop.submit(self.buffer.run())

    def close(self) -> None:
        """End the thread. Raises what its tasks raised."""
        self.loop.close()
        assert self.service.cancelled() or self.service.exception() is None


class Pair:
    """A reading instance, and its source."""

    def __init__(
        self,
        options: TransportOptions,
        tls: ChannelTls | None = None,
        num_blocks: int = 16,
        layout: KVLayout | None = None,
    ) -> None:
        layout = layout or make_layout()
        self.local, self.remote = BlockRegion(layout, num_blocks), BlockRegion(layout, num_blocks)
        self.refill()
        self.reader, self.source = (Node(region, options, tls=tls) for region in (self.local, self.remote))

    def refill(self) -> None:
        """Fill each side with other bytes."""
        self.local.fill(1)
        self.remote.fill(2)

    async def connect(self) -> FabricPeer:
        """Connect as the instance that reads."""
        [reading], [serving] = self.reader.fabrics, self.source.fabrics
        assert reading.reachable(serving.describe())
        return await reading.connect(serving.describe(), soon())

    def close(self) -> None:
        """Close both in parallel: some fabrics take a second."""
        with ThreadPoolExecutor() as pool:
            for node in (self.reader, self.source):
                pool.submit(node.close)
        self.local.close()
        self.remote.close()


class FabricContract:
    """`transport`: as in a configuration. `options`: its other settings; `tls`: the TLS of its connections."""

    pytestmark = pytest.mark.asyncio
    transport: ClassVar[str]
    options: ClassVar[TransportOptions] = TransportOptions()

    @classmethod
    def tls(cls) -> ChannelTls | None:
        """The TLS of the connections between the instances. Default: none."""
        return None

    @classmethod
    def make_pair(cls, num_blocks: int = 16, layout: KVLayout | None = None) -> Pair:
        """Two instances that are joined by the transport."""
        return Pair(msgspec.structs.replace(cls.options, transport=cls.transport), cls.tls(), num_blocks, layout)

    @pytest.fixture(scope="class")
    @classmethod
    def shared_pair(cls) -> Iterator[Pair]:
        """One pair for all tests: some fabrics take a second to end."""
        pair = cls.make_pair()
        yield pair
        pair.close()

    @pytest.fixture
    def pair(self, shared_pair: Pair) -> Pair:
        shared_pair.refill()
        return shared_pair

    @pytest.fixture(scope="class")
    @classmethod
    def shared_big(cls) -> Iterator[Pair]:
        """A pair large enough that a read takes many turns of the loop."""
        pair = cls.make_pair(64, make_layout(block_size=2048))
        yield pair
        pair.close()

    @pytest.fixture
    def big(self, shared_big: Pair) -> Pair:
        shared_big.refill()
        return shared_big

    async def test_blocks_arrive_where_they_belong(self, pair: Pair) -> None:
        peer = await pair.connect()
        before = pair.local.bytes.copy()
        remote = [*pair.remote.memory.spans(0, [4, 5, 1]), *pair.remote.memory.spans(2, [7])]
        local = [*pair.local.memory.spans(0, [2, 9, 10]), *pair.local.memory.spans(2, [0])]
        await peer.read(remote, local, soon())
        assert pair.local.block(0, 2) == pair.remote.block(0, 4)
        assert pair.local.block(0, 9) == pair.remote.block(0, 5)
        assert pair.local.block(0, 10) == pair.remote.block(0, 1)
        assert pair.local.block(2, 0) == pair.remote.block(2, 7)
        for offset, length in local:
            before[offset : offset + length] = pair.local.bytes[offset : offset + length]
        assert (before == pair.local.bytes).all(), "nothing else was written"
        await peer.close()

    async def test_span_lists_may_be_cut_differently(self, pair: Pair) -> None:
        peer = await pair.connect()
        await peer.read([(10, 5), (100, 25)], [(0, 20), (40, 3), (43, 7)], soon())
        expected = pair.remote.bytes[[*range(10, 15), *range(100, 125)]]
        assert (pair.local.bytes[[*range(20), *range(40, 50)]] == expected).all()
        await peer.read([], [], soon())
        await peer.close()

    async def test_many_reads_at_once(self, pair: Pair) -> None:
        peer = await pair.connect()
        spans = [pair.local.memory.spans(layer, [block]) for layer in range(3) for block in range(16)]
        async with asyncio.TaskGroup() as group:
            for span in spans:
                group.create_task(peer.read(span, span, soon()))
        assert (pair.local.bytes == pair.remote.bytes).all()
        await peer.close()

    @pytest.mark.parametrize("span", [(-1, 4), (0, 0), (0, -4), (2**40, 4), (0, 2**40), (2**62, 2**62)])
    async def test_spans_outside_of_the_peer_s_region_are_refused(self, pair: Pair, span: tuple[int, int]) -> None:
        peer = await pair.connect()
        before = pair.local.bytes.copy()
        with pytest.raises(ProtocolError, match=r"region|cannot fill"):
            await peer.read([span], [(0, max(1, min(span[1], 4)))], soon())
        size = pair.remote.memory.num_bytes
        with pytest.raises(ProtocolError, match="region"):
            await peer.read([(size - 3, 4)], [(0, 4)], soon())
        assert (before == pair.local.bytes).all()
        await peer.read([(8, 4)], [(0, 4)], soon())
        assert (pair.local.bytes[:4] == pair.remote.bytes[8:12]).all(), "the connection lives on"
        await peer.close()

    async def test_spans_outside_of_our_region_are_refused(self, pair: Pair) -> None:
        peer = await pair.connect()
        with pytest.raises(ProtocolError, match="own region"):
            await peer.read([(0, 4)], [(pair.local.memory.num_bytes - 3, 4)], soon())
        with pytest.raises(ProtocolError, match="cannot fill"):
            await peer.read([(0, 4)], [(0, 5)], soon())
        await peer.close()

    async def test_large_reads_arrive_whole(self, big: Pair) -> None:
        peer = await big.connect()
        await peer.read(everything(big.remote), everything(big.local), soon(60))
        assert (big.local.bytes == big.remote.bytes).all()
        await peer.close()

    async def test_a_read_given_up_writes_nothing_more(self, big: Pair) -> None:
        peer = await big.connect()
        reading = asyncio.create_task(peer.read(everything(big.remote), everything(big.local), soon(60)))
        await until(lambda: bool((big.local.bytes[:8] == big.remote.bytes[:8]).all()))
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        big.local.bytes[:] = 77
        half = big.local.memory.num_bytes // 2
        await peer.read([(0, 64)], [(half, 64)], soon(60))
        assert (big.local.bytes[half : half + 64] == big.remote.bytes[:64]).all(), "later reads are right"
        big.local.bytes[half : half + 64] = 77
        assert (big.local.bytes == 77).all()
        await peer.close()

    async def test_the_deadline_ends_a_read(self, big: Pair) -> None:
        peer = await big.connect()
        with pytest.raises(TransferTimeout):
            await peer.read(everything(big.remote), everything(big.local), soon(0.0))
        await peer.close()

    async def test_closing_ends_reads_under_way(self, big: Pair) -> None:
        peer = await big.connect()
        reading = asyncio.create_task(peer.read(everything(big.remote), everything(big.local), soon(60)))
        await asyncio.sleep(0)
        await peer.close()
        with pytest.raises(PeerLost):
            await reading

    @pytest.mark.parametrize("description", [{}, {"host": 1, "port": "x"}, {"segments": [[3, "x"]]}])
    async def test_a_senseless_description_is_a_protocol_error(
        self, pair: Pair, description: dict[str, object]
    ) -> None:
        [fabric] = pair.reader.fabrics
        assert not fabric.reachable(description) or "port" in description
        with pytest.raises(ProtocolError):
            await fabric.connect(description, soon())

    async def test_a_peer_that_is_gone(self) -> None:
        pair = self.make_pair()
        description = pair.source.fabrics[0].describe()
        pair.source.close()
        pair.remote.close()
        with pytest.raises(PeerLost):
            await pair.reader.fabrics[0].connect(description, soon())
        pair.close()


def everything(region: BlockRegion) -> list[tuple[int, int]]:
    """All of the region, as one span."""
    return [(0, region.memory.num_bytes)]
