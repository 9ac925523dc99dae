"""Where the blocks that a producer announces come from and go to, and how much of a hand-off is announced.

Pure arithmetic over two geometries; the one place of the lookup buffer that knows that they may differ.

Two sides whose blocks differ in size, or whose ranks hold different heads, have the same logical tensor,
`[tokens, kv_heads, K then V, dim]`. Cut into *cells* of as many tokens as the smaller block holds, its bytes come in
one order on both sides: cell after cell, in a cell head after head, of each head K and then V. Within a cell, K of
one head is contiguous on either side, and so is V.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvferry.core.errors import ProtocolError
from kvferry.core.layout import DTYPE_BYTES
from kvferry.core.sharding import share
from kvferry.transport.lookup_buffer.base import Want
from kvferry.transport.lookup_buffer.messages import Part
from kvferry.transport.memory import BlockGeometry, Numbers, Span


class ArrivalMap:
    """Of one hand-off. Counts in cells. Raises `LayoutMismatch` when our blocks cannot be made of the producer's."""

    def __init__(self, want: Want, remote: BlockGeometry, local: BlockGeometry) -> None:
        self._key, self._into, self._prefix = want.key, want.into, want.prefix
        self._remote, self._local = remote, local
        self.share = share(local.layout, remote.layout)
        self._cell = min(remote.layout.block_size, local.layout.block_size)
        per_block = local.layout.block_size // self._cell
        self._skip, self._capacity = want.skip_blocks * per_block, len(want.into) * per_block
        self._per_remote = remote.layout.block_size // self._cell
        self.clear()

    def clear(self) -> None:
        """Nothing is announced."""
        self._covered = [bytearray(self._capacity) for _ in range(self._local.layout.num_layers)]

    def cover(self, part: Part) -> None:
        """Note what a part brings. Raises `ProtocolError` when it cannot be part of this hand-off."""
        end_layer, end_block = part.first_layer + part.num_layers, part.first_block + len(part.block_ids)
        if not 0 <= part.first_layer < end_layer <= len(self._covered) or part.first_block < 0:
            raise ProtocolError(f"hand-off {self._key!r} announces layers or blocks that do not exist")
        too_long = part.block_ids and (end_block - 1) * self._per_remote >= self._capacity
        if too_long and not self._prefix:
            raise ProtocolError(
                f"hand-off {self._key!r} has at least {end_block} blocks of {self._remote.layout.block_size} tokens,"
                f" this request {len(self._into)} of {self._local.layout.block_size}:"
                " the prompt must be the same on both instances"
            )
        if any(not 0 <= block_id < self._remote.num_blocks for block_id in part.block_ids):
            raise ProtocolError(f"hand-off {self._key!r} announces blocks outside of the producer's memory")
        cells = self._cells_of(part)
        for layer in range(part.first_layer, end_layer):
            self._covered[layer][cells.start : cells.stop] = b"\x01" * len(cells)

    def num_tokens(self) -> int:
        """How many tokens, from the first, all layers cover. Raises `ProtocolError` when there are gaps."""
        ends = {covered.find(0) for covered in self._covered}
        end = ends.pop()
        end = self._capacity if end < 0 else end
        if ends or (end == 0 and self._capacity) or any(1 in covered[end:] for covered in self._covered):
            raise ProtocolError(f"hand-off {self._key!r} was sealed with blocks missing")
        return end * self._cell

    def spans(self, part: Part, layer: int) -> tuple[list[Span], list[Span]]:
        """Where the part's bytes of a layer come from and go to, without what is here already or another rank's."""
        cells, heads = self._cells_of(part), self.share.heads[layer]
        cells = range(max(cells.start, self._skip), cells.stop)
        begin = part.first_block * self._per_remote
        theirs = range(cells.start - begin, cells.stop - begin)
        return (
            head_spans(self._remote, layer, part.block_ids, theirs, self._cell, heads),
            head_spans(self._local, layer, self._into, cells, self._cell, heads),
        )

    def _cells_of(self, part: Part) -> range:
        begin = part.first_block * self._per_remote
        end = begin + len(part.block_ids) * self._per_remote
        return range(min(begin, self._capacity), min(end, self._capacity))


def head_spans(
    geometry: BlockGeometry, layer: int, block_ids: Sequence[int], cells: range, cell: int, heads: range
) -> list[Span]:
    """Where `cells` (of `cell` tokens, counted from the first of `block_ids`) of `heads` lie, in the common order.

    Neighbours are joined. `heads` are numbered as in the whole model, and held here. Spans of an opaque packing are
    whole blocks.
    """
    layout = geometry.layout
    all_heads = layout.is_opaque or len(heads) == layout.layers[layer].num_kv_heads
    if not cells or not (heads or layout.is_opaque):
        return []
    if cell == layout.block_size and all_heads:
        return geometry.spans(layer, block_ids[cells.start : cells.stop])
    return _joined(*_pieces(geometry, layer, block_ids, cells, cell, heads))


def _pieces(
    geometry: BlockGeometry, layer: int, block_ids: Sequence[int], cells: range, cell: int, heads: range
) -> tuple[Numbers, Numbers]:
    """Offset and length of K and of V, by cell and head: each `[cells * heads * 2]`."""
    layout, place = geometry.layout, geometry.places[layer]
    spec, block_size = layout.layers[layer], layout.block_size
    key_bytes, value_bytes = (dim * DTYPE_BYTES[layout.dtype] for dim in (spec.key_dim, spec.value_dim))
    numbers = np.arange(cells.start, cells.stop, dtype=np.int64)
    blocks = np.asarray(block_ids, dtype=np.int64)[numbers * cell // block_size]
    slots = numbers * cell % block_size
    local_heads = np.arange(heads.start, heads.stop, dtype=np.int64) - spec.first_kv_head
    starts = place.offset + blocks[:, None] * place.stride + local_heads[None, :] * layout.head_bytes(layer)
    keys = starts + slots[:, None] * key_bytes
    values = starts + block_size * key_bytes + slots[:, None] * value_bytes
    offsets = np.stack([keys, values], axis=-1)
    lengths = np.broadcast_to(np.array([cell * key_bytes, cell * value_bytes], dtype=np.int64), offsets.shape)
    return offsets.reshape(-1), lengths.reshape(-1)


def _joined(offsets: Numbers, lengths: Numbers) -> list[Span]:
    """Pieces as spans, neighbours as one, empty ones left out."""
    some = lengths > 0
    offsets, lengths = offsets[some], lengths[some]
    if not len(offsets):
        return []
    begins = np.flatnonzero(np.concatenate([[True], offsets[1:] != offsets[:-1] + lengths[:-1]]))
    return list(zip(offsets[begins].tolist(), np.add.reduceat(lengths, begins).tolist(), strict=True))
