"""The memory in which an engine keeps KV blocks, as plain addresses, so that anything can move its bytes.

The memory may be in several regions (some engines allocate each layer by itself). Offsets count through all of them
as if they lay end to end, so a `Span` is two numbers wherever it is sent.

Owns nothing: the engine's KV cache owns the memory and outlives every user of a `BlockMemory`.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import msgspec

from kvferry.core.errors import ProtocolError
from kvferry.core.layout import KVLayout

Span = tuple[int, int]
"""(offset, length), bytes."""


class LayerPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where a layer's block 0 begins, and how far it is from one block to the next; bytes."""

    offset: int
    stride: int


@dataclass(frozen=True)
class BlockGeometry:
    """Where the blocks of some memory lie."""

    layout: KVLayout
    num_blocks: int
    places: tuple[LayerPlace, ...]

    @classmethod
    def dense(cls, layout: KVLayout, num_blocks: int) -> BlockGeometry:
        """Layer after layer, and within a layer block after block."""
        sizes = [layout.span_bytes(layer) for layer in range(layout.num_layers)]
        offsets = accumulate((num_blocks * size for size in sizes), initial=0)
        return cls(layout, num_blocks, tuple(map(LayerPlace, offsets, sizes)))

    @cached_property
    def span_sizes(self) -> tuple[int, ...]:
        """Bytes of one block, by layer."""
        return tuple(self.layout.span_bytes(layer) for layer in range(self.layout.num_layers))

    def spans(self, layer: int, block_ids: Sequence[int]) -> list[Span]:
        """Where these blocks of this layer lie, in order; neighbours are joined into one span."""
        place, size = self.places[layer], self.span_sizes[layer]
        if place.stride != size:
            return [(place.offset + block_id * place.stride, size) for block_id in block_ids]
        return [(place.offset + first * size, count * size) for first, count in _runs(block_ids)]


@dataclass(frozen=True)
class Region:
    """Memory in one piece. `segment` is the POSIX shared memory that it fills, if it does."""

    address: int
    num_bytes: int
    segment: str | None = None


class AddressMap:
    """From offsets to addresses."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = regions
        self._starts = list(accumulate((region.num_bytes for region in regions), initial=0))

    @property
    def num_bytes(self) -> int:
        """Of all regions."""
        return self._starts[-1]

    def address(self, offset: int, length: int) -> int:
        """Where a span begins. Raises `ProtocolError` unless it lies within one region."""
        index = bisect_right(self._starts, offset) - 1
        if offset < 0 or length <= 0 or index >= len(self._regions) or offset + length > self._starts[index + 1]:
            raise ProtocolError(f"bytes {offset} to {offset + length} lie outside of the region")
        return self._regions[index].address + offset - self._starts[index]


@dataclass(frozen=True)
class BlockMemory:
    """All blocks of one rank. `device` is "cpu", "cuda", or "cuda:1" and so on."""

    geometry: BlockGeometry
    regions: tuple[Region, ...]
    device: str = "cpu"

    @classmethod
    def dense(
        cls, layout: KVLayout, num_blocks: int, address: int, *, device: str = "cpu", segment: str | None = None
    ) -> BlockMemory:
        """One region: layer after layer, and within a layer block after block."""
        region = Region(address, num_blocks * layout.block_bytes, segment)
        return cls(BlockGeometry.dense(layout, num_blocks), (region,), device)

    @property
    def layout(self) -> KVLayout:
        """What the bytes mean."""
        return self.geometry.layout

    @property
    def num_blocks(self) -> int:
        """How many there are."""
        return self.geometry.num_blocks

    @cached_property
    def map(self) -> AddressMap:
        """From offsets to addresses."""
        return AddressMap(self.regions)

    @property
    def num_bytes(self) -> int:
        """Of all regions."""
        return self.map.num_bytes

    def spans(self, layer: int, block_ids: Sequence[int]) -> list[Span]:
        """Where these blocks of this layer lie, in order; neighbours are joined into one span."""
        return self.geometry.spans(layer, block_ids)

    def view(self, span: Span) -> memoryview:
        """A span as writable bytes; host memory only, and no longer than the KV cache lives."""
        assert self.device == "cpu", "device memory has no view"
        offset, length = span
        return memoryview((ctypes.c_char * length).from_address(self.map.address(offset, length))).cast("B")


def _runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of each maximal ascending run."""
    first = count = 0
    for block_id in block_ids:
        if count and block_id == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = block_id, 1
    if count:
        yield first, count
