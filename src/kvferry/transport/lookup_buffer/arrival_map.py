"""Where the blocks that a producer announces come from and go to, and how much of a hand-off is announced.

Pure arithmetic over two geometries; the one place of the lookup buffer that knows that they may differ.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.core.errors import ProtocolError
from kvferry.core.sharding import share
from kvferry.transport.head_spans import cell_tokens, head_spans
from kvferry.transport.lookup_buffer.base import Part
from kvferry.transport.memory import BlockGeometry, Span


class ArrivalMap:
    """One hand-off into our blocks `into`, the first `skip_blocks` of which have their KV. Counts in *cells*, see
    `transport.head_spans`. With `prefix`, the hand-off may be longer than `into`.

    Raises `LayoutMismatch` when the two sides' blocks cannot be made of each other.
    """

    def __init__(
        self,
        key: str,
        remote: BlockGeometry,
        local: BlockGeometry,
        into: Sequence[int],
        skip_blocks: int,
        *,
        prefix: bool = False,
    ) -> None:
        self._prefix = prefix
        self._key, self._remote, self._local, self._into = key, remote, local, into
        self.share = share(local.layout, remote.layout)
        self._cell = cell_tokens(remote, local)
        per_block = local.layout.block_size // self._cell
        self._skip, self._capacity = skip_blocks * per_block, len(into) * per_block
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
