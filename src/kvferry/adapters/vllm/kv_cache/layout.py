"""The addresses and the layout of vLLM's KV in memory.

Each attention backend arranges K and V within a page in its own way, so pages are moved whole. Everything that the
arrangement depends on is part of `KVLayout.packing`: two instances that differ in it refuse each other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from vllm import __version__
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvferry.adapters.vllm.kv_cache.arrangement import page_digest
from kvferry.adapters.vllm.versions import release_line
from kvferry.core.blocks.layout import KVLayout, LayerLayout
from kvferry.core.errors import ConfigError
from kvferry.transport.memory import BlockGeometry, BlockMemory, LayerPlace, Region

RECURRENT = {"linear_attention", "mamba", "mamba2", "M", "conv", "recurrent", "hybrid", "hybrid_sliding"}
"""Names in configurations of layers that are, or contain, a recurrence."""
_LAYER_KINDS = ("layer_types", "layers_block_type", "block_types", "hybrid_override_pattern")
"""Keys of configurations that list the kinds of layers."""

ONE_GROUP_HINT = "start vLLM with --disable-hybrid-kv-cache-manager"


@dataclass(frozen=True)
class GroupShape:
    """One of vLLM's KV cache groups: layers with one block table, in the model's order."""

    layer_names: tuple[str, ...]
    specs: tuple[Any, ...]
    block_size: int
    window: int | None = None
    """The sliding window in tokens, including the token itself; blocks before it are freed. None: full attention."""


@dataclass(frozen=True)
class KVCacheShape:
    """vLLM's KV cache groups. The blocks of all groups are equal: a block has one page for each layer of its group. The
    place of the k-th layer's page in a block is *layer position* k (not a slot of one token, as in vLLM's
    `slot_mapping`)."""

    groups: tuple[GroupShape, ...]

    @property
    def widest(self) -> GroupShape:
        """A group that has a layer at every layer position."""
        return max(self.groups, key=lambda group: len(group.layer_names))

    @property
    def layer_names(self) -> list[str]:
        """The layers of all groups."""
        return [name for group in self.groups for name in group.layer_names]

    @property
    def block_size(self) -> int:
        """Tokens in a block, of any group."""
        return self.groups[0].block_size

    @property
    def windows(self) -> list[int | None]:
        """The window of each group."""
        return [group.window for group in self.groups]


def cache_shape(vllm_config: Any, kv_cache_config: KVCacheConfig, *, supports_groups: bool = False) -> KVCacheShape:
    """The shape of the KV cache. Raises `ConfigError` if this adapter cannot move the KV of this model, or with this
    configuration of vLLM.

    `supports_groups`: the connector supports several groups.
    """
    _require_plain_parallelism(vllm_config.parallel_config)
    require_attention_only(vllm_config.model_config)
    if vllm_config.model_config.enable_sleep_mode:
        raise ConfigError(
            "sleep mode frees the memory of the KV cache, which other instances may be reading; start vLLM without"
            " --enable-sleep-mode"
        )
    _require_exact_reuse(vllm_config)
    groups = kv_cache_config.kv_cache_groups
    recurrent = [group.layer_names[0] for group in groups if any(isinstance(spec, MambaSpec) for spec in _specs(group))]
    if recurrent or not groups:
        raise _unsupported_state(f"layers such as {recurrent[0]}" if recurrent else "no layer with KV")
    max_model_len = vllm_config.model_config.max_model_len
    if len(groups) == 1:
        return KVCacheShape((_single_group_shape(groups[0], max_model_len),))
    if not supports_groups:
        raise ConfigError(
            f"this model has {len(groups)} KV cache groups, and this connector moves one; {ONE_GROUP_HINT}"
        )
    shape = KVCacheShape(tuple(_group_shape(group, max_model_len) for group in groups))
    _require_equal_blocks(shape)
    return shape


def require_attention_only(model_config: Any) -> None:
    """Raise `ConfigError` for models with recurrent layers, whatever form their state has. `model_config`: vLLM's."""
    configs = (model_config.hf_config, model_config.hf_text_config)
    kinds = {str(kind) for config in configs for name in _LAYER_KINDS for kind in getattr(config, name, None) or ()}
    if recurrent := sorted(kinds & RECURRENT):
        raise _unsupported_state(f"layers of the kind {', '.join(recurrent)}")
    if model_config.is_attention_free:
        raise _unsupported_state("no attention")
    if model_config.is_hybrid:
        raise _unsupported_state("recurrent layers beside attention")
    if model_config.using_transformers_backend() and any(map(_is_stateful, configs)):
        raise _unsupported_state("a state beside the KV of its tokens")


