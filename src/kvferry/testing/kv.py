"""Regions of KV blocks with known bytes, and the waits of tests."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.core.blocks.layout import KVLayout, LayerLayout
from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.transport.lookup_buffer.entries import EntryBounds, EntryTable
from kvferry.transport.memory import BlockMemory
from kvferry.transport.shared_memory import SharedSegment


def make_layout(num_layers: int = 3, block_size: int = 4, **changes: Any) -> KVLayout:
    """A small layout, whose layers differ in size."""
    layers = tuple(LayerLayout(2, 8, 8 + 4 * (layer % 2)) for layer in range(num_layers))
    fields: dict[str, Any] = {"model_fingerprint": "m", "layers": layers, "dtype": "float32", "block_size": block_size}
    return KVLayout(**(fields | changes))


class BlockRegion:
    """A region of blocks in a shared segment, and its bytes as numpy sees them."""

    def __init__(self, layout: KVLayout, num_blocks: int, seed: int | None = None) -> None:
        self.segment = SharedSegment.create(num_blocks * layout.block_bytes)
        self.memory = BlockMemory.dense(layout, num_blocks, self.segment.address, segment=self.segment.name)
        if seed is not None:
            self.fill(seed)

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """All bytes of the memory."""
        return np.frombuffer(self.segment.buffer, np.uint8)

    def fill(self, seed: int) -> None:
        """Fill the memory with bytes that follow from the seed."""
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, self.segment.num_bytes, np.uint8)

    def block(self, layer: int, block_id: int) -> builtins.bytes:
        """The bytes of one block of a layer."""
        [(offset, length)] = self.memory.spans(layer, [block_id])
        return self.bytes[offset : offset + length].tobytes()

    def blocks(self, block_ids: list[int]) -> list[list[builtins.bytes]]:
        """The bytes of each of these blocks, by layer."""
        layers = range(self.memory.layout.num_layers)
        return [[self.block(layer, block_id) for block_id in block_ids] for layer in layers]

    def close(self) -> None:
        """Give the memory back."""
        self.segment.close()


def table_for(memory: BlockMemory, bounds: EntryBounds | None = None, clock: Clock | None = None) -> EntryTable:
    """An empty table, for blocks of this memory."""
    return EntryTable(memory.geometry, clock or SYSTEM_CLOCK, bounds or EntryBounds())


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Let the loop run until a condition holds that no event announces."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)


def soon(seconds: float = 10.0) -> float:
    """A deadline, on the running loop's clock."""
    return asyncio.get_running_loop().time() + seconds
