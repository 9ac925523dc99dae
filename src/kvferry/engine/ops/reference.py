"""Paged attention in plain PyTorch: correct on every device and for every dtype, and the reference for faster kernels.

The cached blocks of each sequence are gathered into a contiguous tensor. The query heads that share a KV head become
more rows of its queries, so that one (batched) product for each KV head serves all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kvferry.engine.ops.batch import AttentionBatch, QueryGroup


def write_kv(cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Write key [T, kv_heads, key_dim] and value [T, kv_heads, value_dim] into a layer's cache; `slots`: int64 [T], the
    slot mapping."""
    keys, values = cache_views(cache, key.shape[2], value.shape[2])
    block_size = keys.shape[2]
    block, offset = slots // block_size, slots % block_size
    keys[block, :, offset] = key.to(cache.dtype)
    values[block, :, offset] = value.to(cache.dtype)


def cache_views(cache: Tensor, key_dim: int, value_dim: int) -> tuple[Tensor, Tensor]:
    """Views [blocks, kv_heads, block_size, dim] of the keys and of the values in a layer's cache [blocks, kv_heads,
    block_size * (key_dim + value_dim)]."""
    num_blocks, kv_heads, span = cache.shape
    block_size = span // (key_dim + value_dim)
    keys = cache[:, :, : block_size * key_dim]
    values = cache[:, :, block_size * key_dim :]
    return (
        keys.view(num_blocks, kv_heads, block_size, key_dim),
        values.view(num_blocks, kv_heads, block_size, value_dim),
    )


def paged_attention(
    query: Tensor,
    cache: Tensor,
    batch: AttentionBatch,
    *,
    value_dim: int,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from query [T, heads, key_dim] to the cached sequences; returns [T, heads, value_dim]."""
    keys, values = cache_views(cache, query.shape[2], value_dim)
    out = query.new_empty(query.shape[0], query.shape[1], value_dim)
    for group in batch.groups:
        k, v = _gather(keys, batch, group), _gather(values, batch, group)
        mask = _visible(batch, group, causal=causal, window=window)
        q = query[group.tokens]
        out[group.tokens] = _attend(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks)
    return out


def _gather(part: Tensor, batch: AttentionBatch, group: QueryGroup) -> Tensor:
    """The group's KV in sequence order: [G, kv_heads, context, dim], context rounded up to whole blocks.

    Values behind a sequence's end are set to zero: if they are not finite, a mask would not be enough.
    """
    num_blocks = -(-group.max_context_len // batch.block_size)
    blocks = part[batch.block_tables[group.rows, :num_blocks].long()].transpose(1, 2).flatten(2, 3)
    behind = torch.arange(blocks.shape[2], device=blocks.device) >= batch.context_lens[group.rows][:, None]
    return blocks.masked_fill_(behind[:, None, :, None], 0)


def _visible(batch: AttentionBatch, group: QueryGroup, *, causal: bool, window: int | None) -> Tensor:
    """bool [G, query_len, context]: true for keys that a new token sees; a window includes the token itself."""
    num_blocks = -(-group.max_context_len // batch.block_size)
    key_position = torch.arange(num_blocks * batch.block_size, device=batch.slots.device)
    position = batch.positions[group.tokens][:, :, None]
    mask = key_position < batch.context_lens[group.rows][:, None, None]
    if causal:
        mask = mask & (key_position <= position)
    if window is not None:
        mask = mask & ((key_position - position).abs() < window)
    return mask.expand(-1, group.query_len, -1)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """query [G, Q, heads, dim], key and value [G, kv_heads, C, dim], mask [G, Q, C] → [G, Q, heads, value_dim]."""
    rows, query_len, heads, _ = query.shape
    kv_heads = key.shape[1]
    # heads of one KV head become more rows of queries: [G, kv_heads, (heads / kv_heads) * Q, key_dim]
    packed = query.transpose(1, 2).reshape(rows, kv_heads, -1, query.shape[3])
    packed_mask = mask.repeat(1, heads // kv_heads, 1)[:, None]
    if softcap is None and sinks is None:
        out = functional.scaled_dot_product_attention(
            packed, key.to(query.dtype), value.to(query.dtype), packed_mask, scale=scale
        )
    else:
        packed_sinks = None if sinks is None else sinks.view(kv_heads, -1, 1).expand(-1, -1, query_len).flatten(1)
        out = _explicit(packed, key, value, packed_mask, scale=scale, softcap=softcap, sinks=packed_sinks)
    return out.reshape(rows, heads, query_len, -1).transpose(1, 2)


def _explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Softmax in float32: query [G, kv_heads, R, dim], mask [G, 1, R, C], sinks [kv_heads, R]."""
    scores = query.float() @ key.float().transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        # a sink is one more logit in the softmax, without a value
        column = sinks.float()[None, :, :, None].expand(scores.shape[0], -1, -1, 1)
        probabilities = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    return (probabilities @ value.float()).to(query.dtype)
