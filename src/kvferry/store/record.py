"""The record: the form in which every store writes a block.

    offset   bytes  what
    0        8      magic
    8        2      version
    10       2      reserved, 0
    12       16     codec, ASCII
    28       4      number of layers, L
    32       8      payload length
    40       32     layout fingerprint, ASCII
    72       32     block hash
    104      16 L   for each layer: length of its encoded span, XXH3-64 of it
    104+16L  8      XXH3-64 of everything before
    112+16L  …      the payload: the layers' encoded spans, one after the other

Numbers are little-endian. The lengths in a header are used only after the header has verified as this block's, of this
layout and codec, with no length that exceeds what the codec can have written. A record that does not verify is
`CorruptBlock`, which stores treat as a miss.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate

import xxhash

from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.blocks.layout import KVLayout
from kvferry.store.codecs.base import Codec, CodecError
from kvferry.store.codecs.none import NoCodec
from kvferry.store.copying import copy_bytes

Write = Callable[[Callable[[], object]], bool]
LayerViews = Sequence[memoryview]
"""One block's bytes: a view for each layer, of `KVLayout.span_bytes` bytes."""

MAGIC = b"KVFERRY\x02"
VERSION = 2
MAX_LAYERS = 65536
_HEAD = struct.Struct("<8sHH16sIQ32s32s")
_SPAN = struct.Struct("<QQ")
_SEAL = struct.Struct("<Q")


def _write_now(copy: Callable[[], object]) -> bool:
    copy()
    return True


class CorruptBlock(Exception):
    """The value that is stored under a hash is not that block. Handled within the store, as a miss."""


@dataclass(frozen=True)
class Header:
    """A verified header: for each layer, the offset of its encoded span from the beginning of the record, its length,
    and its XXH3-64."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    checksums: tuple[int, ...]

    @property
    def record_bytes(self) -> int:
        """Bytes of header and payload."""
        return self.offsets[-1] + self.lengths[-1]


class RecordFormat:
    """Encodes and verifies the blocks of one layout with one codec. Any thread."""

    def __init__(self, layout: KVLayout, codec: Codec) -> None:
        self.layout, self.codec = layout, codec
        self._fingerprint = layout.fingerprint().encode()
        self._span_sizes = tuple(layout.span_bytes(layer) for layer in range(layout.num_layers))
        self._limits = tuple(codec.max_encoded_bytes(layer) for layer in range(layout.num_layers))
        self.header_bytes = _HEAD.size + layout.num_layers * _SPAN.size + _SEAL.size
        self.is_plain = isinstance(codec, NoCodec)
        """True if the payload is the block's bytes unchanged."""

    @cached_property
    def max_record_bytes(self) -> int:
        """Maximum bytes of a record."""
        return self.header_bytes + sum(self._limits)

    def encode(self, block_hash: BlockHash, layers: LayerViews) -> list[memoryview]:
        """The record, as buffers; the ones with the payload may be `layers` themselves."""
        assert tuple(len(layer) for layer in layers) == self._span_sizes, "not a block of this layout"
        spans = [memoryview(self.codec.encode(span, layer)) for layer, span in enumerate(layers)]
        head = self._head(block_hash, sum(len(span) for span in spans))
        head += b"".join(_SPAN.pack(len(span), xxhash.xxh3_64_intdigest(span)) for span in spans)
        return [memoryview(head + _SEAL.pack(xxhash.xxh3_64_intdigest(head))), *spans]

    def header(self, encoded: bytes | bytearray | memoryview, block_hash: BlockHash) -> Header:
        """Verify a header of `header_bytes`. Raises `CorruptBlock` unless it is complete and this block's."""
        if len(encoded) != self.header_bytes:
            raise CorruptBlock("it is too short")
        head = bytes(encoded)
        _verify_seal(head)
        spans = tuple(_SPAN.iter_unpack(head[_HEAD.size : -_SEAL.size]))
        lengths, checksums = tuple(span[0] for span in spans), tuple(span[1] for span in spans)
        if any(length > limit for length, limit in zip(lengths, self._limits, strict=True)):
            raise CorruptBlock("a layer is longer than its codec can have written")
        if head[: _HEAD.size] != self._head(block_hash, sum(lengths)):
            raise CorruptBlock("it is of another version, codec, layout or block")
        return Header(tuple(accumulate(lengths, initial=self.header_bytes))[:-1], lengths, checksums)

    def decode(self, record: memoryview, block_hash: BlockHash, into: LayerViews, write: Write = _write_now) -> bool:
        """Verify a record and decode it into `into`, one view for each layer. Raises `CorruptBlock`. False: `write`,
        which calls the function that writes to `into`, did not call it.

        `record` may change meanwhile: the copy is verified. A codec, which may be another package's and hang, decodes
        to other memory first.
        """
        header = self.header(record[: self.header_bytes], block_hash)
        if len(record) < header.record_bytes:
            raise CorruptBlock("it is too short")
        return all(self.decode_layer(record, header, layer, view, write) for layer, view in enumerate(into))

    def decode_layer(self, record: memoryview, header: Header, layer: int, into: memoryview, write: Write) -> bool:
        """Like `decode` for one layer, with a verified header."""
        span = record[header.offsets[layer] :][: header.lengths[layer]]
        if self.is_plain:
            if len(span) != len(into):
                raise CorruptBlock("it is too short")
            return write(partial(self._copy, span, header, layer, into))
        encoded = memoryview(bytes(span))
        self._verify_span(header, layer, encoded)
        decoded = memoryview(bytearray(len(into)))
        try:
            self.codec.decode(encoded, layer, decoded)
        except CodecError as error:
            raise CorruptBlock(str(error)) from error
        return write(partial(copy_bytes, into, decoded))

    def _copy(self, span: memoryview, header: Header, layer: int, into: memoryview) -> None:
        copy_bytes(into, span)
        self._verify_span(header, layer, into)

    def _verify_span(self, header: Header, layer: int, encoded: memoryview) -> None:
        if len(encoded) != header.lengths[layer] or xxhash.xxh3_64_intdigest(encoded) != header.checksums[layer]:
            raise CorruptBlock(f"layer {layer} does not verify")

    def _head(self, block_hash: BlockHash, payload_bytes: int) -> bytes:
        codec, num_layers = self.codec.name.encode(), len(self._span_sizes)
        return _HEAD.pack(MAGIC, VERSION, 0, codec, num_layers, payload_bytes, self._fingerprint, block_hash)


