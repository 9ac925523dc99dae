"""The file that holds one block.

    offset  bytes  what
    0       8      magic
    8       2      version
    10      8      codec, ASCII; "none"
    18      2      reserved, 0
    20      4      number of layers, L
    24      8      payload length
    32      32     layout fingerprint, ASCII
    64      32     block hash
    96      8 L    XXH3-64 of each layer's span
    96+8L   8      XXH3-64 of everything before
    104+8L  …      the payload: the layers' spans, one after the other

Numbers are little-endian. A file is complete and verified, or it is no block.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import xxhash

from kvferry.core.block_hash import BlockHash
from kvferry.core.layout import KVLayout
from kvferry.store.base import LayerViews

MAGIC = b"KVFERRY\x01"
VERSION = 1
CODEC = b"none"
_HEAD = struct.Struct("<8sH8sHIQ32s32s")
_CHECKSUM = struct.Struct("<Q")


class CorruptBlock(Exception):
    """What lies in a file is not the block it should be. Does not leave the store."""


class BlockFormat:
    """Encodes and verifies the blocks of one layout."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._fingerprint = layout.fingerprint().encode()
        self.span_sizes = tuple(layout.span_bytes(layer) for layer in range(layout.num_layers))
        self.header_bytes = _HEAD.size + (layout.num_layers + 1) * _CHECKSUM.size

    @cached_property
    def file_bytes(self) -> int:
        """Size of every block's file."""
        return self.header_bytes + sum(self.span_sizes)

    @cached_property
    def layer_offsets(self) -> tuple[int, ...]:
        """Where each layer's span begins in the file."""
        return tuple(accumulate(self.span_sizes, initial=self.header_bytes))[:-1]

    def encode_header(self, block_hash: BlockHash, layers: LayerViews) -> bytes:
        """The header of a block with these bytes."""
        assert tuple(len(layer) for layer in layers) == self.span_sizes, "not a block of this layout"
        head = self._head(block_hash)
        head += b"".join(_CHECKSUM.pack(xxhash.xxh3_64_intdigest(layer)) for layer in layers)
        return head + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))

    def checksums(self, header: bytes | bytearray, block_hash: BlockHash) -> Sequence[int]:
        """The layers' checksums. Raises `CorruptBlock` unless the header is whole and this very block's."""
        body, seal = header[: -_CHECKSUM.size], header[-_CHECKSUM.size :]
        if _CHECKSUM.unpack(seal)[0] != xxhash.xxh3_64_intdigest(body):
            raise CorruptBlock("the header does not verify")
        if body[: _HEAD.size] != self._head(block_hash):
            raise CorruptBlock("it is of another version, codec, layout or block")
        return [checksum for (checksum,) in _CHECKSUM.iter_unpack(body[_HEAD.size :])]

    def read(self, descriptor: int, block_hash: BlockHash, into: LayerViews) -> None:
        """Read and verify a whole block."""
        header = bytearray(self.header_bytes)
        read_exactly(descriptor, [memoryview(header), *into], 0)
        for layer, checksum in enumerate(self.checksums(header, block_hash)):
            _require(checksum, into[layer], layer)

    def read_layer(self, descriptor: int, block_hash: BlockHash, layer: int, into: memoryview) -> None:
        """Read and verify one layer."""
        header = bytearray(self.header_bytes)
        read_exactly(descriptor, [memoryview(header)], 0)
        checksum = self.checksums(header, block_hash)[layer]
        read_exactly(descriptor, [into], self.layer_offsets[layer])
        _require(checksum, into, layer)

    def _head(self, block_hash: BlockHash) -> bytes:
        return _HEAD.pack(
            MAGIC,
            VERSION,
            CODEC,
            0,
            len(self.span_sizes),
            sum(self.span_sizes),
            self._fingerprint,
            block_hash,
        )


def read_exactly(descriptor: int, views: Sequence[memoryview], offset: int) -> None:
    """Fill all views from the file. Raises `CorruptBlock` when it is too short."""
    rest = list(views)
    while rest:
        count = os.preadv(descriptor, rest, offset)
        if not count:
            raise CorruptBlock("the file is too short")
        offset += count
        rest = without_first(rest, count)


def write_all(descriptor: int, views: Sequence[memoryview]) -> None:
    """Write all views, in order."""
    rest = list(views)
    while rest:
        rest = without_first(rest, os.writev(descriptor, rest))


def without_first(views: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of the views after their first `num_bytes`."""
    for index, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= len(view)
    return []


def _require(checksum: int, span: memoryview, layer: int) -> None:
    if xxhash.xxh3_64_intdigest(span) != checksum:
        raise CorruptBlock(f"layer {layer} does not verify")
