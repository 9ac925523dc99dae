"""Whether two backends arrange a page alike is seen in the bytes that they write."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.core.blocks.layout import KVLayout, LayerLayout
from kvferry.core.errors import LayoutMismatch

torch = pytest.importorskip("torch")
page_digest = pytest.importorskip("kvferry.adapters.vllm.kv_cache.arrangement").page_digest

NUM_BLOCKS, HEADS, BLOCK_SIZE, HEAD_SIZE = 3, 2, 8, 4
Write = Callable[[Any, Any, Any, Any, Any], None]


def rows(layer: Any, keys: Any, values: Any, cache: Any, slots: Any) -> None:
    """K then V of each token."""
    for slot, key, value in zip(slots.tolist(), keys, values, strict=True):
        cache[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = torch.cat([key, value], dim=-1)


def rows_in_other_words(layer: Any, keys: Any, values: Any, cache: Any, slots: Any) -> None:
    """The same bytes, by other means, as another release might write them."""
    cache[0, :, slots, :HEAD_SIZE] = keys.transpose(0, 1)
    cache[0, :, slots, HEAD_SIZE:] = values.transpose(0, 1)


def values_first(layer: Any, keys: Any, values: Any, cache: Any, slots: Any) -> None:
    rows(layer, values, keys, cache, slots)


def tokens_backwards(layer: Any, keys: Any, values: Any, cache: Any, slots: Any) -> None:
    rows(layer, keys, values, cache, slots.flip(0))


def heads_swapped(layer: Any, keys: Any, values: Any, cache: Any, slots: Any) -> None:
    rows(layer, keys.flip(1), values.flip(1), cache, slots)


class CompilationError(Exception):
    """As a compiler has one of its own."""


def raises(error: Exception) -> Write:
    def write(layer: Any, keys: Any, values: Any, cache: Any, slots: Any) -> None:
        raise error

    return write


class KeepsTheCache:
    """A backend that keeps a view of the first cache that it writes to."""

    num_kv_heads, head_size = HEADS, HEAD_SIZE
    kept: Any = None

    def do_kv_cache_update(self, layer: Any, keys: Any, values: Any, cache: Any, slots: Any) -> None:
        self.kept = cache if self.kept is None else self.kept
        rows(layer, keys, values, self.kept, slots)


def page(write: Write | None, dtype: Any = torch.float32) -> str | None:
    impl = SimpleNamespace(num_kv_heads=HEADS, head_size=HEAD_SIZE)
    if write is not None:
        impl.do_kv_cache_update = write
    cache = torch.full((NUM_BLOCKS, HEADS, BLOCK_SIZE, 2 * HEAD_SIZE), 7.0, dtype=dtype)
    found: str | None = page_digest(SimpleNamespace(impl=impl), cache, cache[0].nbytes)
    assert (cache == 7).all()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_same_bytes_have_the_same_name(dtype: Any) -> None:
    assert page(rows, dtype) == page(rows_in_other_words, dtype) is not None


@pytest.mark.parametrize("write", [values_first, tokens_backwards, heads_swapped])
def test_other_bytes_have_another_name(write: Write) -> None:
    assert page(write) != page(rows)


def test_elements_far_apart_are_distinguished() -> None:
    """Also those whose numbers end alike."""

    def size(write: Write) -> str | None:
        impl = SimpleNamespace(num_kv_heads=1, head_size=251, do_kv_cache_update=write)
        cache = torch.zeros((1, 1, 8, 502))
        found: str | None = page_digest(SimpleNamespace(impl=impl), cache, cache.nbytes)
        return found

    def plain(layer: Any, keys: Any, values: Any, cache: Any, slots: Any) -> None:
        cache[0, 0] = torch.cat([keys[:, 0], values[:, 0]], dim=-1)

    def rotated(layer: Any, keys: Any, values: Any, cache: Any, slots: Any) -> None:
        plain(layer, keys.roll(1, 0), values.roll(1, 0), cache, slots)

    assert size(plain) != size(rotated)


ERRORS = [
    RuntimeError("no kernel"),
    AssertionError(),
    KeyError("k"),
    ImportError("no module"),
    CompilationError("at 1:1"),
]


@pytest.mark.parametrize(
    "write", [*map(raises, ERRORS), None], ids=[*(type(error).__name__ for error in ERRORS), "none"]
)
def test_a_backend_that_cannot_be_asked_has_no_name(write: Write | None) -> None:
    assert page(write) is None


def test_the_layer_keeps_nothing_of_the_question() -> None:
    impl = KeepsTheCache()
    cache = torch.zeros((NUM_BLOCKS, HEADS, BLOCK_SIZE, 2 * HEAD_SIZE))
    assert page_digest(SimpleNamespace(impl=impl), cache, cache[0].nbytes) == page(rows)
    assert impl.kept is None


@pytest.mark.parametrize("dtype", ["int4_per_token_head", "int8_per_token_head", "fp8_per_token_head"])
def test_a_cache_with_scales_between_its_values_is_not_asked(dtype: str) -> None:
    impl = KeepsTheCache()
    cache = torch.zeros((NUM_BLOCKS, HEADS, BLOCK_SIZE, 2 * HEAD_SIZE))
    assert page_digest(SimpleNamespace(impl=impl, kv_cache_dtype=dtype), cache, cache[0].nbytes) is None


def test_another_block_size_is_reported_by_that_name() -> None:
    """And not as a packing that differs too."""
    here = KVLayout(
        model_fingerprint="m", dtype="float32", block_size=8, packing="a", layers=(LayerLayout(2, 4, 4, 64),)
    )
    there = KVLayout(
        model_fingerprint="m", dtype="float32", block_size=16, packing="b", layers=(LayerLayout(2, 4, 4, 128),)
    )
    with pytest.raises(LayoutMismatch, match="block_size"):
        here.require_reconcilable(there)
