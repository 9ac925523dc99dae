"""The memory in which an engine keeps KV blocks, as plain addresses, so that anything can move its bytes.

The memory may be in several regions (some engines allocate each layer by itself). Offsets count through all of them
as if they lay end to end, so a `Span` is two numbers wherever it is sent. A read of one hand-off is thousands of spans,
and what Python does for each would cost as much as copying a small block: so two lists of spans are joined into one of
`Pieces`, each contiguous on both sides, as arrays.

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

from kvferry.core.errors import ProtocolError
from kvferry.core.layout import KVLayout

Span = tuple[int, int]
"""(offset, length), bytes."""
Numbers = NDArray[np.int64]


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


class RegionMap:
    """From spans to addresses in some regions: the one place where spans, which a peer may have sent, are checked.

    `whose` names the regions' owner in errors.
    """

    def __init__(self, regions: Sequence[Region], whose: str) -> None:
        self.whose = whose
        sizes = [region.num_bytes for region in regions]
        self.num_bytes = sum(sizes)
        self._ends = np.fromiter(accumulate(sizes), np.int64, len(sizes))
        starts = self._ends - np.array(sizes, np.int64)
        self._shifts = np.array([region.address for region in regions], np.int64) - starts

    def locate(self, offsets: Numbers, lengths: Numbers) -> Numbers:
        """The spans' addresses. Raises `ProtocolError` unless each span lies within one region."""
        inside = (offsets >= 0) & (lengths > 0) & (lengths <= self.num_bytes) & (offsets < self.num_bytes)
        if inside.all():
            regions = np.searchsorted(self._ends, offsets, side="right")
            inside = offsets + lengths <= self._ends[regions]
        if not inside.all():
            first = int(np.argmin(inside))
            offset, length = int(offsets[first]), int(lengths[first])
            raise ProtocolError(
                f"bytes {offset} to {offset + length} lie outside of the {self.whose} region of {self.num_bytes}"
            )
        located: Numbers = offsets + self._shifts[regions]
        return located


def columns(spans: Sequence[Span]) -> tuple[Numbers, Numbers]:
    """(offsets, lengths). Raises `ProtocolError` on a number too large for any region."""
    try:
        flat = np.fromiter(chain.from_iterable(spans), np.int64, 2 * len(spans))
    except OverflowError as error:  # numbers from a peer
        raise ProtocolError("a span beyond any region") from error
    return flat[0::2], flat[1::2]


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
    def map(self) -> RegionMap:
        """From spans to addresses."""
        return RegionMap(self.regions, "own")

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
        [address] = self.map.locate(*columns([span])).tolist()
        return memoryview((ctypes.c_char * span[1]).from_address(address)).cast("B")


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


ANYWHERE = RegionMap([Region(0, 2**62)], "peer's")
"""Where spans are that only their owner can place: an offset is its own address."""


@dataclass(frozen=True)
class Pieces:
    """Piece i is the `lengths[i]` bytes at `remote[i]`, which go to `local[i]`; addresses."""

    remote: Numbers
    local: Numbers
    lengths: Numbers

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """(remote, local, length), one by one."""
        return zip(self.remote.tolist(), self.local.tolist(), self.lengths.tolist(), strict=True)

    def slices(self, num_bytes: int, num_pieces: int) -> Iterator[Pieces]:
        """In order, with at most so many pieces each, and bytes (but one piece goes through whole)."""
        ends = np.cumsum(self.lengths)
        start = done = 0
        while start < len(self):
            fitting = int(np.searchsorted(ends, done + num_bytes, side="right"))
            end = min(max(fitting, start + 1), start + num_pieces)
            yield Pieces(self.remote[start:end], self.local[start:end], self.lengths[start:end])
            start, done = end, int(ends[end - 1])


def join(
    remote: Sequence[Span], remote_map: RegionMap, local: Sequence[Span], local_map: RegionMap, largest: int
) -> Pieces:
    """The pieces of at most `largest` bytes that fill `local` with `remote`.

    Raises `ProtocolError` when a span lies outside, or when one side has more bytes than the other.
    """
    (remote_offsets, remote_lengths), (local_offsets, local_lengths) = columns(remote), columns(local)
    remote_starts = remote_map.locate(remote_offsets, remote_lengths)
    local_starts = local_map.locate(local_offsets, local_lengths)
    if len(remote) == len(local) and (remote_lengths == local_lengths).all():
        pieces = Pieces(remote_starts, local_starts, local_lengths)
    else:
        pieces = _cut(remote_starts, remote_lengths, local_starts, local_lengths)
    return _split(pieces, largest) if len(pieces) and int(pieces.lengths.max()) > largest else pieces


def _cut(remote_starts: Numbers, remote_lengths: Numbers, local_starts: Numbers, local_lengths: Numbers) -> Pieces:
    """Cut both sides wherever either is cut."""
    remote_ends, local_ends = np.cumsum(remote_lengths), np.cumsum(local_lengths)
    num_remote, num_local = (int(ends[-1]) if len(ends) else 0 for ends in (remote_ends, local_ends))
    if num_remote != num_local:
        raise ProtocolError(f"{num_remote} bytes cannot fill {num_local}")
    ends = np.union1d(remote_ends, local_ends)
    lengths = np.diff(ends, prepend=0)

    def addresses(starts: Numbers, side_ends: Numbers) -> Numbers:
        last = np.searchsorted(side_ends, ends, side="left")
        found: Numbers = starts[last] + np.diff(side_ends, prepend=0)[last] - (side_ends[last] - ends) - lengths
        return found

    return Pieces(addresses(remote_starts, remote_ends), addresses(local_starts, local_ends), lengths)


def _split(pieces: Pieces, largest: int) -> Pieces:
    counts = -(-pieces.lengths // largest)
    number = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    skipped = number * largest
    lengths = np.minimum(np.repeat(pieces.lengths, counts) - skipped, largest)
    return Pieces(np.repeat(pieces.remote, counts) + skipped, np.repeat(pieces.local, counts) + skipped, lengths)
