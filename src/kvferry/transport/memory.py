"""The memory in which an engine keeps KV blocks, as plain addresses, so that any transport can move its bytes.

The memory may consist of several regions (some engines allocate each layer by itself). Offsets count through all of
them as if they were contiguous, so a `Span` is always two numbers. A read may have thousands of spans, and work in
Python for each would cost as much as copying a small block: so two lists of spans become arrays of `Pieces`, each of
which is contiguous on both sides.

Owns nothing: the engine's KV cache owns the memory and outlives every user of a `BlockMemory`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.core.blocks.layout import KVLayout
from kvferry.core.errors import ProtocolError

Span = tuple[int, int]
"""(offset, length), bytes."""
Numbers = NDArray[np.int64]
HIGHEST_ADDRESS = 2**62


class LayerPlace(msgspec.Struct, frozen=True, array_like=True):
    """Offset of a layer's block 0, and distance from one block to the next; bytes."""

    offset: int
    stride: int


@dataclass(frozen=True)
class BlockGeometry:
    """The positions of a rank's blocks in its memory."""

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
        """The spans of these blocks of this layer, in order; adjacent ones are joined."""
        layer_place, size = self.places[layer], self.span_sizes[layer]
        if layer_place.stride != size:
            return [(layer_place.offset + block_id * layer_place.stride, size) for block_id in block_ids]
        return [(layer_place.offset + first * size, count * size) for first, count in _runs(block_ids)]


@dataclass(frozen=True)
class Region:
    """A contiguous range of memory. `segment`: name of the shared memory segment that it fills, if any."""

    address: int
    num_bytes: int
    segment: str | None = None


class RegionMap:
    """Translates spans to addresses. Spans, which a peer may have sent, are checked only by this class. `owner` names
    the regions' owner in errors."""

    def __init__(self, regions: Sequence[Region], owner: str) -> None:
        """Raises `ProtocolError` for impossible regions, which a peer may have described."""
        self.owner = owner
        if any(region.address < 0 or region.num_bytes < 0 for region in regions):
            raise ProtocolError(f"the {owner} regions have negative addresses or sizes")
        self.num_bytes = sum(region.num_bytes for region in regions)
        if max((self.num_bytes, *(region.address + region.num_bytes for region in regions))) > HIGHEST_ADDRESS:
            raise ProtocolError(f"the {owner} regions reach beyond any address")
        sizes = np.array([region.num_bytes for region in regions], np.int64)
        self._ends = np.cumsum(sizes)
        self._shifts = np.array([region.address for region in regions], np.int64) - (self._ends - sizes)

    def locate(self, offsets: Numbers, lengths: Numbers) -> Numbers:
        """The spans' addresses. Raises `ProtocolError` unless each span lies within one region."""
        is_inside = (offsets >= 0) & (lengths > 0) & (lengths <= self.num_bytes) & (offsets < self.num_bytes)
        if is_inside.all():
            regions = np.searchsorted(self._ends, offsets, side="right")
            is_inside = offsets + lengths <= self._ends[regions]
        if not is_inside.all():
            first = int(np.argmin(is_inside))
            offset, length = int(offsets[first]), int(lengths[first])
            raise ProtocolError(
                f"bytes {offset} to {offset + length} lie outside of the {self.owner} region of {self.num_bytes}"
            )
        addresses: Numbers = offsets + self._shifts[regions]
        return addresses


def columns(spans: Sequence[Span]) -> tuple[Numbers, Numbers]:
    """(offsets, lengths). Raises `ProtocolError` for a number that is too large for any region."""
    try:
        flat = np.fromiter(chain.from_iterable(spans), np.int64, 2 * len(spans))
    except OverflowError as error:  # numbers from a peer
        raise ProtocolError("a span outside of every region") from error
    return flat[0::2], flat[1::2]


