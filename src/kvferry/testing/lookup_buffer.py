"""The contract of lookup buffers. In a package that provides one:

    from kvferry.testing.lookup_buffer import LookupBufferContract

    class TestMyLookupBuffer(LookupBufferContract):
        lookup_buffer = "my_package.my_module:MyLookupBuffer"

Needs pytest and pytest-asyncio.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, ClassVar

import pytest
import pytest_asyncio

from kvferry.core.clock import ManualClock
from kvferry.core.errors import LeakError, LeaseEnded, ProtocolError, TransferTimeout
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.testing.kv import BlockRegion, make_layout, soon, table_for, until
from kvferry.transport.connection import Identity
from kvferry.transport.lookup_buffer.base import (
    LookupBuffer,
    LookupBufferContext,
    Source,
    Taken,
    Want,
    lookup_buffer_class,
)
from kvferry.transport.lookup_buffer.entries import EndReason, EntryBounds, EntryTable
from kvferry.transport.lookup_buffer.messages import Part
from kvferry.transport.options import TransportOptions

NUM_LAYERS = 3
BOUNDS = EntryBounds(lease_s=30, unsealed_s=60, max_keys=4)


class LookupBufferContract:
    """`lookup_buffer`: as in a configuration."""

    pytestmark = pytest.mark.asyncio
    lookup_buffer: ClassVar[str]

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Further options of its configuration. Default: none."""
        return {}

    def build(self, region: BlockRegion, table: EntryTable, number: int) -> tuple[LookupBuffer, Source]:
        """The buffer of the `number`-th instance, and its address for others."""
        identity, config = Identity(f"engine-{number}", region.memory.layout), KVTransferConfig(kv_connector="test")
        options = TransportOptions(lookup_buffer=self.lookup_buffer, **self.options())
        context = LookupBufferContext(config, options, region.memory, identity, "secret", table)
        buffer = lookup_buffer_class(options).build(context)
        address = buffer.address()
        return buffer, Source(address.get("host", ""), address.get("port", 0), identity.engine_id)

    @pytest_asyncio.fixture
    async def ends(self) -> AsyncIterator[BufferEnds]:
        """A producer and a consumer."""
        ends = BufferEnds(self)
        await ends.open()
        yield ends
        for end in (ends.producer, ends.consumer):
            end.table.check()
        await ends.close()

    async def test_what_is_inserted_arrives(self, ends: BufferEnds) -> None:
        ends.produce("k", [4, 2, 9])
        taken = await ends.fetch("k", [7, 8, 0])
        assert (taken.meta, taken.num_bytes) == (b"meta", 3 * ends.remote.memory.layout.block_bytes)
        assert ends.local.blocks([7, 8, 0]) == ends.remote.blocks([4, 2, 9])
        await ends.until_ended("k", "taken")

    async def test_the_meta_is_known_with_the_seal(self, ends: BufferEnds) -> None:
        metas: list[bytes] = []
        ends.produce("k", [4])
        await ends.consumer.drop_select(Want("k", ends.source, [7], soon(), on_sealed=metas.append))
        assert metas == [b"meta"]
        await ends.until_ended("k", "taken")

    async def test_by_key_not_by_order(self, ends: BufferEnds) -> None:
        for key, block in [("a", 1), ("b", 2), ("c", 3)]:
            ends.produce(key, [block])
        for key, block in [("c", 3), ("a", 1), ("b", 2)]:
            await ends.fetch(key, [block])
            assert ends.local.blocks([block]) == ends.remote.blocks([block])

    async def test_layers_flow_while_the_producer_computes(self, ends: BufferEnds) -> None:
        fetching = ends.fetch("k", [0, 1])
        await asyncio.sleep(0)
        ends.producer.table.open("k")
        for first_block, block_id in [(0, 5), (1, 6)]:
            for layer in range(NUM_LAYERS):
                ends.insert("k", first_block, [block_id], range(layer, layer + 1))
                await ends.until_arrived(layer, first_block, block_id)
        assert not fetching.done()
        ends.producer.table.seal("k", b"meta")
        assert (await fetching).meta == b"meta"

    async def test_blocks_that_are_here_already_are_left_alone(self, ends: BufferEnds) -> None:
        before = ends.local.blocks([7, 8])
        ends.producer.table.open("k")
        ends.insert("k", 0, [4])
        ends.insert("k", 1, [2, 9, 3])
        ends.producer.table.seal("k", b"meta")
        taken = await ends.fetch("k", [7, 8, 0, 1], skip_blocks=2)
        assert ends.local.blocks([7, 8]) == before
        assert ends.local.blocks([0, 1]) == ends.remote.blocks([9, 3])
        assert taken.num_bytes == 2 * ends.remote.memory.layout.block_bytes

    async def test_all_blocks_are_here_already(self, ends: BufferEnds) -> None:
        ends.produce("k", [4, 5])
        assert (await ends.fetch("k", [7, 8], skip_blocks=2)).num_bytes == 0
        await ends.until_ended("k", "taken")

    async def test_a_reset_begins_again(self, ends: BufferEnds) -> None:
        fetching = ends.fetch("k", [0, 1])
        ends.producer.table.open("k")
        ends.insert("k", 0, [5, 6])
        await ends.until_arrived(2, 1, 6)
        ends.producer.table.reset("k")
        ends.remote.fill(99)
        ends.insert("k", 0, [10])
        ends.insert("k", 1, [11])
        ends.producer.table.seal("k", b"again")
        assert (await fetching).meta == b"again"
        assert ends.local.blocks([0, 1]) == ends.remote.blocks([10, 11])

    async def test_a_drop_after_everything_was_read_is_no_take(self, ends: BufferEnds) -> None:
        fetching = ends.fetch("k", [0])
        ends.producer.table.open("k")
        ends.insert("k", 0, [5])
        await ends.until_arrived(2, 0, 5)
        ends.producer.table.drop("k")
        with pytest.raises(LeaseEnded, match="withdrew"):
            await fetching
        assert ends.producer.table.end_reason("k") == "dropped"

    async def test_one_of_two_consumers_has_it(self, ends: BufferEnds) -> None:
        region, other = await ends.another_consumer()
        ends.produce("k", [4])
        fetches = [
            ends.fetch("k", [0]),
            asyncio.ensure_future(other.drop_select(Want("k", ends.source, [0], soon()))),
        ]
        results = await asyncio.gather(*fetches, return_exceptions=True)
        assert [type(result) for result in results if not isinstance(result, Taken)] == [LeaseEnded]
        winner = ends.local if isinstance(results[0], Taken) else region
        assert winner.blocks([0]) == ends.remote.blocks([4])

    async def test_too_late(self, ends: BufferEnds) -> None:
        ends.produce("k", [4])
        ends.clock.advance(BOUNDS.lease_s)
        with pytest.raises(LeaseEnded, match="lease"):
            await ends.fetch("k", [0])
        assert ends.producer.table.end_reason("k") == "expired"
        with pytest.raises(LeaseEnded, match="lease"):
            await ends.fetch("k", [0])

    async def test_a_key_that_never_comes(self, ends: BufferEnds) -> None:
        with pytest.raises(TransferTimeout):
            await ends.fetch("k", [0], seconds=0.05)

    @pytest.mark.parametrize("order", ["asked before", "asked after"])
    async def test_a_key_that_was_dropped_or_released_never_comes(self, ends: BufferEnds, order: str) -> None:
        fetches = [ends.fetch("dropped", [0]), ends.fetch("ended", [1])] if order == "asked before" else []
        await asyncio.sleep(0)
        ends.producer.table.drop("dropped")
        assert not ends.producer.table.release("ended")
        fetches = fetches or [ends.fetch("dropped", [0]), ends.fetch("ended", [1])]
        errors = await asyncio.gather(*fetches, return_exceptions=True)
        assert [type(error) for error in errors] == [LeaseEnded] * 2
        assert "withdrew" in str(errors[0])
        assert "released" in str(errors[1])
        ends.producer.table.check()

    async def test_a_consumer_that_cancels_leaves_the_key_to_others(self, ends: BufferEnds) -> None:
        ends.producer.table.open("k")
        ends.insert("k", 0, [4])
        giving_up = ends.fetch("k", [0])
        await ends.until_arrived(2, 0, 4)
        giving_up.cancel()
        await asyncio.gather(giving_up, return_exceptions=True)
        ends.producer.table.seal("k", b"meta")
        ends.local.fill(3)
        await ends.fetch("k", [1])
        assert ends.local.blocks([1]) == ends.remote.blocks([4])

    async def test_a_release_ends_the_lease_at_once(self, ends: BufferEnds) -> None:
        ends.produce("k", [4])
        await ends.consumer.release("k", ends.source, deadline=soon())
        await ends.until_ended("k", "released", "taken")
        with pytest.raises(LeaseEnded, match="released"):
            await ends.fetch("k", [0])

    async def test_the_producer_ends_a_lease_itself(self, ends: BufferEnds) -> None:
        ends.produce("k", [4])
        assert ends.producer.table.release("k")
        assert not ends.producer.table.release("k")
        with pytest.raises(LeaseEnded, match="released"):
            await ends.fetch("k", [0])

    async def test_a_full_buffer_says_so_to_both(self, ends: BufferEnds) -> None:
        for index in range(BOUNDS.max_keys):
            assert ends.producer.table.open(f"k{index}")
        assert not ends.producer.table.open("more")
        with pytest.raises(LeaseEnded, match="full"):
            await ends.fetch("more", [0])
        with pytest.raises(LeakError, match="k0"):
            ends.producer.table.check()
        for index in range(BOUNDS.max_keys):
            ends.producer.table.drop(f"k{index}")

    async def test_blocks_that_were_never_announced_are_missed(self, ends: BufferEnds) -> None:
        ends.producer.table.open("k")
        ends.insert("k", 0, [4])
        ends.insert("k", 1, [5], range(2))
        ends.producer.table.seal("k", b"meta")
        with pytest.raises(ProtocolError, match="missing"):
            await ends.fetch("k", [0, 1])
        ends.producer.table.drop("k")

    async def test_more_blocks_than_expected_are_not_written_anywhere(self, ends: BufferEnds) -> None:
        before = ends.local.bytes.copy()
        ends.produce("k", [4, 5, 6])
        with pytest.raises(ProtocolError, match="prompt must be the same"):
            await ends.fetch("k", [0, 1])
        assert (ends.local.bytes == before).all()
        ends.producer.table.drop("k")

    async def test_many_at_once(self, ends: BufferEnds) -> None:
        fetches = {f"k{index}": ends.fetch(f"k{index}", [index]) for index in range(BOUNDS.max_keys)}
        for index in reversed(range(BOUNDS.max_keys)):
            ends.produce(f"k{index}", [15 - index])
        await asyncio.gather(*fetches.values())
        for index in range(BOUNDS.max_keys):
            assert ends.local.blocks([index]) == ends.remote.blocks([15 - index])

    async def test_a_producer_on_another_thread(self, ends: BufferEnds) -> None:
        fetching = ends.fetch("k", [0, 1])

        def produce() -> None:
            ends.producer.table.open("k")
            for layer in range(NUM_LAYERS):
                ends.insert("k", 0, [8, 3], range(layer, layer + 1))
            ends.producer.table.seal("k", b"meta")

        await asyncio.to_thread(produce)
        await fetching
        assert ends.local.blocks([0, 1]) == ends.remote.blocks([8, 3])