def _is_stateful(config: Any) -> bool:
    """True if transformers has a class for this configuration and the class is stateful."""
    return getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "_is_stateful", False)


def _require_exact_reuse(vllm_config: Any) -> None:
    """Raise `ConfigError` if vLLM computes other values after cached KV than within one prompt. vLLM's plain kernels
    for MLA on CPUs do so (the AMX kernels were not tried). For them, vLLM itself turns off chunked prefill and prefix
    caching."""
    uses_context = vllm_config.scheduler_config.enable_chunked_prefill or vllm_config.cache_config.enable_prefix_caching
    if vllm_config.device_config.device_type == "cpu" and vllm_config.model_config.use_mla and not uses_context:
        raise ConfigError(
            "on this CPU, vLLM's latent attention (MLA) computes other values after cached KV than within a prompt, so"
            " that answers after a hand-off would differ (vLLM turns prefix caching off for the same reason); serve the"
            " model without kvferry's connectors"
        )


def _unsupported_state(reason: str) -> ConfigError:
    return ConfigError(
        f"this model has {reason}: the state of recurrent layers is not in KV blocks, and kvferry can neither hand it"
        " off nor store it; serve the model without kvferry's connectors"
    )


def _single_group_shape(group: KVCacheGroupSpec, max_model_len: int) -> GroupShape:
    shape = _shape_of(group)
    for name, spec in zip(shape.layer_names, shape.specs, strict=True):
        _require_whole_history(name, spec, max_model_len)
    return shape


def _shape_of(group: KVCacheGroupSpec, window: int | None = None) -> GroupShape:
    return GroupShape(tuple(group.layer_names), _specs(group), group.kv_cache_spec.block_size, window)


def _specs(group: KVCacheGroupSpec) -> tuple[Any, ...]:
    spec = group.kv_cache_spec
    uniform = isinstance(spec, UniformTypeKVCacheSpecs)
    return tuple(spec.kv_cache_specs[name] if uniform else spec for name in group.layer_names)


def _group_shape(group: KVCacheGroupSpec, max_model_len: int) -> GroupShape:
    spec = group.kv_cache_spec
    is_draft = group.is_eagle_group or getattr(spec, "is_draft", False)  # vLLM 0.33 has the latter
    is_special = is_draft or group.host_resident or not group.enable_kv_transfer
    if not is_special and type(spec) is FullAttentionSpec:
        return _shape_of(group)
    if (
        not is_special
        and type(spec) is SlidingWindowSpec
        and spec.sliding_window > 1
        and not spec.extra_retained_tokens
    ):
        return _shape_of(group, spec.sliding_window if spec.sliding_window < max_model_len else None)
    kind = f"{type(spec).__name__}{', for speculative decoding' if is_draft else ''}"
    raise ConfigError(
        f"layer {group.layer_names[0]} and others keep KV in a group of their own ({kind}), and beside full attention"
        f" kvferry moves plain sliding windows only; {ONE_GROUP_HINT}"
    )


def _require_equal_blocks(shape: KVCacheShape) -> None:
    if all(shape.windows):
        raise ConfigError(f"no layer of this model keeps all of its KV; {ONE_GROUP_HINT}")
    if len(sizes := {group.block_size for group in shape.groups}) > 1:
        raise ConfigError(
            f"this model's KV cache groups have blocks of {sorted(sizes)} tokens, and kvferry moves groups of one size:"
            f" {ONE_GROUP_HINT}"
        )
    if len({spec.page_size_bytes for group in shape.groups for spec in group.specs}) > 1:
        raise ConfigError(f"this model's KV cache groups have pages of different sizes; {ONE_GROUP_HINT}")


def _require_plain_parallelism(parallel: Any) -> None:
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"kvferry's connectors do not support {name} > 1; use tensor parallelism")


def _require_whole_history(name: str, spec: Any, max_model_len: int) -> None:
    """Raise `ConfigError` for layers whose first blocks vLLM frees while the request runs, and for kinds of attention
    that do not keep the KV of each token."""
    if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
        return
    if type(spec) is SlidingWindowSpec and spec.sliding_window >= max_model_len:
        return
    raise ConfigError(
        f"layer {name} keeps its KV as {type(spec).__name__}, and kvferry moves the KV of full attention only (a"
        " sliding window as long as --max-model-len counts as full attention)"
    )


