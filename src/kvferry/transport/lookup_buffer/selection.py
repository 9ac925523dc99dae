"""One `drop_select` on the consumer's side: the announced parts, their destinations, the progress of reads, and the
take.

Owns the state of one hand-off's arrival, on the transfer loop. It does not know how updates arrive or how bytes are
read.

Two sides whose blocks differ in size, or whose ranks hold different heads, have the same logical tensor,
`[tokens, kv_heads, K then V, dim]`. Cut into *cells* of as many tokens as the smaller block holds, it has one order on
both sides: cell by cell, in a cell head by head, and of each head K before V. Within a cell, K of one head is
contiguous on either side, and so is V.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from kvferry.core.blocks.layout import DTYPE_BYTES
from kvferry.core.blocks.sharding import share
from kvferry.core.errors import ChecksumMismatch, KvferryError, LeaseEnded, ProtocolError
from kvferry.transport.lookup_buffer.base import Taken, Want
from kvferry.transport.lookup_buffer.messages import KeyUpdate, Part
from kvferry.transport.memory import BlockGeometry, Numbers, Span
from kvferry.transport.transfer_loop import translated

ReadSpans = Callable[[Sequence[Span], Sequence[Span]], Awaitable[None]]
"""Fills local spans (second) with remote ones (first). Raises `ChecksumMismatch` if the bytes differ from the
producer's."""
TakeGeneration = Callable[[int], None]
"""Sends the `Take` of a generation; the answer arrives as an update."""

END_MESSAGES = {
    "taken": "another consumer has taken it",
    "released": "it was released",
    "expired": "its lease was over",
    "dropped": "the producer withdrew it",
    "full": "the producer's buffer is full (kv_buffer_size)",
}


class ArrivalMap:
    """The source and destination of announced blocks, and the announced share of a hand-off: arithmetic over two
    geometries, in cells. Raises `LayoutMismatch` if the producer's blocks cannot be converted."""

    def __init__(self, want: Want, remote: BlockGeometry, local: BlockGeometry) -> None:
        self._want, self._remote, self._local = want, remote, local
        self.share = share(local.layout, remote.layout)
        self._cell = min(remote.layout.block_size, local.layout.block_size)
        cells_per_block = local.layout.block_size // self._cell
        self._skip, self._capacity = want.skip_blocks * cells_per_block, len(want.into) * cells_per_block
        self._per_remote = remote.layout.block_size // self._cell
        self.clear()

    def clear(self) -> None:
        """Forget all announcements."""
        self._covered = [bytearray(self._capacity) for _ in range(self._local.layout.num_layers)]

    def cover(self, part: Part) -> None:
        """Record a part. Raises `ProtocolError` if it cannot belong to this hand-off."""
        key, end_layer = self._want.key, part.first_layer + part.num_layers
        end_block = part.first_block + len(part.block_ids)
        if not 0 <= part.first_layer < end_layer <= len(self._covered) or part.first_block < 0:
            raise ProtocolError(f"hand-off {key!r} announces layers or blocks that do not exist")
        is_too_long = part.block_ids and (end_block - 1) * self._per_remote >= self._capacity
        if is_too_long and not self._want.prefix:
            raise ProtocolError(
                f"hand-off {key!r} has at least {end_block} blocks of {self._remote.layout.block_size} tokens,"
                f" this request {len(self._want.into)} of {self._local.layout.block_size}:"
                " the prompt must be the same on both instances"
            )
        if any(not 0 <= block_id < self._remote.num_blocks for block_id in part.block_ids):
            raise ProtocolError(f"hand-off {key!r} announces blocks outside of the producer's memory")
        cells = self._cells_of(part)
        for layer in range(part.first_layer, end_layer):
            self._covered[layer][cells.start : cells.stop] = b"\x01" * len(cells)

    def num_tokens(self) -> int:
        """Number of leading tokens that all layers have. Raises `ProtocolError` if there are gaps."""
        ends = {covered.find(0) for covered in self._covered}
        end = ends.pop()
        end = self._capacity if end < 0 else end
        if ends or (end == 0 and self._capacity) or any(1 in covered[end:] for covered in self._covered):
            raise ProtocolError(f"hand-off {self._want.key!r} was sealed with blocks missing")
        return end * self._cell

    def spans(self, part: Part, layer: int) -> tuple[list[Span], list[Span]]:
        """The source and destination of a part's bytes of a layer: (remote, local). Blocks that have their KV already,
        and heads of other ranks, are left out."""
        local_cells, heads = self._cells_of(part), self.share.heads[layer]
        local_cells = range(max(local_cells.start, self._skip), local_cells.stop)
        begin = part.first_block * self._per_remote
        remote_cells = range(local_cells.start - begin, local_cells.stop - begin)
        return (
            head_spans(self._remote, layer, part.block_ids, remote_cells, self._cell, heads),
            head_spans(self._local, layer, self._want.into, local_cells, self._cell, heads),
        )

    def _cells_of(self, part: Part) -> range:
        begin = part.first_block * self._per_remote
        end = begin + len(part.block_ids) * self._per_remote
        return range(min(begin, self._capacity), min(end, self._capacity))


