"""The two attention operations, each computed by the fastest implementation that fits.

KV cache of one layer: `[num_blocks, kv_heads, block_size * (key_dim + value_dim)]`. Within a head of a block, the keys
`[block_size, key_dim]` come first, then the values `[block_size, value_dim]`. Values beyond the end of a sequence are
undefined, and may be NaN.
"""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from kvferry.engine.ops import reference
from kvferry.engine.ops.batch import AttentionBatch
from kvferry.engine.ops.native import AttentionCall, WriteCall, library

MAX_KEY_DIM = 256
"""Longest key that the CPU kernel supports."""


def write_kv(cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Write key [T, kv_heads, key_dim] and value [T, kv_heads, value_dim] into a layer's cache. `slots`: int64 [T], the
    slot mapping, `block id * block_size + offset`."""
    native = library() if cache.device.type == "cpu" else None
    fits = cache.dtype == key.dtype == value.dtype and key.stride(2) == value.stride(2) == cache.stride(2) == 1
    if native is None or not fits:
        return reference.write_kv(cache, key, value, slots)
    tokens, kv_heads, key_dim = key.shape
    size, value_dim = cache.element_size(), value.shape[2]
    block_size = cache.shape[2] // (key_dim + value_dim)
    call = WriteCall(
        cache.data_ptr(), key.data_ptr(), value.data_ptr(), slots.data_ptr(),
        tokens, kv_heads, block_size, key_dim * size, value_dim * size,
        cache.stride(0) * size, cache.stride(1) * size,
        key.stride(0) * size, key.stride(1) * size, value.stride(0) * size, value.stride(1) * size,
    )  # fmt: skip
    native.write_kv(byref(call))
    return None


def paged_attention(
    query: Tensor,
    cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from query [T, heads, key_dim] to the sequences in `cache`. Returns [T, heads, value_dim] of the query's
    dtype.

    `write_kv` must have stored this step's tokens before. `window`: sliding window in tokens, the token itself
    included, as in Hugging Face's `sliding_window`; `softcap`: of the logits; `sinks`: one extra softmax logit for each
    head, [heads]. Raises `ValueError` if the query heads are no multiple of the KV heads.
    """
    if query.shape[1] % cache.shape[1]:
        raise ValueError(f"{query.shape[1]} query heads cannot share {cache.shape[1]} KV heads evenly")
    value_dim = cache.shape[2] // batch.block_size - query.shape[2]
    attend = _native_attention if _fits_native(query, cache, batch, causal, window) else reference.paged_attention
    return attend(
        query,
        cache,
        batch,
        value_dim=value_dim,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )


def _fits_native(query: Tensor, cache: Tensor, batch: AttentionBatch, causal: bool, window: int | None) -> bool:
    return (
        query.device.type == "cpu"
        and query.dtype == cache.dtype
        and query.dtype in (torch.float32, torch.bfloat16)
        and query.shape[2] <= MAX_KEY_DIM
        and query.stride(2) == cache.stride(2) == 1
        and (causal or window is None)
        and batch.block_size & (batch.block_size - 1) == 0
        and library() is not None
    )


def _native_attention(
    query: Tensor,
    cache: Tensor,
    batch: AttentionBatch,
    *,
    value_dim: int,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    tokens, heads, key_dim = query.shape
    out = query.new_empty(tokens, heads, value_dim)
    if sinks is not None:
        sinks = sinks.float().contiguous()
    call = AttentionCall(
        query.data_ptr(), cache.data_ptr(), out.data_ptr(),
        batch.query_starts.data_ptr(), batch.context_lens.data_ptr(), batch.block_tables.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        batch.num_sequences, batch.block_tables.stride(0), query.stride(0), query.stride(1),
        cache.stride(0), cache.stride(1), heads, cache.shape[1], key_dim, value_dim,
        batch.block_size, causal, window or 0, scale, softcap or 0.0,
    )  # fmt: skip
    native = library()
    assert native is not None
    native.paged_attention(byref(call), query.dtype == torch.bfloat16)
    return out