@dataclass(frozen=True)
class BlockMemory:
    """All blocks of one rank. `device`: "cpu", "cuda", "cuda:1", …"""

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
        """The layout of the bytes."""
        return self.geometry.layout

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return self.geometry.num_blocks

    @cached_property
    def map(self) -> RegionMap:
        """Translates spans of this memory to addresses."""
        return RegionMap(self.regions, "own")

    @property
    def num_bytes(self) -> int:
        """The size of all regions."""
        return self.map.num_bytes

    def spans(self, layer: int, block_ids: Sequence[int]) -> list[Span]:
        """The spans of these blocks of this layer, in order; adjacent ones are joined."""
        return self.geometry.spans(layer, block_ids)

    def view(self, span: Span) -> memoryview:
        """A span as writable bytes, valid as long as the KV cache exists; host memory only."""
        assert self.device == "cpu", "device memory has no view"
        [address] = self.map.locate(*columns([span])).tolist()
        return memoryview((ctypes.c_char * span[1]).from_address(address)).cast("B")

    def block_views(self, layer: int, block_ids: Sequence[int]) -> list[memoryview]:
        """A `view` of each of these blocks of this layer, in order; all are located at once."""
        assert self.device == "cpu", "device memory has no view"
        kind = ctypes.c_char * self.geometry.span_sizes[layer]
        addresses = self.block_addresses(layer, block_ids).tolist()
        return [memoryview(kind.from_address(address)).cast("B") for address in addresses]

    def block_addresses(self, layer: int, block_ids: Sequence[int]) -> Numbers:
        """The address of each of these blocks of this layer, in order."""
        layer_place, size = self.geometry.places[layer], self.geometry.span_sizes[layer]
        offsets = layer_place.offset + np.array(block_ids, np.int64) * layer_place.stride
        return self.map.locate(offsets, np.full_like(offsets, size))


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


ANYWHERE = RegionMap([Region(0, HIGHEST_ADDRESS)], "peer's")
"""A map for spans that only their owner can translate: an offset is its own address."""


@dataclass(frozen=True)
class Pieces:
    """Piece i: `lengths[i]` bytes at address `remote[i]`, to be copied to address `local[i]`."""

    remote: Numbers
    local: Numbers
    lengths: Numbers

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """(remote, local, length), one by one."""
        return zip(self.remote.tolist(), self.local.tolist(), self.lengths.tolist(), strict=True)

    def divided(self, max_bytes: int) -> Pieces:
        """The same in pieces of at most `max_bytes` bytes."""
        return _split(self, max_bytes) if len(self) and int(self.lengths.max()) > max_bytes else self

    def slices(self, num_bytes: int, num_pieces: int) -> Iterator[Pieces]:
        """Parts of at most `num_pieces` pieces and `num_bytes` bytes, in order. A single piece is not divided."""
        ends = np.cumsum(self.lengths)
        start = num_done = 0
        while start < len(self):
            fitting = int(np.searchsorted(ends, num_done + num_bytes, side="right"))
            end = min(max(fitting, start + 1), start + num_pieces)
            yield Pieces(self.remote[start:end], self.local[start:end], self.lengths[start:end])
            start, num_done = end, int(ends[end - 1])


def join(
    remote: Sequence[Span], remote_map: RegionMap, local: Sequence[Span], local_map: RegionMap, max_bytes: int
) -> Pieces:
    """The pieces of at most `max_bytes` bytes that fill `local` with `remote`.

    Raises `ProtocolError` if a span lies outside of its region, or if the two sides differ in size.
    """
    (remote_offsets, remote_lengths), (local_offsets, local_lengths) = columns(remote), columns(local)
    remote_starts = remote_map.locate(remote_offsets, remote_lengths)
    local_starts = local_map.locate(local_offsets, local_lengths)
    if len(remote) == len(local) and (remote_lengths == local_lengths).all():
        pieces = Pieces(remote_starts, local_starts, local_lengths)
    else:
        pieces = _cut(remote_starts, remote_lengths, local_starts, local_lengths)
    return pieces.divided(max_bytes)


def _cut(remote_starts: Numbers, remote_lengths: Numbers, local_starts: Numbers, local_lengths: Numbers) -> Pieces:
    """Pieces of sides that are cut differently: both are cut wherever either is."""
    remote_ends, local_ends = np.cumsum(remote_lengths), np.cumsum(local_lengths)
    num_remote, num_local = (int(ends[-1]) if len(ends) else 0 for ends in (remote_ends, local_ends))
    if num_remote != num_local:
        raise ProtocolError(f"{num_remote} bytes cannot fill {num_local}")
    ends = np.union1d(remote_ends, local_ends)
    lengths = np.diff(ends, prepend=0)

    def addresses(starts: Numbers, side_ends: Numbers) -> Numbers:
        last = np.searchsorted(side_ends, ends, side="left")
        located: Numbers = starts[last] + np.diff(side_ends, prepend=0)[last] - (side_ends[last] - ends) - lengths
        return located

    return Pieces(addresses(remote_starts, remote_ends), addresses(local_starts, local_ends), lengths)


def _split(pieces: Pieces, max_bytes: int) -> Pieces:
    counts = -(-pieces.lengths // max_bytes)
    index = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    offset = index * max_bytes
    lengths = np.minimum(np.repeat(pieces.lengths, counts) - offset, max_bytes)
    return Pieces(np.repeat(pieces.remote, counts) + offset, np.repeat(pieces.local, counts) + offset, lengths)
