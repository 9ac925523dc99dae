"""The contract of codecs. In a package that provides one:

    from kvferry.testing.codecs import CodecContract

    class TestMyCodec(CodecContract):
        codec = "my_package.my_module:MyCodec"

Needs pytest.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.core.blocks.layout import KVLayout, LayerLayout
from kvferry.store.codecs.base import Codec, CodecError
from kvferry.store.codecs.table import codec_class, make_codec

LAYERS = (LayerLayout(2, 8, 8), LayerLayout(1, 6, 3), LayerLayout(3, 5, 0))
"""Layers with different numbers of KV heads: keys and values of equal size, of different sizes, and no values."""


def round_trip(codec: Codec, span: bytes, layer: int) -> bytes:
    """The span after encoding and decoding."""
    encoded = bytes(codec.encode(memoryview(span), layer))
    assert len(encoded) <= codec.max_encoded_bytes(layer)
    into = bytearray(len(span))
    codec.decode(memoryview(encoded), layer, memoryview(into))
    return bytes(into)


def to_bytes(numbers: NDArray[Any], dtype: str) -> bytes:
    """Numbers as the bytes of a span. For bfloat16, the lower bits are cut off, not rounded."""
    if dtype == "float16":
        return numbers.astype("<f2").tobytes()
    bits = numbers.astype(np.float32).view(np.uint32)
    return bits.astype("<u4").tobytes() if dtype == "float32" else (bits >> 16).astype("<u2").tobytes()


def to_numbers(span: bytes, dtype: str) -> NDArray[np.float32]:
    """The numbers of a span, float32."""
    if dtype != "bfloat16":
        return np.frombuffer(span, "<f4" if dtype == "float32" else "<f2").astype(np.float32)
    return (np.frombuffer(span, "<u2").astype(np.uint32) << 16).view(np.float32)


class CodecContract:
    """Set `codec` in a subclass, as in a store's URL. `max_error`: the maximum error of a lossy codec, as a share of
    the largest absolute value of the layer."""

    codec: ClassVar[str]
    dtypes: ClassVar[Sequence[str]] = ("bfloat16", "float32")
    max_error: ClassVar[float] = 0.1

    @pytest.fixture
    def name(self) -> str:
        """The codec's name."""
        return self.codec

    def layouts(self) -> list[KVLayout]:
        """Layouts that the codec must be able to encode."""
        return [
            KVLayout(model_fingerprint="contract", dtype=dtype, block_size=block_size, layers=LAYERS)
            for dtype in self.dtypes
            for block_size in (1, 3, 16)
        ]

    def test_its_name_is_valid_in_a_header(self, name: str) -> None:
        assert codec_class(name).name  # `codec_class` raises for a name that is not valid in a header
        codec_class(name).require_libraries()

    @pytest.mark.parametrize("seed", range(8))
    def test_any_bytes_go_through_and_lossless_gives_the_same_bits(self, name: str, seed: int) -> None:
        """Random bytes contain every kind of number: NaN, infinities and subnormal numbers too."""
        rng = random.Random(seed)
        for layout in self.layouts():
            codec = make_codec(name, layout)
            for layer in range(layout.num_layers):
                pattern = rng.randbytes(rng.choice([1, 2, 7, 64, 4096]))
                span = (pattern * layout.span_bytes(layer))[: layout.span_bytes(layer)]
                decoded = round_trip(codec, span, layer)
                assert decoded == span or not codec.lossless

    @pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 300.0, 1e30])
    def test_lossy_is_near(self, name: str, scale: float) -> None:
        for layout in self.layouts():
            codec = make_codec(name, layout)
            for layer in range(layout.num_layers):
                size = layout.span_bytes(layer) // (4 if layout.dtype == "float32" else 2)
                drawn = np.random.default_rng(size).normal(0, 1, size) * (
                    min(scale, 1e3) if "16" in layout.dtype else scale
                )
                span = to_bytes(drawn, layout.dtype)
                exact = to_numbers(span, layout.dtype)
                decoded = to_numbers(round_trip(codec, span, layer), layout.dtype)
                assert np.isfinite(decoded).all()
                assert np.abs(decoded - exact).max() <= self.max_error * np.abs(exact).max()

    @pytest.mark.parametrize("seed", range(20))
    def test_forged_bytes_are_refused_or_decoded_and_nothing_else(self, name: str, seed: int) -> None:
        rng = random.Random(seed)
        for layout in self.layouts():
            codec, layer = make_codec(name, layout), rng.randrange(layout.num_layers)
            size = layout.span_bytes(layer)
            forged = bytearray(codec.encode(memoryview(rng.randbytes(size)), layer))
            for _ in range(rng.randrange(1, 5)):
                forged[rng.randrange(min(41, len(forged)))] = rng.randrange(256)
            content = bytes(forged)
            for attempt in (content, content[:-1], b"", content + b"x", rng.randbytes(rng.randrange(300))):
                buffer = bytearray(b"\xaa" * (size + 16))
                with suppress(CodecError):
                    codec.decode(memoryview(attempt), layer, memoryview(buffer)[8 : 8 + size])
                assert buffer[:8] == buffer[-8:] == b"\xaa" * 8