class Selection:
    """The arrival of one hand-off: `on_update` gets the producer's updates, while `load` reads."""

    max_batch_spans = 2**16
    """Unread parts are read together up to this size, in one round trip."""
    max_batch_bytes = 32 * 2**20

    def __init__(self, want: Want, remote: BlockGeometry, local: BlockGeometry) -> None:
        self.key, self._on_sealed = want.key, want.on_sealed
        self._map = ArrivalMap(want, remote, local)
        self.share = self._map.share
        self._generation = -1
        self._unread: deque[tuple[Part, int]] = deque()
        self._num_bytes = 0
        self._meta: bytes | None = None
        self._is_take_sent = self._is_acknowledged = False
        self._error: KvferryError | None = None
        self._changed = asyncio.Event()

    def on_update(self, update: KeyUpdate | KvferryError) -> None:
        """Handle an update of the producer, or the error after which there will be none."""
        try:
            if isinstance(update, KvferryError):
                raise update
            self._record(update)
        except Exception as error:  # noqa: BLE001 - ends this hand-off, not the others on its connection
            self._error = self._error or translated(error)
        self._changed.set()

    def on_news(self, update: KeyUpdate | KvferryError) -> None:
        """Deprecated name of `on_update`."""
        self.on_update(update)

    def _record(self, update: KeyUpdate) -> None:
        if update.take_confirmed:
            self._is_acknowledged |= self._is_take_sent and update.generation == self._generation
        elif update.end_reason:
            if not self._is_acknowledged:
                raise LeaseEnded(
                    f"hand-off {self.key!r} is over: {END_MESSAGES.get(update.end_reason, update.end_reason)}"
                )
        else:
            self._on_announced(update)

    def _on_announced(self, update: KeyUpdate) -> None:
        if update.generation != self._generation:  # the producer began again: earlier reads are void
            self._generation = update.generation
            self._unread.clear()
            self._map.clear()
            self._meta, self._is_take_sent, self._num_bytes = None, False, 0
        for part in update.parts:
            self._map.cover(part)
            self._unread.extend((part, layer) for layer in range(part.first_layer, part.first_layer + part.num_layers))
        if update.meta is not None:
            self._meta = update.meta
            self._on_sealed(update.meta)

    async def load(self, read: ReadSpans, take: TakeGeneration, fabric: str) -> Taken:
        """Read the announced parts until everything has arrived and is acknowledged. Raises as `drop_select`."""
        loop = asyncio.get_running_loop()
        started, num_tokens = None, 0
        while not self._is_acknowledged:
            if self._error is not None:
                raise self._error
            if self._unread:
                started = started or loop.time()
                await self._read_batch(read)
            elif self._meta is not None and not self._is_take_sent:
                num_tokens = self._map.num_tokens()
                self._is_take_sent = True
                take(self._generation)
            else:
                await self._changed.wait()
                self._changed.clear()
        seconds = 0.0 if started is None else loop.time() - started
        return Taken(self._meta or b"", self._num_bytes, seconds, fabric, num_tokens)

    async def _read_batch(self, read: ReadSpans) -> None:
        generation, remote, local = self._generation, list[Span](), list[Span]()
        num_bytes = 0
        while self._unread and num_bytes < self.max_batch_bytes and len(remote) + len(local) < self.max_batch_spans:
            remote_spans, local_spans = self._map.spans(*self._unread.popleft())
            remote += remote_spans
            local += local_spans
            num_bytes += sum(length for _, length in local_spans)
        try:
            if local:
                await read(remote, local)
        except ChecksumMismatch:
            if generation == self._generation and self._error is None:
                raise
        if generation == self._generation:  # else the producer began again meanwhile: the read is void
            self._num_bytes += num_bytes


def head_spans(
    geometry: BlockGeometry, layer: int, block_ids: Sequence[int], cells: range, cell: int, heads: range
) -> list[Span]:
    """The spans of `cells` (of `cell` tokens each, counted from the first of `block_ids`) of `heads`, in the common
    order.

    Adjacent ones are joined. `heads` are numbered as in the whole model. An opaque packing is read in whole blocks.
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
    """Offsets and lengths of K and V, by cell and head: each `[cells * heads * 2]`."""
    layout, layer_place = geometry.layout, geometry.places[layer]
    spec, block_size = layout.layers[layer], layout.block_size
    key_bytes, value_bytes = (dim * DTYPE_BYTES[layout.dtype] for dim in (spec.key_dim, spec.value_dim))
    cell_indices = np.arange(cells.start, cells.stop, dtype=np.int64)
    blocks = np.asarray(block_ids, dtype=np.int64)[cell_indices * cell // block_size]
    slots = cell_indices * cell % block_size
    local_heads = np.arange(heads.start, heads.stop, dtype=np.int64) - spec.first_kv_head
    starts = layer_place.offset + blocks[:, None] * layer_place.stride + local_heads[None, :] * layout.head_bytes(layer)
    keys = starts + slots[:, None] * key_bytes
    values = starts + block_size * key_bytes + slots[:, None] * value_bytes
    offsets = np.stack([keys, values], axis=-1)
    lengths = np.broadcast_to(np.array([cell * key_bytes, cell * value_bytes], dtype=np.int64), offsets.shape)
    return offsets.reshape(-1), lengths.reshape(-1)


def _joined(offsets: Numbers, lengths: Numbers) -> list[Span]:
    """Pieces as spans: adjacent ones joined, empty ones left out."""
    is_filled = lengths > 0
    offsets, lengths = offsets[is_filled], lengths[is_filled]
    if not len(offsets):
        return []
    begins = np.flatnonzero(np.concatenate([[True], offsets[1:] != offsets[:-1] + lengths[:-1]]))
    return list(zip(offsets[begins].tolist(), np.add.reduceat(lengths, begins).tolist(), strict=True))