@dataclass(frozen=True)
class Label:
    """The fields of a record's header, for a reader that does not know the layout."""

    block_hash: BlockHash
    fingerprint: str
    codec: str
    header_bytes: int
    lengths: tuple[int, ...]
    checksums: tuple[int, ...]

    @property
    def record_bytes(self) -> int:
        """Bytes of header and payload."""
        return self.header_bytes + sum(self.lengths)


def read_label(record: bytes | memoryview) -> Label:
    """Read and verify the header of a record of any layout; `record` may be cut off after the header. Raises
    `CorruptBlock`."""
    if len(record) < _HEAD.size:
        raise CorruptBlock("it is too short")
    magic, version, _, codec, num_layers, payload_bytes, fingerprint, block_hash = _HEAD.unpack(record[: _HEAD.size])
    header_bytes = _HEAD.size + num_layers * _SPAN.size + _SEAL.size
    if magic != MAGIC or version != VERSION or not 0 < num_layers <= MAX_LAYERS or len(record) < header_bytes:
        raise CorruptBlock("it is no record of this version")
    head = bytes(record[:header_bytes])
    _verify_seal(head)
    spans = tuple(_SPAN.iter_unpack(head[_HEAD.size : -_SEAL.size]))
    if sum(length for length, _ in spans) != payload_bytes:
        raise CorruptBlock("its lengths disagree")
    names = fingerprint.rstrip(b"\0").decode("ascii", "replace"), codec.rstrip(b"\0").decode("ascii", "replace")
    return Label(block_hash, *names, header_bytes, tuple(s[0] for s in spans), tuple(s[1] for s in spans))


def verify_record(record: memoryview) -> Label:
    """Raise `CorruptBlock` unless this is a complete record, of any layout, with the bytes that were written."""
    label = read_label(record)
    if len(record) != label.record_bytes:
        raise CorruptBlock("its length is not what it says")
    offsets = accumulate(label.lengths, initial=label.header_bytes)
    for offset, length, checksum in zip(offsets, label.lengths, label.checksums, strict=False):
        if xxhash.xxh3_64_intdigest(record[offset : offset + length]) != checksum:
            raise CorruptBlock("its payload does not verify")
    return label


def _verify_seal(head: bytes) -> None:
    if _SEAL.unpack(head[-_SEAL.size :])[0] != xxhash.xxh3_64_intdigest(head[: -_SEAL.size]):
        raise CorruptBlock("the header does not verify")


# Plain files.


def read_exactly(descriptor: int, views: Sequence[memoryview], offset: int) -> None:
    """Fill all views from the file, beginning at `offset`. Raises `CorruptBlock` if the file is too short."""
    rest = [view for view in views if len(view)]
    while rest:
        count = os.preadv(descriptor, rest[:1024], offset)
        if not count:
            raise CorruptBlock("the file is too short")
        offset += count
        rest = skip_bytes(rest, count)


def write_all(descriptor: int, views: Sequence[memoryview]) -> None:
    """Write all views to the file, in order."""
    rest = [view for view in views if len(view)]
    while rest:
        rest = skip_bytes(rest, os.writev(descriptor, rest[:1024]))


def skip_bytes(views: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """The views without their first `num_bytes`."""
    for index, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= len(view)
    return []
