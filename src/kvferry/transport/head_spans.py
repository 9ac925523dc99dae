"""Where some heads of some tokens lie in memory, in an order that is the same for every layout.

Two sides whose blocks differ in size, or whose ranks hold different heads, have the same logical tensor,
`[tokens, kv_heads, K then V, dim]`. Cut into *cells* of as many tokens as the smaller block holds, its bytes come in
one order on both sides: cell after cell, in a cell head after head, of each head K and then V. Within a cell, K of
one head is contiguous on either side, and so is V.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvferry.core.layout import DTYPE_BYTES
from kvferry.transport.memory import BlockGeometry, Span

Offsets = npt.NDArray[np.int64]


def cell_tokens(one: BlockGeometry, other: BlockGeometry) -> int:
    """Tokens in a cell of these two; their block sizes divide each other."""
    return min(one.layout.block_size, other.layout.block_size)


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
) -> tuple[Offsets, Offsets]:
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


def _joined(offsets: Offsets, lengths: Offsets) -> list[Span]:
    """Pieces as spans, neighbours as one, empty ones left out."""
    some = lengths > 0
    offsets, lengths = offsets[some], lengths[some]
    if not len(offsets):
        return []
    begins = np.flatnonzero(np.concatenate([[True], offsets[1:] != offsets[:-1] + lengths[:-1]]))
    return list(zip(offsets[begins].tolist(), np.add.reduceat(lengths, begins).tolist(), strict=True))
