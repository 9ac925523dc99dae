"""Lossy codecs: 8 or 4 bits for each number, with scales for groups of numbers. Used only if they are asked for by
name.

The channels of keys differ in size in the same way for all tokens, and the tokens of values do; so a group is one
channel of a block's keys, or one token of its values (as in KIVI, ICML 2024). Scales are bfloat16, and rounded up: a
span with a number that is not finite, or so large that it might not be finite afterwards, is stored unchanged.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvferry.core.blocks.layout import KVLayout
from kvferry.core.errors import ConfigError
from kvferry.store.codecs.base import CodecError
from kvferry.store.codecs.framed import FramedCodec

Floats = NDArray[np.float32]
SMALLEST = np.float32(2.0**-126)
"""The smallest normal scale; groups that would need a smaller one become 0."""
LARGEST = {"float16": 0.9 * 65504, "bfloat16": 1e38, "float32": 1e38}
"""The largest magnitude that is quantized: with scales rounded up, decoded numbers are finite in that type, and so is
the difference of two such numbers in float32."""


class QuantizedCodec(FramedCodec):
    """Keys and values, `[heads, tokens, dim]` each, quantized in groups along tokens (axis 1) or dim (axis 2)."""

    lossless = False

    def __init__(self, layout: KVLayout) -> None:
        super().__init__(layout)
        if layout.is_opaque:
            raise ConfigError(f"codec {self.name!r} must know where keys and values are, which {layout.packing} hides")

    def _pack(self, span: memoryview, layer: int) -> bytes | None:
        numbers = _to_floats(span, self.layout.dtype)
        if not (np.abs(numbers) <= LARGEST[self.layout.dtype]).all():  # which NaN is not, either
            return None
        buffers = [self._quantize(part, axis) for part, axis in self._parts(numbers, layer)]
        return b"".join(buffers)

    def _unpack(self, payload: memoryview, layer: int, into: memoryview) -> None:
        if len(payload) != self._packed_bytes(layer):
            raise CodecError(f"{len(payload)} bytes where a packed span has {self._packed_bytes(layer)}")
        numbers = np.empty(len(into) // (4 if self.layout.dtype == "float32" else 2), dtype=np.float32)
        offset = 0
        for part, axis in self._parts(numbers, layer):
            size = self._part_bytes(part.shape, axis)
            part[:] = self._restore(payload[offset : offset + size], part.shape, axis)
            offset += size
        into[:] = _to_bytes(numbers, self.layout.dtype)

    def _parts(self, numbers: Floats, layer: int) -> Iterator[tuple[Floats, int]]:
        """Views of the keys and of the values, and the axis along which their groups run."""
        spec, tokens = self.layout.layers[layer], self.layout.block_size
        heads = numbers.reshape(spec.num_kv_heads, -1)
        border = tokens * spec.key_dim
        if spec.key_dim:
            yield heads[:, :border].reshape(-1, tokens, spec.key_dim), 1
        if spec.value_dim:
            yield heads[:, border:].reshape(-1, tokens, spec.value_dim), 2

    def _packed_bytes(self, layer: int) -> int:
        spec, tokens = self.layout.layers[layer], self.layout.block_size
        heads = spec.num_kv_heads
        keys = self._part_bytes((heads, tokens, spec.key_dim), 1) if spec.key_dim else 0
        values = self._part_bytes((heads, tokens, spec.value_dim), 2) if spec.value_dim else 0
        return keys + values

    @abstractmethod
    def _part_bytes(self, shape: tuple[int, ...], axis: int) -> int:
        """Bytes of a quantized part of that shape."""

    @abstractmethod
    def _quantize(self, part: Floats, axis: int) -> bytes:
        """Quantize and pack one part of a block."""

    @abstractmethod
    def _restore(self, packed: memoryview, shape: tuple[int, ...], axis: int) -> Floats:
        """The inverse. Never raises: any bytes of the right length stand for some numbers."""


class Int8Codec(QuantizedCodec):
    """Symmetric: a scale for each group, then a signed byte for each number."""

    name = "int8"

    def _part_bytes(self, shape: tuple[int, ...], axis: int) -> int:
        num = math.prod(shape)
        return 2 * (num // shape[axis]) + num

    def _quantize(self, part: Floats, axis: int) -> bytes:
        scales = _rounded_up(np.abs(part).max(axis=axis, keepdims=True) / 127)
        steps = np.rint(np.divide(part, scales, out=np.zeros_like(part), where=scales > 0))
        return _bfloat16(scales) + np.clip(steps, -127, 127).astype(np.int8).tobytes()

    def _restore(self, packed: memoryview, shape: tuple[int, ...], axis: int) -> Floats:
        scales, offset = _read_bfloat16(packed, shape, axis)
        steps = np.frombuffer(packed[offset:], dtype=np.int8).reshape(shape)
        return steps.astype(np.float32) * scales


class Int4Codec(QuantizedCodec):
    """The lowest number and the step of each group, then half a byte for each number."""

    name = "int4"

    def _part_bytes(self, shape: tuple[int, ...], axis: int) -> int:
        num = math.prod(shape)
        return 4 * (num // shape[axis]) + (num + 1) // 2

    def _quantize(self, part: Floats, axis: int) -> bytes:
        lowest = _as_bfloat16(part.min(axis=axis, keepdims=True))
        spread = part.max(axis=axis, keepdims=True).astype(np.float64) - lowest
        scales = _rounded_up((np.maximum(spread, 0) / 15).astype(np.float32))
        steps = np.divide(part - lowest, scales, out=np.zeros_like(part), where=scales > 0)
        steps = np.clip(np.rint(steps), 0, 15).astype(np.uint8).ravel()
        if len(steps) % 2:
            steps = np.append(steps, np.uint8(0))
        pairs: NDArray[np.uint8] = steps[::2] | steps[1::2] << 4
        return _bfloat16(lowest) + _bfloat16(scales) + pairs.tobytes()

    def _restore(self, packed: memoryview, shape: tuple[int, ...], axis: int) -> Floats:
        lowest, offset = _read_bfloat16(packed, shape, axis)
        scales, size = _read_bfloat16(packed[offset:], shape, axis)
        pairs = np.frombuffer(packed[offset + size :], dtype=np.uint8)
        steps = np.stack((pairs & 15, pairs >> 4), axis=1).ravel()[: math.prod(shape)].reshape(shape)
        numbers: Floats = lowest + steps.astype(np.float32) * scales
        return numbers


class Fp8Codec(QuantizedCodec):
    """A scale for each group, then one byte for each number: sign, 4 bits of exponent, 3 of mantissa (E4M3)."""

    name = "fp8"

    def _part_bytes(self, shape: tuple[int, ...], axis: int) -> int:
        num = math.prod(shape)
        return 2 * (num // shape[axis]) + num

    def _quantize(self, part: Floats, axis: int) -> bytes:
        scales = _rounded_up(np.abs(part).max(axis=axis, keepdims=True) / _E4M3[-1])
        scaled = np.divide(part, scales, out=np.zeros_like(part), where=scales > 0)
        codes = np.searchsorted(_E4M3_BORDERS, np.abs(scaled)).astype(np.uint8)
        return _bfloat16(scales) + (codes | (np.signbit(scaled) * np.uint8(0x80))).astype(np.uint8).tobytes()

    def _restore(self, packed: memoryview, shape: tuple[int, ...], axis: int) -> Floats:
        scales, offset = _read_bfloat16(packed, shape, axis)
        codes = np.frombuffer(packed[offset:], dtype=np.uint8).reshape(shape)
        numbers = _E4M3[np.minimum(codes & 0x7F, len(_E4M3) - 1)]
        signed: Floats = np.where(codes & 0x80, -numbers, numbers) * scales
        return signed


def _e4m3() -> Floats:
    """The 127 magnitudes of E4M3 in order; the bits of each are its index."""
    codes = np.arange(127)
    exponents, mantissas = codes >> 3, codes & 7
    normal = 2.0 ** (exponents - 7) * (1 + mantissas / 8)
    return np.where(exponents == 0, 2.0**-6 * mantissas / 8, normal).astype(np.float32)


_E4M3 = _e4m3()
_E4M3_BORDERS = (_E4M3[1:] + _E4M3[:-1]) / 2


def _rounded_up(scales: Floats) -> Floats:
    """The next bfloat16 that is not smaller, so that nothing overflows; 0 if it is too small to divide by."""
    bits = scales.astype(np.float32).view(np.uint32)
    up = ((bits + 0xFFFF) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(up < SMALLEST, np.float32(0), np.minimum(up, np.float32(3.38e38))).astype(np.float32)


def _as_bfloat16(numbers: Floats) -> Floats:
    """Truncated to bfloat16, towards 0."""
    return (np.ascontiguousarray(numbers).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def _bfloat16(numbers: Floats) -> bytes:
    return (np.ascontiguousarray(numbers).view(np.uint32) >> 16).astype("<u2").tobytes()


def _read_bfloat16(packed: memoryview, shape: tuple[int, ...], axis: int) -> tuple[Floats, int]:
    """One number for each group, in a shape that broadcasts with the part, and the bytes that they took."""
    num = math.prod(shape) // shape[axis]
    bits = np.frombuffer(packed[: 2 * num], dtype="<u2").astype(np.uint32) << 16
    return bits.view(np.float32).reshape([1 if index == axis else size for index, size in enumerate(shape)]), 2 * num


def _to_floats(span: memoryview, dtype: str) -> Floats:
    """The numbers of a span, copied."""
    if dtype == "bfloat16":
        return (np.frombuffer(span, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(span, dtype="<f4" if dtype == "float32" else "<f2").astype(np.float32)


def _to_bytes(numbers: Floats, dtype: str) -> bytes:
    """Rounded to nearest, ties to even."""
    if dtype == "bfloat16":
        bits = numbers.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    return numbers.astype("<f4" if dtype == "float32" else "<f2").tobytes()
