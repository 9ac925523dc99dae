"""Bytes as they are."""

from __future__ import annotations

from kvferry.store.codecs.base import Codec, CodecError


class NoCodec(Codec):
    """Encodes nothing, and copies nothing until it is decoded. Stores may read straight to where the bytes belong."""

    name = "none"
    lossless = True

    def encode(self, span: memoryview, layer: int) -> memoryview:
        """The span itself."""
        return span

    def decode(self, encoded: memoryview, layer: int, into: memoryview) -> None:
        """One copy."""
        if len(encoded) != len(into):
            raise CodecError(f"{len(encoded)} bytes where a span has {len(into)}")
        into[:] = encoded

    def max_encoded_bytes(self, layer: int) -> int:
        """The span's own length."""
        return self.layout.span_bytes(layer)
