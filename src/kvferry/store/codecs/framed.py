"""Encoded spans that begin with a byte: packed, or as they are where packing would not make them smaller."""

from __future__ import annotations

from abc import abstractmethod

from kvferry.store.codecs.base import Codec, CodecError

PLAIN, PACKED = 0, 1


class FramedCodec(Codec):
    """A codec that may leave a span as it is. So no encoded span is more than a byte longer than the span."""

    def encode(self, span: memoryview, layer: int) -> bytes:
        """The byte, and what it says."""
        packed = self._pack(span.cast("B"), layer)
        if packed is None or len(packed) >= len(span):
            return bytes((PLAIN,)) + bytes(span)
        return bytes((PACKED,)) + packed

    def decode(self, encoded: memoryview, layer: int, into: memoryview) -> None:
        """As `Codec.decode`; nothing is allocated by what `encoded` says of its own length."""
        mode, payload = bytes(encoded[:1]), encoded[1:]
        if mode == bytes((PLAIN,)) and len(payload) == len(into):
            into[:] = payload
        elif mode == bytes((PACKED,)) and len(payload) < len(into):
            self._unpack(payload, layer, into)
        else:
            raise CodecError(
                f"{len(encoded)} bytes that begin with {mode.hex() or 'nothing'} are no span of {self.name}"
            )

    def max_encoded_bytes(self, layer: int) -> int:
        """A byte more than the span."""
        return 1 + self.layout.span_bytes(layer)

    @abstractmethod
    def _pack(self, span: memoryview, layer: int) -> bytes | None:
        """The span packed; None where it cannot be."""

    @abstractmethod
    def _unpack(self, payload: memoryview, layer: int, into: memoryview) -> None:
        """Fill `into`. Raises `CodecError` for what `_pack` does not write."""
