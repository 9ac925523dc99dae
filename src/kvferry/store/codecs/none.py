"""The codec that leaves bytes unchanged."""

from __future__ import annotations

from kvferry.store.codecs.base import Codec, CodecError


class NoCodec(Codec):
    """Does not encode, and copies only when decoding. Stores may read directly into the memory where the bytes are
    needed."""

    name = "none"
    lossless = True

    def encode(self, span: memoryview, layer: int) -> memoryview:
        return span

    def decode(self, encoded: memoryview, layer: int, into: memoryview) -> None:
        if len(encoded) != len(into):
            raise CodecError(f"{len(encoded)} bytes where a span has {len(into)}")
        into[:] = encoded

    def max_encoded_bytes(self, layer: int) -> int:
        return self.layout.span_bytes(layer)