def kv_layout(
    vllm_config: Any,
    shape: KVCacheShape,
    kv_caches: Mapping[str, torch.Tensor],
    fingerprint: str,
    rank: int,
    *,
    mix_kernels: bool = False,
) -> KVLayout:
    """The layout of the pages of these tensors on this tensor-parallel rank. `mix_kernels`: leave `KVLayout.kernels`
    empty."""
    is_float32 = vllm_config.model_config.dtype == torch.float32
    return KVLayout(
        model_fingerprint=fingerprint,
        layers=tuple(
            LayerLayout(spec.num_kv_heads, spec.head_size, spec.head_size_v, spec.page_size_bytes)
            for spec in shape.widest.specs
        ),
        dtype=str(shape.widest.specs[0].dtype).removeprefix("torch."),
        block_size=shape.block_size,
        packing=_packing(vllm_config, shape, kv_caches),
        kernels="" if mix_kernels or is_float32 else _kernels(),
        tp_size=vllm_config.parallel_config.tensor_parallel_size,
        tp_rank=rank,
    )


def _kernels() -> str:
    """The kind of processor or device. vLLM and PyTorch choose their kernels by it."""
    if current_platform.is_cpu():
        amx = torch.cpu._is_amx_tile_supported()
        return f"{torch.backends.cpu.get_cpu_capability()}{' AMX' if amx else ''}"
    return f"{current_platform.device_type} {current_platform.get_device_capability()}"


def _packing(vllm_config: Any, shape: KVCacheShape, kv_caches: Mapping[str, torch.Tensor]) -> str:
    """A text with the order of the axes; for each kind of layer, the backend, its variant, the page's shape and its
    arrangement; and the layer position of each layer."""
    order = vllm_config.cache_config.get_resolved_kv_cache_layout()
    _require_compact_pages(order)
    layers = vllm_config.compilation_config.static_forward_context
    specs = {name: spec for group in shape.groups for name, spec in zip(group.layer_names, group.specs, strict=True)}
    first_of = {_kind(layers[name], kv_caches[name], shape.block_size): name for name in reversed(shape.layer_names)}
    kinds = [
        f"{kind} {_arrangement(layers[name], kv_caches[name], specs[name])}" for kind, name in sorted(first_of.items())
    ]
    return f"{order.name} {' '.join(kinds)}{_grouping(shape)}"


def _arrangement(layer: Any, cache: torch.Tensor, spec: Any) -> str:
    """The digest of a page that the backend has written. For a backend that cannot be called, the release of vLLM."""
    return page_digest(layer, cache, spec.page_size_bytes) or f"vllm-{release_line(__version__)}"


def _grouping(shape: KVCacheShape) -> str:
    """A text that identifies the division of layers into groups, and their order: a layer position alone does not
    identify a layer."""
    facts = repr([(group.layer_names, group.window) for group in shape.groups])
    return f" {len(shape.groups)} groups {hashlib.sha256(facts.encode()).hexdigest()[:8]}"


def _kind(layer: Any, cache: torch.Tensor, block_size: int) -> str:
    """A text with the backend, its variant and the page's shape. It has no block size, which is compared separately,
    unless the backend divides blocks into smaller ones."""
    backend = layer.get_attn_backend().get_name()
    variant = getattr(layer, "isa", "")  # on CPUs, the arrangement of K depends on the instruction set
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
    """vLLM's KV cache: one allocation, in which each layer has a first page and a stride.

    Raises `ConfigError` if the groups do not share their pages.
    """
    layer_places: dict[str, LayerPlace] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        for index, name in enumerate(tensor.layers):
            layer_places[name] = LayerPlace(tensor.offset + index * tensor.layer_stride, tensor.block_stride)
    position_places = tuple(layer_places[name] for name in shape.widest.layer_names)
    for group in shape.groups:
        group_places = tuple(layer_places[name] for name in group.layer_names)
        if group_places != position_places[: len(group_places)]:
            raise ConfigError(f"this vLLM does not lay its KV cache groups over one another; {ONE_GROUP_HINT}")
    return BlockMemory(BlockGeometry(layout, kv_cache_config.num_blocks, position_places), (region,), device)


def allocation(kv_caches: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """Address and bytes of the one allocation behind all tensors. Raises `ConfigError` if there are several."""
    allocations = {
        (storage.data_ptr(), storage.nbytes()) for storage in map(torch.Tensor.untyped_storage, kv_caches.values())
    }
    if len(allocations) != 1:
        raise ConfigError(f"vLLM keeps its KV cache in {len(allocations)} allocations; kvferry knows one")
    return allocations.pop()
