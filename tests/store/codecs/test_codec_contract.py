"""kvferry's own codecs do what is asked of everybody's; and how near the lossy ones are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_support import make_layout

from kvferry.core.blocks.layout import KVLayout, LayerLayout
from kvferry.core.errors import ConfigError
from kvferry.store.codecs.base import CodecError
from kvferry.store.codecs.table import BUILTIN, make_codec
from kvferry.testing.codecs import LAYERS, CodecContract, round_trip, to_bytes, to_numbers
from support.examples import examples

LOSSY = ["fp8", "int8", "int4"]
LARGEST = {"float16": 65504.0, "bfloat16": 3.38e38, "float32": 3.4e38}
WORST = {"fp8": 0.07, "int8": 0.012, "int4": 0.08}
"""The most that a number may be off, as a share of the largest of its group (bfloat16's own rounding included)."""


def layout_of(dtype: str, block_size: int = 16) -> KVLayout:
    return make_layout(dtype=dtype, layers=LAYERS, block_size=block_size)


class TestCodecs(CodecContract):
    max_error = 2 * WORST["int4"]

    @pytest.fixture(params=BUILTIN)
    def name(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", LARGEST)
@given(seed=st.integers(0, 2**32), scale=st.sampled_from([1e-30, 1e-3, 1.0, 300.0, 1e30]), shift=st.floats(-3, 3))
@settings(max_examples=examples(15), deadline=None)
def test_lossy_is_near(name: str, dtype: str, seed: int, scale: float, shift: float) -> None:
    layout = layout_of(dtype)
    scale = scale if dtype != "float16" else min(scale, 1000.0)
    for layer, spec in enumerate(LAYERS):
        dims = spec.key_dim + spec.value_dim
        numbers = (np.random.default_rng(seed).normal(shift, 1, (spec.num_kv_heads, 16 * dims)) * scale).astype(
            np.float32
        )
        span = to_bytes(numbers, dtype)
        exact = to_numbers(span, dtype).reshape(spec.num_kv_heads, -1)
        found = to_numbers(round_trip(make_codec(name, layout), span, layer), dtype).reshape(exact.shape)
        border = 16 * spec.key_dim
        for part, axis in ((slice(0, border), 1), (slice(border, None), 2)):
            shape = (spec.num_kv_heads, 16, -1)
            if exact[:, part].size:
                off = np.abs(found[:, part] - exact[:, part]).reshape(shape)
                largest = np.abs(exact[:, part]).reshape(shape).max(axis=axis, keepdims=True)
                assert (off <= WORST[name] * largest * (2 if name == "int4" else 1)).all()


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", LARGEST)
@given(seed=st.integers(0, 2**32), share=st.floats(0.25, 1.0))
@settings(max_examples=examples(15), deadline=None)
def test_what_is_finite_stays_finite(name: str, dtype: str, seed: int, share: float) -> None:
    """The largest numbers there are, too, whose scale is rounded up."""
    layout = layout_of(dtype)
    size = layout.span_bytes(0) // (4 if dtype == "float32" else 2)
    numbers = np.random.default_rng(seed).uniform(-1, 1, size) * share * LARGEST[dtype]
    span = to_bytes(numbers, dtype)
    found = to_numbers(round_trip(make_codec(name, layout), span, 0), dtype)
    assert np.isfinite(found).all()
    assert np.abs(found / LARGEST[dtype] - to_numbers(span, dtype) / LARGEST[dtype]).max() < 2 * WORST[name]


@pytest.mark.parametrize(("name", "most"), [("lossless", 0.75), ("fp8", 0.6), ("int8", 0.6), ("int4", 0.4)])
def test_what_looks_like_kv_gets_smaller(name: str, most: float) -> None:
    layout = make_layout(dtype="bfloat16", layers=(LayerLayout(4, 64, 64),), block_size=16)
    channels = np.exp(np.random.default_rng(0).normal(0, 0.7, (4, 1, 128)))
    numbers = (np.random.default_rng(1).normal(size=(4, 16, 128)) * channels).astype(np.float32)
    span = to_bytes(np.concatenate([numbers[..., :64].reshape(4, -1), numbers[..., 64:].reshape(4, -1)], 1), "bfloat16")
    assert len(make_codec(name, layout).encode(memoryview(span), 0)) < most * len(span)


@pytest.mark.parametrize("name", LOSSY)
def test_decoding_what_was_decoded_once_changes_little(name: str) -> None:
    """Blocks that go round between tiers with the same codec do not wear out."""
    layout = layout_of("bfloat16")
    span = to_bytes(np.random.default_rng(3).normal(size=layout.span_bytes(0) // 2), "bfloat16")
    codec = make_codec(name, layout)
    once = round_trip(codec, span, 0)
    many = once
    for _ in range(8):
        many = round_trip(codec, many, 0)
    exact, first, last = (to_numbers(one, "bfloat16") for one in (span, once, many))
    assert np.abs(last - exact).mean() < 3 * np.abs(first - exact).mean()


def test_a_length_is_refused_before_memory_is_taken_for_it() -> None:
    """A frame of a few bytes that says it is a gigabyte."""
    codec = make_codec("lossless", layout_of("bfloat16"))
    size = codec.layout.span_bytes(0)
    frame = bytes.fromhex("28b52ffd e0") + (1 << 30).to_bytes(8, "little") + bytes.fromhex("010000")
    bomb = b"\x01" + frame + bytes(size // 2)
    with pytest.raises(CodecError, match="do not say that they are"):
        codec.decode(memoryview(bomb), 0, memoryview(bytearray(size)))


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("lossless", {"dtype": "float16"}, "not for float16"),
        ("int8", {"packing": "flash"}, "must know where keys and values are"),
        ("lossless", {"layers": (LayerLayout(1, 1, 1, page_bytes=13),)}, "not made of"),
    ],
)
def test_layouts_that_a_codec_cannot_encode(name: str, changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_codec(name, make_layout(**{"dtype": "bfloat16"} | changes))


def test_only_lossless_ones_promise_it() -> None:
    layout = layout_of("bfloat16")
    assert {name for name in BUILTIN if make_codec(name, layout).lossless} == {"none", "lossless"}
