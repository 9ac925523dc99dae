"""The KV heads that a tensor-parallel rank stores. Some families keep all heads on every rank, so the ranks compare
their keys."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from kvferry.core.blocks.layout import LayerLayout
from kvferry.engine.model.rank_placement import RankPlacement

TOLERANCE = 1e-2
"""Relative to the largest value: keys of two ranks that differ by less are the same heads, computed twice."""


def locate_heads(
    layers: Sequence[LayerLayout], keys: Sequence[Tensor], placement: RankPlacement
) -> tuple[LayerLayout, ...]:
    """The layers with `first_kv_head` and `total_kv_heads` filled in. `keys`: each layer's keys [1, kv_heads, T, dim]
    of the same tokens on all ranks. All ranks call it together."""
    if placement.size == 1:
        return tuple(layers)
    own_keys = torch.cat([key.float().flatten() for key in keys])
    gathered = [torch.empty_like(own_keys) for _ in range(placement.size)]
    dist.all_gather(gathered, own_keys)
    by_layer = zip(*(keys_of_rank.split([key.numel() for key in keys]) for keys_of_rank in gathered), strict=True)
    return tuple(
        layer if _are_equal(keys_by_rank) else _split(layer, placement)
        for layer, keys_by_rank in zip(layers, by_layer, strict=True)
    )


def _are_equal(keys: Sequence[Tensor]) -> bool:
    first = keys[0]
    return all(bool((other - first).abs().max() <= TOLERANCE * first.abs().max()) for other in keys[1:])


def _split(layer: LayerLayout, placement: RankPlacement) -> LayerLayout:
    count = layer.num_kv_heads
    return msgspec.structs.replace(layer, first_kv_head=placement.rank * count, total_kv_heads=placement.size * count)
