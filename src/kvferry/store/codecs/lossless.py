"""Lossless: exponents are separated from the rest and entropy-coded.

The numbers of a channel differ little in size, so that their exponents repeat, while signs and mantissas are noise. The
8 bits of each exponent go into a plane of their own, which Zstandard's Huffman coder compresses; the rest is stored
unchanged. Decoding gives the same bits, also for NaNs. The idea is from ZipNN and DFloat11.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.core.blocks.layout import DTYPE_BYTES, KVLayout
from kvferry.core.dependencies import require_library
from kvferry.core.errors import ConfigError
from kvferry.store.codecs.base import CodecError
from kvferry.store.codecs.framed import FramedCodec

Bytes = NDArray[np.uint8]

LEVEL = 1
_MANTISSA_BITS = {"bfloat16": 7, "float32": 23, "float16": 10}
_UNSIGNED: dict[int, Any] = {2: "<u2", 4: "<u4"}


class LosslessCodec(FramedCodec):
    """`[compressed exponents][signs and mantissas]`; the length of the second part follows from the layout."""

    name = "lossless"
    lossless = True

    @classmethod
    def require_libraries(cls) -> None:
        require_library("codec 'lossless'", "zstandard", "codecs", ["zstandard"])

    def __init__(self, layout: KVLayout) -> None:
        super().__init__(layout)
        self.require_libraries()
        if layout.dtype not in ("bfloat16", "float32"):
            raise ConfigError(f"codec 'lossless' is for bfloat16 and float32, not for {layout.dtype}")
        self._item_bytes = DTYPE_BYTES[layout.dtype]
        self._shift = _MANTISSA_BITS[layout.dtype]
        if any(layout.span_bytes(layer) % self._item_bytes for layer in range(layout.num_layers)):
            raise ConfigError(f"codec 'lossless': pages of {layout.packing} are not made of {layout.dtype}")
        self._local = threading.local()
        """Zstandard's contexts may be used by one thread only."""

    def _pack(self, span: memoryview, layer: int) -> bytes:
        numbers = np.frombuffer(span, dtype=_UNSIGNED[self._item_bytes])
        exponents = (numbers >> self._shift).astype(np.uint8)
        return bytes(self._coder().compress(exponents.tobytes())) + self._rest(numbers).tobytes()

    def _unpack(self, payload: memoryview, layer: int, into: memoryview) -> None:
        num = len(into) // self._item_bytes
        num_rest = num * (self._item_bytes - 1)
        if len(payload) <= num_rest:
            raise CodecError(f"{len(payload)} bytes, where signs and mantissas alone have {num_rest}")
        border = len(payload) - num_rest
        exponents = self._exponents(payload[:border], num)
        rest = np.frombuffer(payload[border:], dtype=np.uint8).reshape(self._item_bytes - 1, num)
        numbers = np.frombuffer(into, dtype=_UNSIGNED[self._item_bytes])
        self._join(exponents, rest, numbers)

    def _rest(self, numbers: NDArray[np.unsignedinteger]) -> Bytes:
        """uint8 [item_bytes - 1, num]: sign and upper bits of the mantissa, then the lower bytes of the mantissa."""
        top_shift = 8 * (self._item_bytes - 1)
        planes = np.empty((self._item_bytes - 1, len(numbers)), dtype=np.uint8)
        sign = (numbers >> top_shift).astype(np.uint8) & 0x80
        planes[0] = sign | ((numbers >> (self._shift - 7)).astype(np.uint8) & 0x7F)
        for plane in range(1, self._item_bytes - 1):
            planes[plane] = (numbers >> (self._shift - 7 - 8 * plane)).astype(np.uint8)
        return planes

    def _join(self, exponents: Bytes, rest: Bytes, numbers: NDArray[np.unsignedinteger]) -> None:
        """The inverse of `_rest` and of separating the exponents; writes into `numbers`."""
        wide = numbers.dtype
        numbers[:] = exponents.astype(wide) << self._shift
        numbers |= (rest[0].astype(wide) & 0x80) << (8 * (self._item_bytes - 1))
        numbers |= (rest[0].astype(wide) & 0x7F) << (self._shift - 7)
        for plane in range(1, self._item_bytes - 1):
            numbers |= rest[plane].astype(wide) << (self._shift - 7 - 8 * plane)

    def _exponents(self, packed: memoryview, num: int) -> Bytes:
        import zstandard

        try:
            # The length that the frame claims is compared before anything is allocated by it.
            if zstandard.frame_content_size(packed) != num:
                raise CodecError(f"the exponents do not say that they are {num}")
            plane = self._decoder().decompress(packed, max_output_size=num, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise CodecError(f"the exponents cannot be decoded: {error}") from error
        if len(plane) != num:
            raise CodecError(f"{len(plane)} exponents of {num}")
        return np.frombuffer(plane, dtype=np.uint8)

    def _coder(self) -> Any:
        import zstandard

        if not hasattr(self._local, "coder"):
            self._local.coder = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False)
        return self._local.coder

    def _decoder(self) -> Any:
        import zstandard

        if not hasattr(self._local, "decoder"):
            self._local.decoder = zstandard.ZstdDecompressor()
        return self._local.decoder
