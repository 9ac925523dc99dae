"""The assignment of KV heads: the ranks of another instance that each rank reads from, and the heads it reads there.

Pure functions of two layouts. Every rank of either side computes the same result by itself, so nothing has to be agreed
on the wire: neither who reads what, nor how many consumers a producer's rank waits for.

Heads are on ranks in order: with `total` heads and `num` on each rank, there are `total / num` groups of heads, and
`tp_size / groups` neighbouring ranks hold each group (1: split; `tp_size`: not split at all).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import msgspec

from kvferry.core.blocks.layout import KVLayout, LayerLayout
from kvferry.core.errors import LayoutMismatch

HeadRange = range
"""Heads by their number in the whole model; may be empty."""


@dataclass(frozen=True)
class Share:
    """The heads that one consumer rank reads from one producer rank, by layer. The consumer is number `reader`, from 0,
    of the `num_readers` ranks that read from that producer rank."""

    heads: tuple[HeadRange, ...]
    reader: int
    num_readers: int


def on_rank(layout: KVLayout, tp_rank: int) -> KVLayout:
    """The layout of another rank of the same instance. Raises `LayoutMismatch` if heads are not on ranks in order."""
    if layout.is_opaque:
        return msgspec.structs.replace(layout, tp_rank=tp_rank)
    layers = tuple(
        msgspec.structs.replace(layer, first_kv_head=_first_head(layout, index, tp_rank))
        for index, layer in enumerate(layout.layers)
    )
    return msgspec.structs.replace(layout, layers=layers, tp_rank=tp_rank)


def require_ordered(layout: KVLayout) -> None:
    """Raise `LayoutMismatch` unless this rank holds the heads that follow from its number."""
    if layout.tp_size < 1 or not 0 <= layout.tp_rank < layout.tp_size:
        raise LayoutMismatch("tp_rank", f"0 to {layout.tp_size - 1}", layout.tp_rank)
    if layout.is_opaque:
        return
    for index, layer in enumerate(layout.layers):
        first = _first_head(layout, index, layout.tp_rank)
        if layer.first_kv_head != first:
            raise LayoutMismatch(f"layers[{index}].first_kv_head", first, layer.first_kv_head)


@cache
def sources(local: KVLayout, remote: KVLayout) -> tuple[int, ...]:
    """The producer ranks that our rank reads from; `remote` is the layout of any of them. Raises `LayoutMismatch`."""
    local.require_reconcilable(remote)
    if local.is_opaque:
        return (local.tp_rank,)
    ranks = {rank for index in range(local.num_layers) for rank in _cover(local, remote, index)}
    return tuple(sorted(ranks))


def orphans(local: KVLayout, remote: KVLayout) -> tuple[int, ...]:
    """The producer ranks that no consumer rank reads from, and that our rank has to release."""
    if local.is_opaque:
        return ()
    ranks = range(local.tp_rank, remote.tp_size, local.tp_size)
    return tuple(rank for rank in ranks if not _readers(local, remote, rank))


@cache
def share(local: KVLayout, remote: KVLayout) -> Share:
    """The heads that our rank reads from the rank with layout `remote`. Raises `LayoutMismatch`, also if it should read
    nothing."""
    local.require_reconcilable(remote)
    if local.is_opaque:
        return Share(tuple(HeadRange(layer.first_kv_head, layer.end_kv_head) for layer in local.layers), 0, 1)
    require_ordered(remote)
    readers = _readers(local, remote, remote.tp_rank)
    if local.tp_rank not in readers:
        raise LayoutMismatch("tp_rank", f"one of {sources(local, remote)}", remote.tp_rank)
    heads = tuple(_cover(local, remote, index).get(remote.tp_rank, HeadRange(0)) for index in range(local.num_layers))
    return Share(heads, readers.index(local.tp_rank), len(readers))


def _readers(local: KVLayout, remote: KVLayout, their_rank: int) -> list[int]:
    """Our ranks that read from their rank `their_rank`."""
    return [rank for rank in range(local.tp_size) if their_rank in sources(on_rank(local, rank), remote)]


def _cover(local: KVLayout, remote: KVLayout, index: int) -> dict[int, HeadRange]:
    """Their ranks, and the heads of each, that together are our rank's heads of one layer, each head once.

    If several ranks hold the same heads, our rank chooses by its own number, so that readers are spread over them.
    """
    local_layer, layer = local.layers[index], remote.layers[index]
    num_copies = _num_copies(remote, index)
    heads_by_rank = {}
    for group in range(
        local_layer.first_kv_head // layer.num_kv_heads, -(-local_layer.end_kv_head // layer.num_kv_heads)
    ):
        first = group * layer.num_kv_heads
        rank = group * num_copies + local.tp_rank % num_copies
        heads_by_rank[rank] = HeadRange(
            max(first, local_layer.first_kv_head), min(first + layer.num_kv_heads, local_layer.end_kv_head)
        )
    return heads_by_rank


def _first_head(layout: KVLayout, index: int, tp_rank: int) -> int:
    return tp_rank // _num_copies(layout, index) * layout.layers[index].num_kv_heads


def _num_copies(layout: KVLayout, index: int) -> int:
    """Number of ranks that hold the same heads of a layer."""
    layer: LayerLayout = layout.layers[index]
    total, num = layer.model_kv_heads, layer.num_kv_heads
    num_groups = total // num if num > 0 and total % num == 0 else 0
    if not num_groups or layout.tp_size % num_groups:
        raise LayoutMismatch(
            f"layers[{index}].num_kv_heads", f"a share of {total} heads on {layout.tp_size} ranks", num
        )
    return layout.tp_size // num_groups
