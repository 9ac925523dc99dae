"""Where vLLM keeps KV, and what its bytes mean.

Inside a page each attention backend arranges K and V in a way of its own, so pages are moved whole. Everything that
the arrangement depends on goes into `KVLayout.packing`: two instances that differ in it refuse each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm import __version__
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvferry.adapters.vllm.versions import release_line
from kvferry.core.errors import ConfigError
from kvferry.core.layout import KVLayout, LayerLayout
from kvferry.transport.memory import BlockGeometry, BlockMemory, LayerPlace, Region


@dataclass(frozen=True)
class KVCacheShape:
    """vLLM's one KV cache group, layer by layer in the model's order."""

    layer_names: tuple[str, ...]
    specs: tuple[Any, ...]
    block_size: int


def cache_shape(vllm_config: Any, kv_cache_config: KVCacheConfig) -> KVCacheShape:
    """Raises `ConfigError` when the model, or how vLLM runs it, keeps KV in a way that this adapter cannot move."""
    _require_plain_parallelism(vllm_config.parallel_config)
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ConfigError(
            f"this model has {len(groups)} KV cache groups, and kvferry moves one; start vLLM with"
            " --disable-hybrid-kv-cache-manager (models with recurrent layers cannot be handed off)"
        )
    [group] = groups
    names, spec = tuple(group.layer_names), group.kv_cache_spec
    uniform = isinstance(spec, UniformTypeKVCacheSpecs)
    specs = tuple(spec.kv_cache_specs[name] if uniform else spec for name in names)
    for name, layer_spec in zip(names, specs, strict=True):
        _require_whole_history(name, layer_spec, vllm_config.model_config.max_model_len)
    return KVCacheShape(names, specs, spec.block_size)


def _require_plain_parallelism(parallel: Any) -> None:
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"kvferry's connectors do not support {name} > 1; use tensor parallelism")


def _require_whole_history(name: str, spec: Any, max_model_len: int) -> None:
    """Layers whose early blocks vLLM gives back while the request runs leave nothing to hand off."""
    if isinstance(spec, FullAttentionSpec):
        return
    if isinstance(spec, SlidingWindowSpec) and spec.sliding_window >= max_model_len:
        return
    raise ConfigError(
        f"layer {name} keeps its KV as {type(spec).__name__}, of which vLLM gives early blocks back while a request"
        " runs: kvferry cannot hand such a model off (a sliding window as long as --max-model-len is fine)"
    )


def kv_layout(
    vllm_config: Any, shape: KVCacheShape, kv_caches: Mapping[str, torch.Tensor], fingerprint: str, rank: int
) -> KVLayout:
    """What pages of these tensors mean, on this tensor-parallel rank."""
    return KVLayout(
        model_fingerprint=fingerprint,
        layers=tuple(
            LayerLayout(spec.num_kv_heads, spec.head_size, spec.head_size_v, spec.page_size_bytes)
            for spec in shape.specs
        ),
        dtype=str(shape.specs[0].dtype).removeprefix("torch."),
        block_size=shape.block_size,
        packing=_packing(vllm_config, shape, kv_caches),
        tp_size=vllm_config.parallel_config.tensor_parallel_size,
        tp_rank=rank,
    )


def _packing(vllm_config: Any, shape: KVCacheShape, kv_caches: Mapping[str, torch.Tensor]) -> str:
    """Release of vLLM, order of the axes, and for each kind of layer the backend, its variant and the page's shape."""
    order = vllm_config.cache_config.get_resolved_kv_cache_layout()
    _require_compact_pages(order)
    layers = vllm_config.compilation_config.static_forward_context
    kinds = dict.fromkeys(_kind(layers[name], kv_caches[name], shape.block_size) for name in shape.layer_names)
    return f"vllm-{release_line(__version__)} {order.name} {' '.join(kinds)}"


def _kind(layer: Any, cache: torch.Tensor, block_size: int) -> str:
    """The block size is compared by itself; here counts whether the backend cuts blocks into smaller ones."""
    backend = layer.get_attn_backend().get_name()
    variant = getattr(layer, "isa", "")  # on CPUs, the instruction set decides how K is arranged
    heads, *tokens, content = cache.shape[1:]
    page = [heads, *("block" if size == block_size else size for size in tokens), content]
    return f"{backend}{variant and '/' + variant}{page}"


def _require_compact_pages(order: KVCacheLayout) -> None:
    if not order.is_block_compact:
        raise ConfigError(
            f"KV cache layout {order.name} spreads the pages of a block, and kvferry moves whole pages; set"
            " VLLM_KV_CACHE_LAYOUT=LBNHC or LBHNC"
        )


def block_memory(
    layout: KVLayout, shape: KVCacheShape, kv_cache_config: KVCacheConfig, region: Region, device: str
) -> BlockMemory:
    """vLLM's KV cache: one allocation, in which each layer has a first page and a stride."""
    places: dict[str, LayerPlace] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        for index, name in enumerate(tensor.layers):
            places[name] = LayerPlace(tensor.offset + index * tensor.layer_stride, tensor.block_stride)
    ordered = tuple(places[name] for name in shape.layer_names)
    return BlockMemory(BlockGeometry(layout, kv_cache_config.num_blocks, ordered), (region,), device)


def allocation(kv_caches: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """Address and bytes of the one allocation behind all tensors. Raises `ConfigError` when there are several."""
    found = {
        (storage.data_ptr(), storage.nbytes()) for storage in map(torch.Tensor.untyped_storage, kv_caches.values())
    }
    if len(found) != 1:
        raise ConfigError(f"vLLM keeps its KV cache in {len(found)} allocations; kvferry knows one")
    return found.pop()