class BufferEnds:
    """A producer, and as many consumers as a test wants, on one loop; the test controls the producer's clock."""

    def __init__(self, contract: LookupBufferContract) -> None:
        self._contract = contract
        self.clock = ManualClock()
        self._regions: list[BlockRegion] = []
        self._stack = AsyncExitStack()

    async def open(self) -> None:
        """Start a producer and a consumer."""
        self.remote = self._region(seed=1)
        self.producer, self.source = await self._start(self.remote, self.clock)
        self.local, self.consumer = await self.another_consumer()

    async def another_consumer(self) -> tuple[BlockRegion, LookupBuffer]:
        """A second consumer, with a region of its own."""
        region = self._region(seed=2)
        return region, (await self._start(region, ManualClock()))[0]

    def _region(self, seed: int) -> BlockRegion:
        self._regions.append(BlockRegion(make_layout(NUM_LAYERS), 16, seed))
        return self._regions[-1]

    async def _start(self, region: BlockRegion, clock: ManualClock) -> tuple[LookupBuffer, Source]:
        buffer, source = self._contract.build(region, table_for(region.memory, BOUNDS, clock), len(self._regions))
        await self._stack.enter_async_context(running(buffer))
        return buffer, source

    async def close(self) -> None:
        """Close all buffers and regions."""
        await self._stack.aclose()
        for region in self._regions:
            region.close()

    def insert(self, key: str, first_block: int, block_ids: list[int], layers: range = range(NUM_LAYERS)) -> bool:
        """Announce blocks of these layers."""
        return self.producer.table.insert(key, Part(layers.start, len(layers), first_block, block_ids))

    def produce(self, key: str, block_ids: list[int]) -> None:
        """Announce all of a hand-off."""
        assert self.producer.table.open(key)
        self.insert(key, 0, block_ids)
        self.producer.table.seal(key, b"meta")

    def fetch(self, key: str, into: list[int], skip_blocks: int = 0, seconds: float = 20) -> asyncio.Task[Taken]:
        """A task that takes the key's blocks."""
        fetching = self.consumer.drop_select(Want(key, self.source, into, soon(seconds), skip_blocks))
        return asyncio.ensure_future(fetching)

    async def until_ended(self, key: str, *reasons: EndReason) -> None:
        """Wait until the producer knows that the key has ended; fails unless for one of these reasons."""
        await until(lambda: self.producer.table.ended([key]) == [key])
        assert self.producer.table.end_reason(key) in reasons

    async def until_arrived(self, layer: int, local: int, remote: int) -> None:
        """Wait until a block of a layer has arrived."""
        await until(lambda: self.local.block(layer, local) == self.remote.block(layer, remote))


@asynccontextmanager
async def running(buffer: LookupBuffer) -> AsyncIterator[None]:
    """Run the buffer while the body runs."""
    task = asyncio.create_task(buffer.run())
    await asyncio.sleep(0)
    try:
        yield
    finally:
        task.cancel()
        results = await asyncio.gather(task, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results), results
