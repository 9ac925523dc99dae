"""Encoded spans that begin with one byte, which says if the rest is packed, or unchanged because packing would not make
it smaller."""

from __future__ import annotations

from abc import abstractmethod

from kvferry.store.codecs.base import Codec, CodecError

PLAIN, PACKED = 0, 1


class FramedCodec(Codec):
    """A codec that may leave a span unchanged, so that no encoded span is more than one byte longer than the span."""

    def encode(self, span: memoryview, layer: int) -> bytes:
        packed = self._pack(span.cast("B"), layer)
        if packed is None or len(packed) >= len(span):
            return bytes((PLAIN,)) + bytes(span)
        return bytes((PACKED,)) + packed

    def decode(self, encoded: memoryview, layer: int, into: memoryview) -> None:
        """Decode. Allocates no memory by lengths that `encoded` claims."""
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
        return 1 + self.layout.span_bytes(layer)

    @abstractmethod
    def _pack(self, span: memoryview, layer: int) -> bytes | None:
        """The packed span; None if it cannot be packed."""

    @abstractmethod
    def _unpack(self, payload: memoryview, layer: int, into: memoryview) -> None:
        """Fill `into`. Raises `CodecError` for bytes that `_pack` does not write."""
