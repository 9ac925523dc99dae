"""Which of the model's KV heads a tensor-parallel rank stores. Some families keep all heads on every rank, so the ranks
compare what they would store."""

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
    layers: Sequence[LayerLayout], keys: Sequence[Tensor], place: RankPlacement
) -> tuple[LayerLayout, ...]:
    """The layers with `first_kv_head` and `total_kv_heads` filled in. `keys`: each layer's keys [1, kv_heads, T, dim]
    of the same tokens on all ranks. All ranks call it together."""
    if place.size == 1:
        return tuple(layers)
    ours = torch.cat([key.float().flatten() for key in keys])
    gathered = [torch.empty_like(ours) for _ in range(place.size)]
    dist.all_gather(gathered, ours)
    by_layer = zip(*(one.split([key.numel() for key in keys]) for one in gathered), strict=True)
    return tuple(
        layer if _are_equal(of_ranks) else _split(layer, place)
        for layer, of_ranks in zip(layers, by_layer, strict=True)
    )


def _are_equal(keys: Sequence[Tensor]) -> bool:
    first = keys[0]
    return all(bool((other - first).abs().max() <= TOLERANCE * first.abs().max()) for other in keys[1:])


def _split(layer: LayerLayout, place: RankPlacement) -> LayerLayout:
    count = layer.num_kv_heads
    return msgspec.structs.replace(layer, first_kv_head=place.rank * count, total_kv_heads=place.size * count)
